"""Hugging Face folders, read and converted to GGUF."""
