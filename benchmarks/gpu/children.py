"""ProbeProcess: runs probes in a child process, which may crash, hang or lose the device."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parent.parent.parent
START_SECONDS = 60.0
"""For a process that imports torch and initialises CUDA, beside the probe's own time."""


class ProbeError(Exception):
    """What a probe raised, or how its process ended."""


@dataclass(slots=True)
class _Child:
    process: subprocess.Popen[str]
    errors: IO[str]
    lines: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    reader: threading.Thread | None = None

    def read(self) -> None:
        """Queues the lines that it writes, and an empty one at their end."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def last_words(self) -> str:
        self.errors.seek(0)
        lines = [line for line in self.errors.read().splitlines() if line.strip()]
        return lines[-1][:200] if lines else "it said nothing"


class ProbeProcess:
    """Runs the probes of a module one after the other in a child (``benchmarks.gpu.child``).
    After one that ended the process, did not come back in time, or left the device unusable, the
    next has a new child.

    Args:
        module: has ``PROBES``, functions by name, whose keyword arguments and results are JSON.
        left: seconds that there are for all of them.
        paths: where the child looks for modules before all others.
    """

    def __init__(
        self, module: str, left: Callable[[], float], *, paths: Sequence[Path] = ()
    ) -> None:
        self._left = left
        self._command = [sys.executable, "-m", "benchmarks.gpu.child", module]
        self._command += [str(path) for path in paths]
        self._child: _Child | None = None

    def run(self, name: str, seconds: float, options: Mapping[str, Any] | None = None) -> Any:
        """The probe's result.

        Args:
            seconds: after which it counts as hung; a new child has START_SECONDS more.

        Raises:
            ProbeError: it failed, or took longer.
        """
        if self._child is None:
            self._child = self._start()
            seconds += START_SECONDS
        seconds = max(min(seconds, self._left()), 0.0)
        child, request = self._child, {"probe": name, "options": dict(options or {})}
        assert child.process.stdin is not None
        try:
            child.process.stdin.write(json.dumps(request) + "\n")
            child.process.stdin.flush()
            line = child.lines.get(timeout=seconds)
        except (OSError, queue.Empty) as error:
            line = None if isinstance(error, queue.Empty) else ""
        if line is None:
            self.close()
            raise ProbeError(f"did not come back in {seconds:.0f} s")
        if not line:
            status, words = child.process.wait(), child.last_words()
            self.close()
            raise ProbeError(f"its process ended with exit status {status}: {words}")
        answer = json.loads(line)
        if not answer["usable"]:
            self.close()
        if answer["error"] is not None:
            raise ProbeError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """Ends the child, by force where it hangs."""
        child, self._child = self._child, None
        if child is None:
            return
        # It ends where its standard input does.
        assert child.process.stdin is not None
        assert child.process.stdout is not None
        assert child.reader is not None
        with contextlib.suppress(OSError):
            child.process.stdin.close()
        try:
            child.process.wait(1.0)
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        child.reader.join()
        child.process.stdout.close()
        child.errors.close()

    def _start(self) -> _Child:
        # ``close`` closes it.
        errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        child = _Child(process, errors)
        child.reader = threading.Thread(target=child.read, name="probe output", daemon=True)
        child.reader.start()
        return child
