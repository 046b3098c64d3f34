"""The command ``chat``."""
