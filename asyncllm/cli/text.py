"""Text for a terminal: removes control characters, and formats figures."""

from __future__ import annotations

import re

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
"""Unicode's category Cc, without the line feed."""


def strip_control_characters(text: str) -> str:
    """Remove control characters, so that a model cannot move the cursor or recolour the screen.
    Line ends stay; tabs become spaces."""
    return _CONTROL_CHARACTERS.sub("", text.replace("\t", " "))


def format_seconds(value: float | None) -> str:
    """Format a duration with two or three digits: 840 µs, 12 ms, 1.25 s."""
    if value is None:
        return "–"
    if value < 0.0009995:
        return f"{value * 1e6:.0f} µs"
    if value < 0.0995:
        return f"{value * 1e3:.1f} ms" if value < 0.00995 else f"{value * 1e3:.0f} ms"
    return f"{value * 1e3:.0f} ms" if value < 0.9995 else f"{value:.2f} s"


def format_bytes(count: float) -> str:
    """Format a number of bytes with three digits: 12.5 MB, 1.25 GB."""
    return f"{count / 1e6:.3g} MB" if count < 0.9995e9 else f"{count / 1e9:.3g} GB"


def format_rate(tokens: float, duration: float) -> str:
    """Format tokens per second."""
    return "–" if duration <= 0 else f"{tokens / duration:.0f} tok/s"


def one_line(text: str, width: int) -> str:
    """Shorten ``text`` to one line of at most ``width`` characters."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: max(width - 1, 0)].rstrip() + "…"
