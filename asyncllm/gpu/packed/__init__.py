"""Files of packed weights: the first start writes them, later starts map them."""
