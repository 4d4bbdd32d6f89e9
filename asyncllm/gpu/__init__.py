"""The device side: weights, KV memory, kernels and the model runner."""
