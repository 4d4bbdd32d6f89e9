"""Device streams, CUDA graphs, and the decode step that graphs hold."""
