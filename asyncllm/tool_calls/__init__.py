"""Tool calls: schemas for the prompt, and calls and reasoning parsed from the model's text."""
