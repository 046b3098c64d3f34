"""Files of the Hugging Face hub, in the hub's own cache."""
