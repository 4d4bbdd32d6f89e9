"""SHORT_TEXT_CHARACTERS, LONG_TEXT_CHARACTERS: text lengths that decide which thread tokenises."""

SHORT_TEXT_CHARACTERS = 512
"""Maximum number of characters of a text that an event loop's thread tokenises. It takes up to a
third of a millisecond, and a text of 4,095 characters up to 3 ms."""

LONG_TEXT_CHARACTERS = 4096
"""Minimum number of characters of a text that another worker thread tokenises than shorter ones,
which would wait too long for it. Also the minimum number of tokens that this thread decodes."""
