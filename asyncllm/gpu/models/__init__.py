"""Decoder models: layers, and their construction from a checkpoint's weights."""
