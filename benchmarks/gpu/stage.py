"""Stage: runs a list of measurements, the important ones first, until its time is up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.common import Report
from benchmarks.gpu.goals import Scores


class Deadline:
    """Time that is left, on a clock that tests can turn.

    Args:
        seconds: from now on.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def left(self) -> float:
        """Seconds; negative when it is over."""
        return self._end - self._clock()


class Stage:
    """One run of a stage: what it measured, left out and failed at.

    Args:
        name: of the stage.
        out: the folder whose ``NAME.json`` gets the figures after every measurement, so that a
            run that is killed leaves what it had; None for nowhere.
        usable: whether the device still works; asked after a failure, because an illegal
            access makes every later call of the process fail.

    Attributes:
        skipped: names of what there was no time for.
        failed: name and error of what raised.
        broken: the device is lost, and the rest is skipped.
    """

    def __init__(
        self,
        report: Report,
        deadline: Deadline,
        *,
        name: str = "stage",
        out: Path | None = None,
        usable: Callable[[], bool] = lambda: True,
    ) -> None:
        self.report = report
        self.deadline = deadline
        self.scores = Scores(report)
        self.skipped: list[str] = []
        self.failed: list[tuple[str, str]] = []
        self.broken = False
        self._name, self._out = name, out
        self._file = None if out is None else str(out / f"{name}.json")
        self._usable = usable

    def attempt(self, name: str, seconds: float, measure: Callable[[], object]) -> bool:
        """Runs ``measure`` if ``seconds`` are left, which is how long it may take.

        Returns whether it ran to its end. What it raises is noted, and the stage goes on.
        """
        if not self._may_begin(name, seconds):
            return False
        try:
            measure()
        except Exception as error:
            self._note(name, error)
            return False
        self.report.write(self._file)
        return True

    async def attempt_async(
        self, name: str, seconds: float, measure: Callable[[], Awaitable[object]]
    ) -> bool:
        """``attempt`` for a coroutine function, which is cancelled at the deadline."""
        if not self._may_begin(name, seconds):
            return False
        try:
            async with asyncio.timeout(self.deadline.left()):
                await measure()
        except Exception as error:
            self._note(name, error)
            return False
        self.report.write(self._file)
        return True

    def write(self, what: str, data: Any) -> None:
        """Writes what is no list of figures to ``NAME-WHAT.json``."""
        if self._out is not None:
            path = self._out / f"{self._name}-{what}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def device_works(self) -> bool:
        """Whether it still does, after an error."""
        return self._usable()

    def finish(self) -> int:
        """Prints what was left out and the goals; returns the exit code: 1 if anything
        failed."""
        for name, error in self.failed:
            self.report.add(f"failed: {name}", None, "", error)
        if self.skipped:
            self.report.section("not measured, for want of time")
            self.report.add("skipped", len(self.skipped), "", ", ".join(self.skipped))
        self.scores.print_table()
        self.report.write(self._file)
        return 1 if self.failed else 0

    def _may_begin(self, name: str, seconds: float) -> bool:
        if self.broken or self.deadline.left() < seconds:
            self.skipped.append(name)
            return False
        return True

    def _note(self, name: str, error: Exception) -> None:
        lines = str(error).strip().splitlines() or [""]
        text = f"{type(error).__name__}: {lines[0][:200]}"
        print(f"  FAILED  {name}: {text}", flush=True)
        self.failed.append((name, text))
        self.broken = not self.device_works()
        self.report.write(self._file)
