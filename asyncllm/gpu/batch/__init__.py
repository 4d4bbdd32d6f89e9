"""The persistent batch, and a step's inputs on the host and on the device."""
