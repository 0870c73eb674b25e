"""How far to draft."""
