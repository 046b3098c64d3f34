"""Drafting while the target verifies."""
