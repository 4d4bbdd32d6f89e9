"""Goal: a figure to reach, and the table of what was reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.common import Figure, Report


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit in the unit of its figure; times in seconds, as figures keep them."""

    kind: Literal["at most", "at least"]
    limit: float

    def met(self, value: float) -> bool:
        """NaN meets nothing."""
        return value <= self.limit if self.kind == "at most" else value >= self.limit

    def shown(self, unit: str) -> str:
        return f"{self.kind} {Figure('', self.limit, unit).shown()}"


class Scores:
    """Figures with goals: printed with the others as they come, and once more in a table."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.scores: list[tuple[Figure, Goal]] = []

    def add(self, name: str, value: float | None, unit: str, goal: Goal, note: str = "") -> None:
        """``value`` is None where it could not be measured: that is neither yes nor no."""
        self.scores.append((Figure(name, value, unit, note), goal))
        verdict = f"goal {goal.shown(unit)}: {self._verdict(value, goal)}"
        self.report.add(name, value, unit, f"{verdict}; {note}" if note else verdict)

    def print_table(self) -> None:
        if not self.scores:
            return
        self.report.section("goals")
        for figure, goal in self.scores:
            verdict = self._verdict(figure.value, goal)
            limit = goal.shown(figure.unit)
            print(f"  {figure.name:<52}{figure.shown():>14}  {limit:<20}{verdict}", flush=True)

    @staticmethod
    def _verdict(value: float | None, goal: Goal) -> str:
        if value is None:
            return "not measured"
        return "yes" if goal.met(value) else "NO"
