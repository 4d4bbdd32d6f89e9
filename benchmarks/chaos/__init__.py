"""Everything at once, against one engine: see ``__main__``."""
