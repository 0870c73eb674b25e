"""This machine and its disk."""
