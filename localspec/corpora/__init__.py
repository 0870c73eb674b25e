"""A person's own text, tokenised and sorted, on disk: what follows the end of a text wherever it stands in there."""
