"""LONG_TEXT: the length from which on a text takes long."""

LONG_TEXT = 4096
"""Texts of this many characters or more go to a worker thread."""
