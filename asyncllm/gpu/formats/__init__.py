"""Weight formats: the tensors of quantised checkpoints as plain ones."""
