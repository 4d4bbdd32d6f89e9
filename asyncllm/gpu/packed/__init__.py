"""Files of packed weights: an engine's first start writes them, later starts map them."""
