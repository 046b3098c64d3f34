"""Hub files that are mirrored in Python packages, for machines without access to a hub."""
