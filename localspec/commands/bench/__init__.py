"""``localspec bench``: the same questions plainly and with drafts, in turns; what was measured and how sure it is.

A ``plan`` says what to measure; ``runner`` measures it with the machinery of ``measuring``. A ``record`` holds
everything that was measured; ``storage`` writes and reads it (SCHEMA.md). ``results`` draws the conclusions from it,
``report`` and ``charts`` show them, and ``compare`` sets two records against each other.
"""
