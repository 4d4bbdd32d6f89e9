"""Weight formats: read the tensors of quantised checkpoints as plain tensors."""
