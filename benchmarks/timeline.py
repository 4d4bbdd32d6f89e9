"""A batch over time: when each of many requests waited, began and ended.

    python -m benchmarks.timeline --json benchmarks/results/batch.json && python -m benchmarks.plots

Requests of the packaged model come at random moments (seeded), in four lengths, into an engine that
runs eight of them at a time. The times are those of ``Usage``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

from asyncllm import AsyncLLMEngine, TokenStream
from asyncllm.cli.measure import format_machine_info, machine_info

REQUESTS = 40
MAX_NUM_SEQS = 8
LENGTHS = (24, 48, 96, 192)


async def measure(requests: int = REQUESTS, seed: int = 5) -> list[dict[str, Any]]:
    """Times of each request, in seconds since the first was submitted."""
    draw = random.Random(seed)
    async with AsyncLLMEngine(max_num_seqs=MAX_NUM_SEQS) as engine:
        # Kernels and caches warm, and how long a batch takes.
        began = time.perf_counter()
        warm = [engine.stream("Once", max_tokens=96, ignore_eos=True) for _ in range(MAX_NUM_SEQS)]
        await asyncio.gather(*(stream.result() for stream in warm))
        spread = (time.perf_counter() - began) * requests / MAX_NUM_SEQS / 2
        origin = time.perf_counter()
        moments = sorted(draw.uniform(0, spread) for _ in range(requests))
        moments[0] = 0.0
        reads = [
            asyncio.ensure_future(_read(engine, origin, moment, draw.choice(LENGTHS), n))
            for n, moment in enumerate(moments)
        ]
        return await asyncio.gather(*reads)


async def _read(
    engine: AsyncLLMEngine, origin: float, moment: float, length: int, n: int
) -> dict[str, Any]:
    await asyncio.sleep(max(0.0, origin + moment - time.perf_counter()))
    submitted = time.perf_counter() - origin
    prompt = f"Tell me a story about {n} foxes and a boat."
    stream: TokenStream = engine.stream(prompt, seed=n, max_tokens=length, ignore_eos=True)
    usage = (await stream.result()).usage
    assert usage is not None
    assert usage.ttft is not None
    return {
        "submitted": round(submitted, 4),
        "scheduled": round(submitted + usage.queue_time, 4),
        "first_token": round(submitted + usage.ttft, 4),
        "finished": round(submitted + usage.total_time, 4),
        "tokens": usage.completion_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the times")
    chosen = parser.parse_args()
    requests = asyncio.run(measure())
    found = machine_info()
    conditions = f"packaged model, {found['cores']} cores of an {found['processor']}"
    result = {
        "title": "timeline: a batch over time",
        "machine": found,
        "command": "python -m benchmarks.timeline --json batch.json",
        "conditions": f"{conditions}, load {found['load']}",
        "max_num_seqs": MAX_NUM_SEQS,
        "requests": requests,
    }
    end = max(one["finished"] for one in requests)
    tokens = sum(one["tokens"] for one in requests)
    print(f"{format_machine_info(found)}\n{len(requests)} requests, {tokens} tokens in {end:.2f} s")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
