"""Exports GGUF models as GGUF: copied, requantised or trimmed."""
