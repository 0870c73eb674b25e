"""Ways of decoding compared on one loaded pair, with intervals: for ``bench``, ``doctor --rank`` and training."""
