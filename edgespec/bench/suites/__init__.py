"""The suites that come with edgespec, one prompt a line, and the code that some of them quote."""
