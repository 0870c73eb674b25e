"""How many tokens to draft, in each round."""
