"""The terminal while a person types, and while nobody should."""

from __future__ import annotations

import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager


def read_message(prompt: str) -> str:
    """One message from the terminal. A trailing backslash goes on in the next line; with GNU
    readline, which knows a paste from typing, pasted lines are one message.

    Raises:
        EOFError, KeyboardInterrupt: for Ctrl-D and Ctrl-C.
    """
    _enable_line_editing()
    lines = [input(_in_bold(prompt))]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("… "))
    return "\n".join(lines).strip()


@contextmanager
def without_echo() -> Iterator[None]:
    """What is typed in here is not shown, and waits for the next prompt."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    quiet = list(before)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _in_bold(prompt: str) -> str:
    """With the escape codes marked as taking no space, as readline wants it."""
    return f"\001\033[1;36m\002{prompt}\001\033[0m\002"


def _enable_line_editing() -> None:
    """``input`` edits lines and has a history once the module is imported; some builds of
    Python lack it, some have libedit under its name."""
    try:
        import readline
    except ImportError:
        return
    if "GNU" in (readline.__doc__ or ""):
        # Python turns this off, for the sake of its own prompt.
        readline.parse_and_bind("set enable-bracketed-paste on")
