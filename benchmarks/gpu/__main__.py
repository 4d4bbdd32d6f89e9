"""Measures on an NVIDIA GPU: whether everything works, the kernels, or the whole engine.

python -m benchmarks.gpu --stage STAGE [--deadline SECONDS] [--out DIR]
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.stage import Stage

STAGES = ("smoke", "kernels", "decode", "tune", "profile", "mixed", "engine")
"""In the order in which they tell most of a machine that is new."""

DEADLINE = 420.0

RESERVE = 10.0
"""Seconds at the end in which nothing is measured any more: for closing, and the table."""


def seconds(text: str) -> float:
    """A positive number of seconds."""
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(text)
    return value


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=description)
    parser.add_argument("--stage", required=True, choices=STAGES, help="what to measure")
    parser.add_argument(
        "--deadline",
        type=seconds,
        default=DEADLINE,
        metavar="SECONDS",
        help=f"begin nothing that may end later than this (default: {DEADLINE:.0f})",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write the figures to DIR/STAGE.json as well"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 if a measurement failed, 2 if there is no GPU."""
    began = time.monotonic()
    chosen = parse(arguments)
    reason = why_not()
    if reason is not None:
        print(f"benchmarks.gpu: {reason}", file=sys.stderr)
        return 2
    # Importing torch takes seconds, which are the caller's as well.
    return run(chosen.stage, began + chosen.deadline - time.monotonic(), chosen.out)


def why_not() -> str | None:
    """Why nothing can be measured here, in one line; None if it can."""
    try:
        from benchmarks.gpu.clock import missing
    except ImportError as error:
        return f"cannot be imported: {error}".splitlines()[0]
    return missing()


def run(stage_name: str, seconds_left: float, out: Path | None) -> int:
    """Runs a stage on the current CUDA device; returns the exit code."""
    from benchmarks.common import Report
    from benchmarks.gpu.clock import conditions, usable
    from benchmarks.gpu.stage import Deadline, Stage

    # A kernel that never ends blocks Python in a call that no exception can leave.
    faulthandler.dump_traceback_later(max(seconds_left, 1.0), exit=True, file=sys.__stderr__)
    deadline = Deadline(seconds_left - RESERVE)
    report = Report(f"GPU, {stage_name}", conditions())
    stage = Stage(report, deadline, name=stage_name, out=out, usable=usable)
    try:
        runner_of(stage_name)(stage)
    finally:
        code = stage.finish()
        faulthandler.cancel_dump_traceback_later()
    return code


def runner_of(stage_name: str) -> Callable[[Stage], None]:
    """What runs a stage: ``run`` of the module of its name, which is imported with it."""
    from benchmarks.gpu.clock import CudaClock

    module = importlib.import_module(f"benchmarks.gpu.{stage_name}")
    if stage_name in ("smoke", "kernels"):
        return module.run
    return lambda stage: module.run(stage, CudaClock())


if __name__ == "__main__":
    sys.exit(main())
