"""A program on a terminal of its own, driven as a person would drive it."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from typing import Self

from tests.processes import hear_ctrl_c

# The pseudo-terminal has to become the controlling one, or Ctrl-C would interrupt no process.
_TAKE_TERMINAL = """
import fcntl, runpy, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.argv[0] = "asyncllm"
runpy.run_module("asyncllm", run_name="__main__")
"""
# More threads than idle cores make a small model slow, and a test machine has other work to do.
QUICK = ("--num-threads", "1")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]|[\001\002\r]")


class Terminal:
    """``asyncllm ARGUMENTS`` on a pseudo-terminal, with one thread for the model.

    Attributes:
        raw: everything it wrote so far.
    """

    def __init__(self, *arguments: str, rows: int = 24, columns: int = 80) -> None:
        self._arguments = arguments
        self._size = struct.pack("HHHH", rows, columns, 0, 0)
        self.raw = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __enter__(self) -> Self:
        self._master, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, self._size)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *self._arguments, *QUICK],
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
            preexec_fn=hear_ctrl_c,
            env={**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1"},
        )
        os.close(child)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    @property
    def text(self) -> str:
        """What it wrote, without escape codes."""
        return _ESCAPES.sub("", self.raw)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, wanted: str, *, times: int = 1, timeout: float = 60.0) -> None:
        """Reads until the text holds ``wanted``, so many times."""
        deadline = time.monotonic() + timeout
        while self.text.count(wanted) < times:
            assert self._read(deadline - time.monotonic()), f"no {wanted!r} in {self.text!r}"

    def wait_for_exit(self, timeout: float = 60.0) -> int:
        """Reads to the end and returns the exit code."""
        deadline = time.monotonic() + timeout
        while self._read(deadline - time.monotonic()):
            pass
        return self._process.wait(max(deadline - time.monotonic(), 1.0))

    def interrupt_until(self, wanted: str, timeout: float = 60.0) -> None:
        """Presses Ctrl-C until the text holds ``wanted``. Once is not always enough: a prompt
        hears it while it waits for a key, and Python's readline may lose it just before."""
        deadline = time.monotonic() + timeout
        while wanted not in self.text:
            self.type("\x03")
            pressed = time.monotonic()
            while wanted not in self.text and time.monotonic() < pressed + 15.0:
                self._read(pressed + 5.0 - time.monotonic())
            assert time.monotonic() < deadline, f"no {wanted!r} in {self.text!r}"

    def interrupt_until_exit(self, timeout: float = 60.0) -> int:
        """Presses Ctrl-C until the program ends, and returns its exit code. Seldom, because one
        that comes while the interpreter goes down kills it."""
        deadline = time.monotonic() + timeout
        while self._process.poll() is None:
            assert time.monotonic() < deadline, f"it goes on: {self.text!r}"
            self.type("\x03")
            pressed = time.monotonic()
            while self._process.poll() is None and time.monotonic() < pressed + 15.0:
                if not self._read(0.1):
                    time.sleep(0.05)
        return self._process.returncode

    def echoes(self) -> bool:
        """Whether the terminal shows what is typed."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)

    def _read(self, timeout: float) -> bool:
        """More of the output; False at its end, or when it took too long."""
        if timeout <= 0 or not select.select([self._master], [], [], timeout)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux says EIO where the last writer has left
            return False
        self.raw += self._decoder.decode(data)
        return bool(data)


def asyncllm(
    *arguments: str, stdin: str = "", timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """``asyncllm ARGUMENTS`` between pipes, with one thread for the model."""
    command: Sequence[str] = [sys.executable, "-m", "asyncllm", *arguments, *QUICK]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False
    )
