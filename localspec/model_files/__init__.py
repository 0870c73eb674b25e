"""Names to files on disk, and what is in a file."""
