"""Reads GGUF files as hostile input."""
