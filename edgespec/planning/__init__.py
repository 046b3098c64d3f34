"""What to run where, and how far to draft."""
