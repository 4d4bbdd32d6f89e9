"""LONG_TEXT: the length from which a text is tokenised on a worker thread."""

LONG_TEXT = 4096
"""Minimum number of characters of a text that an event loop's thread must not tokenise."""
