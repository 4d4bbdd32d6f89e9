"""Text: prompts to token ids, tokens to text. Imports neither the core nor the device side."""
