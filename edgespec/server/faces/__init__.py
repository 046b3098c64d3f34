"""One module an API: a reader of its requests and a writer of its answers."""
