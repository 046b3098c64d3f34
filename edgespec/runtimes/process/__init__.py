"""Any runtime in a child process."""
