"""Streams, CUDA graphs and the decode step that is captured into them."""
