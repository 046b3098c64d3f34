"""Loaded models, a plan, conversations: what the public API is made of."""
