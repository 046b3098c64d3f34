"""Model files in, model files out: copies, re-quantised models, and drafters with a trimmed vocabulary."""
