"""Exports model files: copies, requantised models, and drafters with a trimmed output head."""
