"""What rounds cost and bring: curves, acceptance, contention."""
