"""Checkpoints: a directory, a hub id or the packaged model, and what its files say."""
