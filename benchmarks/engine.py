"""The engine on the packaged model: throughput, latency, and what the host feels of it.

python -m benchmarks.engine [--quick] [--json FILE] [--only NAME,…] [--num-threads N]
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
from collections.abc import Awaitable, Callable

import uvloop

from asyncllm import AsyncLLMEngine
from asyncllm.stream import TokenStream
from benchmarks.abort_watch import AbortWatch
from benchmarks.common import LagMeter, Report, options, percentile, resident_bytes
from benchmarks.wakes import Wakes

PROMPT_LEN = 32
SATURATION = 64


class Bench:
    """One engine on the packaged model, and random prompts for it."""

    def __init__(self, report: Report, *, quick: bool, num_threads: int | None) -> None:
        self.report = report
        self.quick = quick
        self.num_threads = num_threads
        self._random = random.Random(0)
        self.engine: AsyncLLMEngine

    def prompt(self, length: int = PROMPT_LEN) -> list[int]:
        vocab_size = self.engine.model_config.vocab_size
        return [self._random.randrange(vocab_size) for _ in range(length)]

    def stream(self, max_tokens: int | None) -> TokenStream:
        return self.engine.stream(self.prompt(), max_tokens=max_tokens, ignore_eos=True)

    async def throughput(self, concurrency: int, tokens: int) -> float:
        """Output tokens a second of ``concurrency`` streams of ``tokens`` each."""
        began = time.perf_counter()
        streams = [self.stream(tokens) for _ in range(concurrency)]
        await asyncio.gather(*(stream.result() for stream in streams))
        return concurrency * tokens / (time.perf_counter() - began)


async def measure_throughput(bench: Bench) -> None:
    tokens = 32 if bench.quick else 96
    for concurrency in (1, 4, 16, 64):
        rates = [await bench.throughput(concurrency, tokens) for _ in range(3)]
        bench.report.add(f"{concurrency} streams", statistics.median(rates), "tok/s")


async def measure_call(bench: Bench) -> None:
    """What ``stream()`` itself costs its caller, while the engine is idle."""
    words = "Tell me a story about Mia and a boat on the lake in the morning. "
    text = words
    while len(bench.engine.tokenizer.encode(text)) < 100:
        text += words
    for name, prompt in (("text", text), ("token ids", bench.prompt(100))):
        times = []
        for _ in range(100 if bench.quick else 400):
            began = time.perf_counter()
            stream = bench.engine.stream(prompt, max_tokens=1)
            times.append(time.perf_counter() - began)
            stream.abort()
            await stream.result()
        bench.report.add_times(f"stream() with 100 tokens as {name}", times, "µs")


async def measure_lag(bench: Bench) -> None:
    """The loop's lag beside an idle engine, and beside one that is busy throughout."""
    duration = 2.0 if bench.quick else 5.0
    async with LagMeter() as idle:
        await asyncio.sleep(duration)
    streams = [bench.stream(None) for _ in range(SATURATION)]
    readers = [asyncio.create_task(stream.result()) for stream in streams]
    async with LagMeter() as busy:
        await asyncio.wait(readers, timeout=duration)
    for stream in streams:
        stream.abort()
    await asyncio.gather(*readers)
    bench.report.add_times("loop lag, engine idle", idle.lags, "ms")
    bench.report.add_times(f"loop lag, {SATURATION} streams", busy.lags, "ms")


