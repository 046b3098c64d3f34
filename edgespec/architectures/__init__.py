"""What each architecture is: one small file an architecture, read alike from a GGUF header and from a config.json."""
