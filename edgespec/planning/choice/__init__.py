"""Which plan is expected to be fastest, and why."""
