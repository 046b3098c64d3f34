"""Exports through Optimum in a separate Python environment."""
