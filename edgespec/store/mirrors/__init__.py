"""Hub files that are mirrored in Python packages, for machines without a hub."""
