"""What the engine and its kernels do on a GPU: correctness, kernel times, the whole engine."""
