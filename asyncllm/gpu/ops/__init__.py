"""Op sets of the decoder and attention backends, with their protocols."""
