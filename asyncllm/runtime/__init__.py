"""Runtime: joins the public API, the core and the device side into a running engine."""
