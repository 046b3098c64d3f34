"""Chat templates, rendered in a metered sandbox."""
