"""Text: converts prompts to token ids and tokens to text. Imports neither ``core`` nor ``gpu``."""
