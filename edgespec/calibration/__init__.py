"""Measuring models on this machine, and storing the measurements."""
