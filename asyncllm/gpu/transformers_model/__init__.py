"""Runs transformers' own modules of any decoder on this engine's runner, KV cache and ops."""
