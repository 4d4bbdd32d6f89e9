"""The runtime: what joins the public API, the core and the device side to a running engine."""
