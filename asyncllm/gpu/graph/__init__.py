"""Device streams, CUDA graphs, and recorded steps of the native library."""
