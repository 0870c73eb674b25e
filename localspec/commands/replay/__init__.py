"""A recording of an answer as a web page that shows it happen again, round after round."""
