"""What a handle of Ray Serve costs a stream, and Ray Data a batch job; needs asyncllm-ray.

python -m benchmarks.ray_serve [--quick] [--json FILE] [--rounds N]
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import ray
from asyncllm_ray import Client, Generate, deployment, run
from ray import serve

from asyncllm import AsyncLLMEngine
from benchmarks.common import Report, options

STREAMS = 16
ENGINE: dict[str, Any] = {"num_threads": 1, "num_blocks": 1024}
ROW: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True, "temperature": 0.0}


async def rate(engine: Any, num_tokens: int) -> float:
    """Output tokens a second of 16 streams; each delta is read."""

    async def read(number: int) -> int:
        prompt = f"{number}: Mia has a boat."
        stream = engine.stream(prompt, max_tokens=num_tokens, ignore_eos=True)
        return sum([len(delta.token_ids) async for delta in stream])

    began = time.perf_counter()
    counts = await asyncio.gather(*map(read, range(STREAMS)))
    return sum(counts) / (time.perf_counter() - began)


async def first_token(engine: Any) -> float:
    """Seconds to the first token of a stream alone."""
    began = time.perf_counter()
    stream = engine.stream("Mia has a boat.", max_tokens=2, ignore_eos=True)
    await anext(stream)
    elapsed = time.perf_counter() - began
    await stream
    return elapsed


async def compare(report: Report, client: Client, rounds: int, num_tokens: int) -> None:
    """Rates and times of a local engine and of a client, in turns."""
    async with AsyncLLMEngine(**ENGINE) as local:
        pairs = [(await rate(local, num_tokens), await rate(client, num_tokens))]
        pairs = [
            (await rate(local, num_tokens), await rate(client, num_tokens)) for _ in range(rounds)
        ]
        times = [(await first_token(local), await first_token(client)) for _ in range(10 * rounds)]
    report.add(f"a local engine, {STREAMS} streams", max(one for one, _ in pairs), "tok/s")
    ratios = [client_rate / local_rate for local_rate, client_rate in pairs]
    report.add("a client's rate, to the local engine's", statistics.median(ratios), "")
    report.add_times("to the first token, local", [one for one, _ in times], "ms")
    report.add_times("to the first token, client", [one for _, one in times], "ms")


async def map_rows(rows: list[dict[str, Any]]) -> float:
    """Seconds of ``engine.map`` over the rows, after a warm-up."""
    async with AsyncLLMEngine(**ENGINE) as engine:
        await engine.generate("Mia", **ROW)
        began = time.perf_counter()
        async with engine.map(rows, prompt=lambda row: row["prompt"], **ROW) as results:
            async for result in results:
                assert result.error is None
        return time.perf_counter() - began


class TimedGenerate(Generate):
    """Generate that notes when its batches begin and end, after the engine's start."""

    async def start(self) -> None:
        is_new = self._engine.state == "new"
        await super().start()
        if is_new:
            await self._engine.generate("Mia", **ROW)

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        await self.start()
        began = time.time()
        found = await super().__call__(batch)
        count = len(found["text"])
        cpu = [time.process_time()] * count
        return found | {"began": [began] * count, "ended": [time.time()] * count, "cpu": cpu}


def data_rows(rows: list[dict[str, Any]]) -> float:
    """Seconds of Ray Data over the rows on one actor, from its first batch to the end of the last;
    the start is left out. The blocks are as many as Ray Data makes, the batches those of
    ``complete``."""
    found = ray.data.from_items(rows).map_batches(
        TimedGenerate,
        fn_constructor_kwargs=ENGINE | {"sampling_params": ROW},
        batch_size=64,
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=0.5,
    )
    done = found.take_all()
    assert len(done) == len(rows)
    assert {row["error"] for row in done} == {None}
    return max(row["ended"] for row in done) - min(row["began"] for row in done)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    rounds = 2 if arguments.quick else arguments.rounds
    num_rows = 200 if arguments.quick else 1000
    report = Report("Engines on Ray", {"streams": str(STREAMS), "ray": ray.__version__})
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        report.section("one replica of the packaged model, one thread")
        given = {"ray_actor_options": {"num_cpus": 0.5}}
        client = Client(run(deployment(**ENGINE, serve_options=given), "benchmark"))
        asyncio.run(compare(report, client, rounds, 400))
        client.close()
        serve.delete("benchmark")
        report.section(f"{num_rows} rows of {ROW['max_tokens']} tokens")
        rows = [{"prompt": f"{number}: Mia has a boat."} for number in range(num_rows)]
        alone = asyncio.run(map_rows(rows))
        report.add("engine.map", alone, "s")
        report.add("Ray Data on one actor, to engine.map", data_rows(rows) / alone, "")
    finally:
        serve.shutdown()
        ray.shutdown()
    report.write(arguments.json)


if __name__ == "__main__":
    main()
