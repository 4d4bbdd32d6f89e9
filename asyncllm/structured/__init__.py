"""Structured output: grammars that restrict an output by masking tokens."""
