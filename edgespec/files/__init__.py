"""Reads model files as hostile input and writes files atomically."""
