"""Makes the small demo model: its text, its tokenizer, its training and its examination."""
