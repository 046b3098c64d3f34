"""Model files as hostile input and precious output."""
