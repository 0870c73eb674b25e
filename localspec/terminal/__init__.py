"""Printing on a terminal, and reading from it, safely."""
