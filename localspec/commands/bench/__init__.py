"""``localspec bench``: answers to the same questions with and without drafts, interleaved.

``runner`` measures a ``record`` (SCHEMA.md), ``results`` analyses it, ``report`` shows it, ``compare`` compares two.
"""
