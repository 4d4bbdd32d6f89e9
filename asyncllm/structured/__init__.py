"""Structured output: what an output has to look like, as a grammar that masks tokens."""
