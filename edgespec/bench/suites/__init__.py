"""The built-in suites, one prompt a line."""
