"""Hundreds of streams of random lengths from several loops and threads, a third of them
cancelled at random points, slow and stalled readers, nonsense, faults, deadlines, pauses, and a
KV pool so small that requests are preempted all the time; on a fake device and on the packaged
model in float32. Afterwards every finished stream must have the tokens of the same request run
alone, every stream must have ended once, and nothing may be left.

    python -m benchmarks.chaos --seconds 60 --seed 7
"""

from __future__ import annotations

import asyncio
import random
import sys

from benchmarks.chaos.run import Outcome, demo_subject, fake_subject, fatal, run
from benchmarks.common import Report, options, percentile


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each engine")
    parser.add_argument("--seed", type=int, default=None, help="None draws one and prints it")
    parser.add_argument("--clients", type=int, default=60, help="on each of three loops")
    arguments = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if arguments.seed is None else arguments.seed
    report = Report(f"chaos, seed {seed}")
    wrong: list[str] = []
    for subject in (fake_subject(), demo_subject()):
        outcome = asyncio.run(run(subject, arguments.seconds, seed, arguments.clients))
        describe(report, outcome)
        wrong += outcome.ledger.wrong
    for number in range(10):
        wrong += asyncio.run(fatal(seed + number))
    report.section(f"{len(wrong)} things that must not be")
    for what in wrong[:20]:
        print(f"  {what}")
    report.write(arguments.json)
    return 1 if wrong else 0


def describe(report: Report, outcome: Outcome) -> None:
    ledger, stats = outcome.ledger, outcome.stats
    report.section(f"{outcome.name}, {outcome.seconds:.0f} s")
    report.add("requests", stats.num_requests, "")
    for name, count in sorted(ledger.outcomes.items()):
        report.add(f"  {name}", count, "")
    report.add("aborts", stats.num_aborted, "")
    report.add("preemptions", stats.num_preemptions, "")
    report.add("steps", stats.num_steps, "")
    report.add("tokens compared", ledger.tokens, "")
    report.add("prefix cache hits", stats.prefix_cache_hits / stats.prefix_cache_queries, "")
    for share in (0.5, 0.99):
        report.add(
            f"cancel to blocks free, p{share * 100:.0f}",
            percentile(ledger.cancel_to_free, share),
            "ms",
        )
    for share in (0.5, 0.99, 1.0):
        report.add(f"loop lag, p{share * 100:.0f}", percentile(outcome.lags, share), "ms")
    report.add("peak memory of the process", outcome.peak_memory / 2**20, "MiB")


if __name__ == "__main__":
    sys.exit(main())
