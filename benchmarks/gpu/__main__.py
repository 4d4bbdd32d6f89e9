"""Measures on an NVIDIA GPU: the kernels' results, their times, or the whole engine.

python -m benchmarks.gpu --stage {kernels,decode,engine} [--deadline SECONDS] [--json FILE]
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import sys
import time
from collections.abc import Sequence

STAGES = ("kernels", "decode", "engine")
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
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
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
    return run(chosen.stage, began + chosen.deadline - time.monotonic(), chosen.json)


def why_not() -> str | None:
    """Why nothing can be measured here, in one line; None if it can."""
    try:
        from benchmarks.gpu.clock import missing
    except ImportError as error:
        return f"cannot be imported: {error}".splitlines()[0]
    return missing()


def run(stage_name: str, seconds_left: float, file: str | None) -> int:
    """Runs a stage on the current CUDA device; returns the exit code."""
    from benchmarks.common import Report
    from benchmarks.gpu.clock import CudaClock, conditions, usable
    from benchmarks.gpu.stage import Deadline, Stage

    # A kernel that never ends blocks Python in a call that no exception can leave.
    faulthandler.dump_traceback_later(max(seconds_left, 1.0), exit=True, file=sys.__stderr__)
    deadline = Deadline(seconds_left - RESERVE)
    report = Report(f"GPU, {stage_name}", conditions())
    stage = Stage(report, deadline, file=file, usable=usable)
    try:
        if stage_name == "kernels":
            from benchmarks.gpu import kernels

            kernels.run(stage)
        elif stage_name == "decode":
            from benchmarks.gpu import decode

            decode.run(stage, CudaClock())
        else:
            from benchmarks.gpu import engine

            engine.run(stage, CudaClock())
    finally:
        code = stage.finish()
        faulthandler.cancel_dump_traceback_later()
    return code


if __name__ == "__main__":
    sys.exit(main())
