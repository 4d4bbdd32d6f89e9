"""What a handle of Ray Serve costs a stream, and Ray Data a batch job; needs asyncllm-ray.

python -m benchmarks.ray_serve [--quick] [--json FILE] [--rounds N]
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any, NamedTuple

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


class Cost(NamedTuple):
    """Seconds of a batch job, and of CPU in the process of its engine."""

    seconds: float
    cpu: float


async def map_rows(rows: list[dict[str, Any]]) -> Cost:
    """Cost of ``engine.map`` over the rows, after a warm-up."""
    async with AsyncLLMEngine(**ENGINE) as engine:
        await engine.generate("Mia", **ROW)
        began, cpu = time.perf_counter(), time.process_time()
        async with engine.map(rows, prompt=lambda row: row["prompt"], **ROW) as results:
            async for result in results:
                assert result.error is None
        return Cost(time.perf_counter() - began, time.process_time() - cpu)


class TimedGenerate(Generate):
    """Generate that notes the clocks when its batches begin and end, after the engine's start."""

    async def start(self) -> None:
        async with self._lock:
            if self._engine.state == "new":
                await self._engine.start()
                await self._engine.generate("Mia", **ROW)

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        await self.start()
        began = {"began": time.time(), "cpu_began": time.process_time()}
        found = await super().__call__(batch)
        clocks = began | {"ended": time.time(), "cpu_ended": time.process_time()}
        count = len(found["text"])
        return found | {name: [clock] * count for name, clock in clocks.items()}


def data_rows(rows: list[dict[str, Any]]) -> Cost:
    """Cost of Ray Data over the rows on one actor, from its first batch to the end of the last; the
    start is left out. Blocks and batches are those that ``complete`` gives a user."""
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

    def between(began: str, ended: str) -> float:
        return max(row[ended] for row in done) - min(row[began] for row in done)

    return Cost(between("began", "ended"), between("cpu_began", "cpu_ended"))


def compare_rows(report: Report, rounds: int, num_rows: int) -> None:
    """Costs of the rows by a local engine and by Ray Data, in turns."""
    rows = [{"prompt": f"{number}: Mia has a boat."} for number in range(num_rows)]
    pairs = [(asyncio.run(map_rows(rows)), data_rows(rows)) for _ in range(rounds)]
    report.add("engine.map, median", statistics.median(one.seconds for one, _ in pairs), "s")
    ratios = sorted(data.seconds / local.seconds for local, data in pairs)
    report.add("Ray Data on one actor, to engine.map, median", statistics.median(ratios), "")
    report.add("the least of these ratios", ratios[0], "")
    report.add("the greatest", ratios[-1], "")
    cpu = statistics.median(data.cpu / local.cpu for local, data in pairs)
    report.add("CPU time of the actor, to that of engine.map, median", cpu, "")


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
        compare_rows(report, rounds, num_rows)
    finally:
        serve.shutdown()
        ray.shutdown()
    report.write(arguments.json)


if __name__ == "__main__":
    main()
