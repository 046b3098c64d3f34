"""Plans for machines that are described in a file."""
