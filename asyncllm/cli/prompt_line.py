"""Terminal input: reads messages, and hides input while an answer is printed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

try:
    import termios
except ImportError:  # Windows has no termios.
    termios = None


def read_message(prompt: str | None) -> str:
    """Read one message from standard input, after ``prompt`` (None for a pipe). A trailing
    backslash continues it on the next line. With GNU readline, which recognises pastes, pasted
    lines are one message.

    Raises:
        EOFError, KeyboardInterrupt: for Ctrl-D and Ctrl-C.
    """
    first_prompt, next_prompt = ("", "") if prompt is None else (_bold_prompt(prompt), "… ")
    lines = [input(first_prompt)]
    with suppress(EOFError):  # The end of the input ends the message.
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input(next_prompt))
    return "\n".join(lines).strip()


@contextmanager
def without_echo() -> Iterator[None]:
    """Hide keyboard input, if the system can. The input is kept for the next prompt."""
    if termios is None:
        yield
        return
    terminal = sys.stdin.fileno()
    settings = termios.tcgetattr(terminal)
    silent_settings = list(settings)
    silent_settings[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSADRAIN, silent_settings)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, settings)


def _bold_prompt(prompt: str) -> str:
    """Make the prompt bold if readline is available. Importing readline adds line editing to
    ``input``; some builds of Python lack the module, others have libedit under the same name. The
    escape codes are marked as zero-width for readline."""
    try:
        import readline
    except ImportError:
        return prompt
    if "GNU" in (readline.__doc__ or ""):
        # Python switches bracketed paste off for its own prompt.
        readline.parse_and_bind("set enable-bracketed-paste on")
    return f"\001\033[1;36m\002{prompt}\001\033[0m\002"
