"""What several engines in one process cost each other, and what a group costs one engine.

python -m benchmarks.groups [--quick] [--json FILE] [--rounds N]
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence

from asyncllm import AsyncLLMEngine, EngineGroup
from benchmarks.common import Report, options
from benchmarks.null_device import make_engine

STREAMS = 32
"""Streams of each engine."""

PROMPT_LEN = 16
STEP_TIMES = (0.0, 0.002, 0.010)


async def rate(
    engine: AsyncLLMEngine, num_streams: int, num_tokens: int, seed: int
) -> tuple[float, float]:
    """Output tokens a second, and a second of this process's CPU time; each delta is read."""
    draw = random.Random(seed)
    vocab_size = engine.model_config.vocab_size
    prompts = [[draw.randrange(vocab_size) for _ in range(PROMPT_LEN)] for _ in range(num_streams)]

    async def read(prompt: list[int]) -> int:
        stream = engine.stream(prompt, max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
        return sum([len(delta.token_ids) async for delta in stream])

    began, cpu_began = time.perf_counter(), time.process_time()
    counts = await asyncio.gather(*map(read, prompts))
    elapsed, cpu_time = time.perf_counter() - began, time.process_time() - cpu_began
    return sum(counts) / elapsed, sum(counts) / cpu_time


async def compare(
    report: Report,
    make: Callable[[], AsyncLLMEngine],
    sizes: Sequence[int],
    rounds: int,
    num_tokens: int,
) -> None:
    """Rates of groups beside that of one engine, as ratios of medians. One engine and the groups
    take turns, in reverse order every other round, because other work on the machine comes and
    goes. The first round, in which engines warm up, does not count."""
    alone = make()
    groups = [EngineGroup([make() for _ in range(size)]) for size in sizes]
    engines = [alone, *groups]
    for engine in engines:
        await engine.start()
    found: list[list[tuple[float, float]]] = [[] for _ in engines]
    for number in range(rounds + 1):
        turns = list(zip(engines, (1, *sizes), found, strict=True))
        for engine, size, rates in turns if number % 2 else reversed(turns):
            rates.append(await rate(engine, STREAMS * size, num_tokens, number))
    for engine in engines:
        await engine.aclose()
    usual = [
        [statistics.median(values) for values in zip(*rates[1:], strict=True)] for rates in found
    ]
    report.add(f"one engine, {STREAMS} streams", usual[0][0], "tok/s")
    for size, rates in zip(sizes, usual[1:], strict=True):
        for index, of in enumerate(("rate", "tokens a second of CPU time")):
            report.add(
                f"a group of {size}, to one engine's {of}", rates[index] / usual[0][index], ""
            )


async def compare_calls(report: Report, sizes: Sequence[int], rounds: int) -> None:
    """CPU time that ``stream`` takes in its caller's thread, by an engine and by groups in turns:
    the median of all rounds of one call's share of a burst."""
    draw = random.Random(0)
    engines = {
        "an engine": make_engine(2 * STREAMS, 0.0)[0],
        **{
            f"a group of {size}": EngineGroup(
                [make_engine(2 * STREAMS, 0.0)[0] for _ in range(size)]
            )
            for size in sizes
        },
    }
    found: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        await engine.start()
    for _ in range(rounds + 1):
        for name, engine in engines.items():
            prompts = [[draw.randrange(300) for _ in range(PROMPT_LEN)] for _ in range(STREAMS)]
            began = time.thread_time()
            streams = [engine.stream(prompt, max_tokens=1) for prompt in prompts]
            found[name].append((time.thread_time() - began) / STREAMS)
            for stream in streams:
                await stream.result()
    for name, engine in engines.items():
        report.add(name, statistics.median(found[name][1:]), "µs")
        await engine.aclose()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    rounds = 2 if arguments.quick else arguments.rounds
    tokens = 32 if arguments.quick else 64
    sizes = (1, 2) if arguments.quick else (1, 2, 4)
    report = Report("Groups of engines", {"streams an engine": str(STREAMS)})
    report.section("a call of stream, CPU")
    asyncio.run(compare_calls(report, sizes, 4 * rounds))
    report.section("the packaged model, one thread an engine")
    # Twice the places, so that an engine that gets a few more than its share has no second turn.
    packaged = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 2 * STREAMS}
    asyncio.run(compare(report, lambda: AsyncLLMEngine(**packaged), sizes, rounds, tokens))
    for step_time in STEP_TIMES:
        report.section(f"a device whose steps take {step_time * 1e3:g} ms without the GIL")

        def make(step_time: float = step_time) -> AsyncLLMEngine:
            return make_engine(2 * STREAMS, step_time)[0]

        asyncio.run(compare(report, make, sizes, rounds, tokens))
    report.write(arguments.json)


if __name__ == "__main__":
    main()
