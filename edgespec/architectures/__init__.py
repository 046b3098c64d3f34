"""What each architecture is: one small file an architecture, for GGUF headers and config.json."""
