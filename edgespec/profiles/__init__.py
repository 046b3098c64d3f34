"""Named constraints and preferences (TOML), the catalogue of known models, and their loaders."""
