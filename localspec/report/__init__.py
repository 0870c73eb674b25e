"""What a command found as data (``model``), shown on a terminal, as Markdown and as an HTML page."""
