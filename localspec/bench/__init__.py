"""Measuring what speculation gains here: the prompts, written for this project, that it is measured on."""
