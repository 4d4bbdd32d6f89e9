"""The op set of the decoder: what every backend provides, and the backends."""
