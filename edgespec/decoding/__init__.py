"""The exact draft-verify loop, on token ids only."""
