"""How and where a model could run on this machine."""
