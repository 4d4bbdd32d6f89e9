"""What the benchmarks share: the report, the command line, and the measuring tools."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncllm.cli.measure import LagMeter, format_machine_info, machine_info, percentile

__all__ = [
    "Figure",
    "LagMeter",
    "Report",
    "cpu_time_of",
    "options",
    "percentile",
    "resident_bytes",
]

_SCALES = {"s": 1.0, "ms": 1e3, "µs": 1e6, "ns": 1e9}


@dataclass(frozen=True)
class Figure:
    """One measured number. Times are kept in seconds and shown in ``unit``."""

    name: str
    value: float | None
    unit: str
    note: str = ""

    def shown(self) -> str:
        if self.value is None:
            return "–"
        value = self.value * _SCALES.get(self.unit, 1.0)
        digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
        return f"{value:.{digits}f} {self.unit}".rstrip()


class Report:
    """Prints figures as they come, under a line that names the machine, and keeps them.

    Args:
        conditions: what else the figures have to be quoted with, by name.
    """

    def __init__(self, title: str, conditions: Mapping[str, str] | None = None) -> None:
        self.title = title
        self.machine = machine_info() | dict(conditions or {})
        self.figures: list[Figure] = []
        print(f"{title}\n{format_machine_info(self.machine)}", flush=True)
        if conditions:
            print(", ".join(f"{name} {value}" for name, value in conditions.items()), flush=True)

    def section(self, name: str) -> None:
        print(f"\n{name}", flush=True)

    def add(self, name: str, value: float | None, unit: str, note: str = "") -> None:
        figure = Figure(name, value, unit, note)
        self.figures.append(figure)
        print(f"  {name:<52}{figure.shown():>14}  {note}".rstrip(), flush=True)

    def add_times(self, name: str, values: Sequence[float], unit: str) -> None:
        """The median, with the 99th percentile beside it."""
        if not values:
            self.add(name, None, unit)
            return
        worst = Figure("", percentile(values, 0.99), unit)
        self.add(name, statistics.median(values), unit, f"p99 {worst.shown()}, {len(values)} times")
        self.figures.append(Figure(f"{name}, p99", worst.value, unit))

    def write(self, file: str | None) -> None:
        if file is None:
            return
        path = Path(file)
        result = {
            "title": self.title,
            "machine": self.machine,
            "command": " ".join([f"python -m benchmarks.{_module()}", *_arguments(path)]),
            "figures": [asdict(figure) for figure in self.figures],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _arguments(file: Path) -> list[str]:
    """The command line; of the file that is written, and of its folder, the names: a directory
    says something of the machine, and nothing of the figures."""
    found = []
    for argument in sys.argv[1:]:
        option, equals, value = argument.rpartition("=")
        known = value and Path(value) in (file, file.parent)
        found.append(f"{option}{equals}{Path(value).name}" if known else argument)
    return found


def _module() -> str:
    """The name this benchmark is run by."""
    file = Path(sys.argv[0])
    return file.parent.name if file.stem == "__main__" else file.stem


def options(description: str | None) -> argparse.ArgumentParser:
    """A command line with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions; noisier")
    return parser


def cpu_time_of(work: Callable[[], object]) -> float:
    """Seconds of this thread's CPU time that ``work()`` takes: for Python that waits for
    nothing, what a busy machine does besides is left out."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def resident_bytes() -> int:
    """Memory of this process that is in RAM (Linux)."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()
