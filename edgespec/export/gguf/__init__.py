"""GGUF in, GGUF out."""
