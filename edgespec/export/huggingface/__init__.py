"""Converts Hugging Face folders to GGUF."""
