"""From the start of a process to its engine's first token, with the parts of that.

    python -m benchmarks.cold_start [--shape 0.6b] [--rounds 5] [--dtype bfloat16]

The prompt has 8 tokens, and the checkpoint is in the file cache. A virtual machine may get its
memory from the host when it is first touched, at a rate that is the machine's and not the engine's.
So every round starts a process as it is, and with as much memory touched and freed right before the
weights are read; and measures that rate beside them. Both have no file of packed weights. A third
process writes one after its start, and a fourth reads it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from asyncllm.checkpoint.model_files import weight_files
from benchmarks import peer_checkpoint
from benchmarks.cold_process import touch_huge_pages
from benchmarks.common import Report
from benchmarks.peers import ROOT

TOUCHED = 256 << 20
"""Bytes by which the rate of a first touch is measured."""

SETTLE = 8.0
"""Seconds before each process: Linux reports free memory to a host two seconds after it was freed,
a part at a time."""

AS_IT_IS, BACKED = "as it is", "with memory that the host has given"
FIRST, SECOND = "the first start, which writes a file", "the second start, which maps it"


def weights_bytes(checkpoint: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(checkpoint))


def start(checkpoint: Path, dtype: str, backed: int, folder: str = "off") -> dict[str, float]:
    """Seconds of each part of a start, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.cold_process", str(checkpoint), dtype]
    command += [str(time.time()), str(backed), folder]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    # With a file, its checksums come before the weights; a kept calibration takes no time.
    named = ("import torch", "other imports", "checksums of the file", "weights", "calibration")
    found["the rest of loading"] = found.pop("loading") - sum(
        found.get(each, 0.0) for each in named
    )
    found["total beyond import torch"] = found["total"] - found["import torch"]
    return found


def tell(report: Report, name: str, rounds: list[dict[str, float]]) -> None:
    report.section(name)
    for part in rounds[0]:
        values = [found[part] for found in rounds]
        note = f"{min(values):.2f} to {max(values):.2f}"
        report.add(part, statistics.median(values), "s", note)


def main() -> None:
    parser = peer_checkpoint.options(__doc__)
    arguments: argparse.Namespace = parser.parse_args()
    checkpoint = peer_checkpoint.make(arguments.folder, arguments.shape)
    report = Report(f"Cold start: {arguments.shape}, {arguments.dtype}")
    num_bytes = weights_bytes(checkpoint)
    backed = {AS_IT_IS: 0, BACKED: -(-num_bytes // TOUCHED) * TOUCHED}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (*backed, FIRST, SECOND)}
    rates: list[tuple[float, float]] = []
    # The first reads the files into the cache.
    start(checkpoint, arguments.dtype, 0)
    for _ in range(arguments.rounds or (2 if arguments.quick else 5)):
        for name, touched in backed.items():
            time.sleep(SETTLE)
            found[name].append(start(checkpoint, arguments.dtype, touched))
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            for name in (FIRST, SECOND):
                time.sleep(SETTLE)
                found[name].append(start(checkpoint, arguments.dtype, 0, folder))
        time.sleep(SETTLE)
        first, again = touch_huge_pages(TOUCHED)
        rates.append((TOUCHED / first / 1e9, TOUCHED / again / 1e9))
    for name, rounds in found.items():
        tell(report, name, rounds)
    report.section("one thread touches memory of huge pages")
    for name, values in zip(("for the first time", "again"), zip(*rates, strict=True), strict=True):
        note = f"{min(values):.3g} to {max(values):.3g}"
        report.add(name, statistics.median(values), "GB/s", note)
    report.write(arguments.json)


if __name__ == "__main__":
    main()
