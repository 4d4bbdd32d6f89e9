"""The persistent batch, and the inputs of a step on the host and on the device."""