async def measure_cancelling(bench: Bench) -> None:
    """From ``abort()`` to the blocks back in the pool, and to the end of the stream read, in
    steps as well. A quarter of the streams is aborted, so that the steps stay what they are."""
    watch = AbortWatch(bench.engine)
    times: list[float] = []
    steps: list[float] = []
    for _ in range(4 if bench.quick else 16):
        streams = [bench.stream(None) for _ in range(SATURATION)]
        for stream in streams:
            await anext(stream)
        steps.append(await _decode_step(bench.engine, streams[0]))
        for stream in streams[: SATURATION // 4]:
            began = time.perf_counter()
            stream.abort()
            if (await stream.result()).finish_reason == "abort":
                times.append(time.perf_counter() - began)
        freed = list(watch.times)
        for stream in streams:
            stream.abort()
        for stream in streams:
            await stream.result()
        watch.times[:] = freed
    stats = bench.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks, stats
    step = statistics.median(steps)
    bench.report.add_times(f"a decode step of {SATURATION}", steps, "ms")
    for name, values in (("blocks free", freed), ("the end is read", times)):
        bench.report.add_times(f"cancel until {name}", values, "ms")
        bench.report.add(f"cancel until {name}, p99", percentile(values, 0.99) / step, "steps")


async def _decode_step(engine: AsyncLLMEngine, stream: TokenStream) -> float:
    """Seconds a step, over some steps in which ``stream`` and others get a token."""
    await anext(stream)
    first, began = engine.stats().num_steps, time.perf_counter()
    for _ in range(10):
        await anext(stream)
    return (time.perf_counter() - began) / (engine.stats().num_steps - first)


async def measure_wakes(bench: Bench) -> None:
    """Each event loop in turn, in a thread of its own."""
    steps, rounds = (50, 1) if bench.quick else (100, 5)
    engine_times: list[float] = []
    for name, backend, loop in (
        ("asyncio", "asyncio", {}),
        ("uvloop", "asyncio", {"loop_factory": uvloop.new_event_loop}),
        ("trio", "trio", {}),
    ):
        wakes = await asyncio.to_thread(Wakes.measured_on, backend, loop, steps, rounds)
        engine_times += wakes.engine_times
        bare = "trio's own events" if name == "trio" else "bare futures"
        report = bench.report
        report.add_times(f"{name}, CPU time of the loop a step", wakes.of_streams, "ms")
        report.add_times(f"{name}, the same of {bare}", wakes.of_futures, "ms")
        report.add_times(f"{name}, the same of anyio.Event", wakes.of_events, "ms")
        report.add(f"{name}, streams to {bare}", wakes.ratio("of_streams", "of_futures"), "×")
        report.add(f"{name}, anyio.Event to {bare}", wakes.ratio("of_events", "of_futures"), "×")
    bench.report.add_times("engine thread, CPU time a step", engine_times, "ms")


async def measure_blocking_host(bench: Bench) -> None:
    """Throughput while the application blocks its loop for 20 ms in every 100, against a
    quiet one; the three take turns."""
    tokens = 32 if bench.quick else 96
    hosts: tuple[tuple[str, Callable[[], None] | None], ...] = (
        ("quiet", None),
        ("time.sleep", lambda: time.sleep(0.02)),
        ("busy in Python", _spin),
    )
    rates: dict[str, list[float]] = {name: [] for name, _ in hosts}
    for _ in range(2 if bench.quick else 5):
        for name, block in hosts:
            rates[name].append(await _with_blocking(block, bench, tokens))
    for name, _ in hosts[1:]:
        ratios = [a / b for a, b in zip(rates[name], rates["quiet"], strict=True)]
        bench.report.add(f"host blocks 20 ms in 100 ({name})", statistics.median(ratios), "×")


async def _with_blocking(block: Callable[[], None] | None, bench: Bench, tokens: int) -> float:
    async def host() -> None:
        while block is not None:
            block()
            await asyncio.sleep(0.08)

    task = asyncio.create_task(host())
    try:
        return await bench.throughput(16, tokens)
    finally:
        task.cancel()


def _spin() -> None:
    end = time.perf_counter() + 0.02
    while time.perf_counter() < end:
        pass


async def measure_idle(bench: Bench) -> None:
    duration = 2.0 if bench.quick else 5.0
    await asyncio.sleep(0.5)
    before = time.process_time()
    await asyncio.sleep(duration)
    share = (time.process_time() - before) / duration
    bench.report.add("CPU use of an idle engine", share * 100, "%")


async def measure_memory(bench: Bench) -> None:
    """Opens and closes an engine several times; a leak would add up."""
    sizes = []
    for _ in range(3 if bench.quick else 5):
        async with AsyncLLMEngine(num_threads=bench.num_threads) as engine:
            await asyncio.gather(
                *(engine.generate([5] * 64, max_tokens=32, ignore_eos=True) for _ in range(16))
            )
            opened = resident_bytes()
        del engine
        gc.collect()
        sizes.append(resident_bytes())
    megabyte = 1 << 20
    bench.report.add("resident while an engine is open", opened / megabyte, "MiB")
    bench.report.add("resident after the first aclose()", sizes[0] / megabyte, "MiB")
    growth = (sizes[-1] - sizes[0]) / (len(sizes) - 1) / megabyte
    bench.report.add("growth with each further open and close", growth, "MiB")


MEASUREMENTS: dict[str, tuple[str, Callable[[Bench], Awaitable[None]]]] = {
    "throughput": ("throughput", measure_throughput),
    "call": ("submitting", measure_call),
    "lag": ("the host's event loop", measure_lag),
    "wakes": ("256 readers, all woken by every step", measure_wakes),
    "cancel": ("cancelling", measure_cancelling),
    "blocking": (
        "a host that blocks its loop: throughput against a quiet one",
        measure_blocking_host,
    ),
    "idle": ("idle", measure_idle),
    "memory": ("memory", measure_memory),
}


async def run(bench: Bench, names: list[str]) -> None:
    async with AsyncLLMEngine(num_threads=bench.num_threads) as bench.engine:
        await bench.throughput(4, 8)
        for name in names:
            title, measure = MEASUREMENTS[name]
            if name == "memory":
                # It opens engines of its own, and this one would count.
                await bench.engine.aclose()
            bench.report.section(title)
            await measure(bench)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", metavar="NAME,…", help=f"some of {', '.join(MEASUREMENTS)}")
    parser.add_argument("--num-threads", type=int, metavar="N", help="CPU threads of the model")
    arguments = parser.parse_args()
    names = list(MEASUREMENTS)
    if arguments.only is not None:
        chosen = arguments.only.split(",")
        if unknown := [name for name in chosen if name not in MEASUREMENTS]:
            parser.error(f"--only: {', '.join(unknown)}: not among {', '.join(MEASUREMENTS)}")
        names = [name for name in names if name in chosen]
    threads = arguments.num_threads
    title = f"engine, packaged model, {threads or 'default'} threads"
    bench = Bench(Report(title), quick=arguments.quick, num_threads=threads)
    asyncio.run(run(bench, names))
    bench.report.write(arguments.json)


if __name__ == "__main__":
    main()
