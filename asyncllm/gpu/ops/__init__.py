"""The op set of the decoder: its protocols, and the backends that implement them."""
