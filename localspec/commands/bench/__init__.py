"""``localspec bench``: the same questions plainly and with guesses, in turns; what was measured and how sure it is.

``questions`` are asked in ``arms`` by an ``engine``, in the order that a ``schedule`` gives them, while ``conditions``
watches the machine; ``runner`` puts these together. A ``record`` holds everything that was measured; ``storage`` writes
and reads it (SCHEMA.md). ``results`` and ``statistics`` draw the conclusions from it, ``report`` and ``charts`` show
them, and ``compare`` sets two records against each other.
"""
