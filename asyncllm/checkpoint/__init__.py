"""Checkpoints: finding a model's files, and reading its configuration and tensors."""
