"""A target with its drafters: found, measured, ranked, loaded and calibrated."""
