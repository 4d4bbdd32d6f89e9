"""SHORT_TEXT_CHARACTERS, LONG_TEXT_CHARACTERS: text lengths that decide which thread tokenises."""

SHORT_TEXT_CHARACTERS = 512
"""Maximum number of characters of a text that an event loop's thread tokenises. Tokenising takes up
to a third of a millisecond for this length, and up to 3 ms for 4,095 characters."""

LONG_TEXT_CHARACTERS = 4096
"""Texts of at least this many characters are tokenised on the thread for long texts, so that
shorter texts do not wait. The thread also decodes lists of at least this many tokens."""
