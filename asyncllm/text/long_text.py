"""SHORT_TEXT and LONG_TEXT: the lengths that decide which thread tokenises a text."""

SHORT_TEXT = 512
"""Maximum number of characters of a text that an event loop's thread tokenises. It takes up to a
third of a millisecond, and a text of 4,095 characters up to 3 ms."""

LONG_TEXT = 4096
"""Minimum number of characters of a text that another worker thread tokenises than shorter ones,
which would wait too long for it."""
