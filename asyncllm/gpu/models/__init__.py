"""The decoder and the table of architectures it covers."""
