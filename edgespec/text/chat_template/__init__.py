"""Chat templates, rendered in a sandbox of our own."""
