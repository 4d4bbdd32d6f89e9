"""Memory over rounds of opening an engine, requests of all sizes, and closing it.

python -m benchmarks.memory [--quick] [--requests N] [--rounds N] [--model PATH] [--json FILE]
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import random
import string
from collections.abc import Iterator
from typing import Any

from asyncllm import AsyncLLMEngine
from asyncllm.stream import TokenStream
from benchmarks.common import Report, options, resident_bytes

REQUESTS, QUICK_REQUESTS = 20_000, 2_000
CLIENTS = 48
LONGEST_PROMPT = 48
MIB = 1 << 20
ENGINE: dict[str, Any] = {"kv_cache_memory": 48 * MIB, "max_num_batched_tokens": 256}
"""A small KV cache, so that its pages do not hide what else grows, and a token budget that is
the same in every round: "auto" is measured at start."""

WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 3},
    {"temperature": 1.0, "top_k": 30, "repetition_penalty": 1.1},
    {"temperature": 1.0, "stop": ["the end"], "logit_bias": {5: 1.0}},
)


class Traffic:
    """Requests of mixed sizes and kinds on one engine, from several clients at once.

    Attributes:
        peak: the most bytes that were resident.
    """

    def __init__(self, engine: AsyncLLMEngine, rng: random.Random) -> None:
        self.engine = engine
        self.peak = 0
        self._rng = rng
        self._kinds = ["ids", "text"]
        if engine.tokenizer.chat_template.sources:
            self._kinds.append("chat")

    async def run(self, count: int) -> None:
        left = iter(range(count))
        await asyncio.gather(*(self._client(left) for _ in range(CLIENTS)))

    async def _client(self, left: Iterator[int]) -> None:
        for index in left:
            stream = self._submit()
            if self._rng.random() < 0.1:
                await anext(stream)
                stream.abort()
            await stream.result()
            if index % 50 == 0:
                self.peak = max(self.peak, resident_bytes())

    def _submit(self) -> TokenStream:
        rng, engine = self._rng, self.engine
        # Short prompts are the most frequent.
        length = int(LONGEST_PROMPT ** rng.random())
        params = rng.choice(WAYS) | {"max_tokens": rng.randint(1, 4), "ignore_eos": True}
        kind = rng.choice(self._kinds)
        if kind == "ids":
            vocab_size = engine.model_config.vocab_size
            return engine.stream([rng.randrange(vocab_size) for _ in range(length)], **params)
        # Words that no tokenizer has met before.
        words = (
            "".join(rng.choices(string.ascii_letters, k=rng.randint(1, 9)))
            for _ in range(1 + length // 8)
        )
        text = " ".join(words)
        if kind == "text":
            return engine.stream(text, **params)
        return engine.chat([{"role": "user", "content": text}], **params)


def settled() -> float:
    """Resident MiB once garbage is collected and the C library, where it is glibc, has given
    back what it keeps for later."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return resident_bytes() / MIB


async def measure_round(
    report: Report, model: str | None, rng: random.Random, requests: int
) -> tuple[float, int]:
    """One round.

    Returns:
        What is left after it: resident MiB, and Python objects.
    """
    async with AsyncLLMEngine(model, **ENGINE) as engine:
        report.add("open, no request yet", settled(), "MiB")
        traffic = Traffic(engine, rng)
        await traffic.run(requests // 2)
        settled()
        objects = len(gc.get_objects())
        await traffic.run(requests - requests // 2)
        report.add("at most under traffic", traffic.peak / MIB, "MiB")
        report.add("open, all requests done", settled(), "MiB")
        grown = len(gc.get_objects()) - objects
        report.add("Python objects kept of the second half", grown, "")
    del engine, traffic
    left = settled()
    report.add("closed", left, "MiB")
    return left, len(gc.get_objects())


async def measure(report: Report, model: str | None, rounds: int, requests: int) -> None:
    rng = random.Random(0)
    report.section("a first engine, one request")
    async with AsyncLLMEngine(model, **ENGINE) as engine:
        await engine.generate([5], max_tokens=1)
    del engine
    before = settled()
    report.add("closed", before, "MiB")
    left = []
    for number in range(1, rounds + 1):
        report.section(f"round {number}: {requests} requests")
        left.append(await measure_round(report, model, rng, requests))
    (first, first_objects), (last, last_objects) = left[0], left[-1]
    report.section("what traffic leaves behind")
    report.add("the first round, more than before it", first - before, "MiB")
    report.add("the last round, more than before the first", last - before, "MiB")
    report.add("the last round, more than the first", last - first, "MiB")
    report.add("Python objects of the last, more than the first", last_objects - first_objects, "")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--requests", type=int, metavar="N", help="a round; 20,000 unless given")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="3 unless given")
    parser.add_argument("--model", metavar="PATH", help="the packaged model unless given")
    arguments = parser.parse_args()
    requests = arguments.requests or (QUICK_REQUESTS if arguments.quick else REQUESTS)
    report = Report(f"memory, {arguments.model or 'packaged model'}, {CLIENTS} clients")
    asyncio.run(measure(report, arguments.model, arguments.rounds, requests))
    report.write(arguments.json)


if __name__ == "__main__":
    main()
