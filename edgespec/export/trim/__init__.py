"""Drafters with trimmed output heads."""
