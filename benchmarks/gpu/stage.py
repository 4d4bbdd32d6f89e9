"""Stage: runs a list of measurements, the important ones first, until its time is up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

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
        file: where the figures go after every measurement, so that a run that is killed
            leaves what it had; None for nowhere.
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
        file: str | None = None,
        usable: Callable[[], bool] = lambda: True,
    ) -> None:
        self.report = report
        self.deadline = deadline
        self.scores = Scores(report)
        self.skipped: list[str] = []
        self.failed: list[tuple[str, str]] = []
        self.broken = False
        self._file = file
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
        self.broken = not self._usable()
        self.report.write(self._file)
