"""GGUF files, read as hostile input."""
