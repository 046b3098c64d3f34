"""The command ``export``."""
