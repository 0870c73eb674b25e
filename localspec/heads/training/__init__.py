"""Heads, trained where they are used: examples by the target itself, a network, and a head file in the end."""
