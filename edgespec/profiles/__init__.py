"""Named constraints and preferences, described machines (TOML), and their loaders."""
