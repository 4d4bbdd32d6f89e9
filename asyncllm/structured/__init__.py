"""Structured output: grammars that restrict an output by masking its next token."""
