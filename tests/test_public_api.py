"""The public API against its recorded text."""

from __future__ import annotations

from pathlib import Path

from tests.public_api import lines

SNAPSHOT = Path(__file__).with_name("public_api.txt")


def test_names_and_signatures_equal_the_snapshot():
    # Meant to change? Write it anew: python -m tests.public_api > tests/public_api.txt
    assert "\n".join(lines()) + "\n" == SNAPSHOT.read_text(encoding="utf-8")
