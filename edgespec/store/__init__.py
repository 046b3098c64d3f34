"""Where model files come from and where they are kept."""
