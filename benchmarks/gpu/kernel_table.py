"""KernelRow: a trace of the device, kernel by kernel, and the gaps between them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.clock import DeviceSpan

NAME_LENGTH = 48


@dataclass(frozen=True, slots=True)
class KernelRow:
    """What a trace has of one kernel; seconds.

    Attributes:
        share: of the time that all kernels took.
        gap: for which the device had nothing to do before each, on average.
    """

    name: str
    count: int
    mean: float
    share: float
    gap: float


def kernel_table(spans: Sequence[DeviceSpan]) -> list[KernelRow]:
    """The kernels and copies of a trace, those with the greatest share first."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    gaps: defaultdict[str, float] = defaultdict(float)
    until: float | None = None
    for span in sorted(spans):
        name = short_name(span.name)
        times[name].append(span.end - span.start)
        if until is not None:
            gaps[name] += max(span.start - until, 0.0)
        until = span.end if until is None else max(until, span.end)
    total = sum(map(sum, times.values()))
    rows = [
        KernelRow(
            name,
            len(taken),
            sum(taken) / len(taken),
            sum(taken) / total if total else 0.0,
            gaps[name] / len(taken),
        )
        for name, taken in times.items()
    ]
    return sorted(rows, key=lambda row: row.share, reverse=True)


def short_name(name: str) -> str:
    """A kernel's name without its return type, namespaces and arguments of templates; CUTLASS's
    have their name there."""
    plain = re.sub(r"^void |\(anonymous namespace\)::", "", name)
    plain = re.sub(r"^cutlass::Kernel2?<(\w+).*", r"\1", plain)
    while (shorter := re.sub(r"<[^<>]*>", "", plain)) != plain:
        plain = shorter
    plain = plain.split("(")[0].split("::")[-1].strip() or name
    return plain[:NAME_LENGTH]
