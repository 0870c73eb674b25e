"""A loaded pair of models behind one worker thread."""
