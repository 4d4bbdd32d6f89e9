"""The decoder's op sets, the attention backends, and the protocols of both."""
