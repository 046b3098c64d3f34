"""Chooses the rows of trimmed output heads."""
