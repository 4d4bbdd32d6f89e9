"""Decoder models: layers, the families composed of them, and the table of architectures."""
