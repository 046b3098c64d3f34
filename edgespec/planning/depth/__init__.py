"""How far to draft in each round."""
