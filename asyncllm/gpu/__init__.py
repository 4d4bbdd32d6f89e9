"""The part of the engine on the device: weights, KV memory, kernels and the model runner."""
