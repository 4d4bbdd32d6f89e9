"""Decoder models: layers, the families made of them, and the table of architectures."""
