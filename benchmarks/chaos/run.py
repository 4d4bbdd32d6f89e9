"""One chaotic run against one engine, from several loops and threads."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import resource
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from asyncllm import LLM, AsyncLLMEngine, EngineDeadError, EngineStats
from asyncllm.cli.measure import LagMeter
from benchmarks.abort_watch import AbortWatch
from benchmarks.chaos.client import Client, faulty, run_thread
from benchmarks.chaos.ledger import Ledger
from benchmarks.chaos.workload import Task, draw_requests, run_alone
from tests.fakes import Fake, fake
from tests.integrity import check_scheduler

_LOOPS: dict[str, dict[str, Any]] = {
    "asyncio": {"backend": "asyncio"},
    "uvloop": {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
    "trio": {"backend": "trio"},
}


@dataclass
class Outcome:
    """What a run did. ``ledger.wrong`` is empty if all is well."""

    name: str
    ledger: Ledger
    stats: EngineStats
    lags: list[float]
    seconds: float
    peak_memory: int


@dataclass
class Subject:
    """What a run is about: how to make the engine, and what may be asked of it."""

    name: str
    make: Callable[[bool], AsyncLLMEngine]
    vocab_size: int
    longest_prompt: int
    longest_output: int
    num_tasks: int
    fault: Callable[[], dict[str, Any]]


def fake_subject() -> Subject:
    """Tiny pool, few slots, fast steps: most of what can go wrong is a matter of order."""
    rig: list[Fake] = []

    def make(alone: bool) -> AsyncLLMEngine:
        rig[:] = [
            fake(
                num_blocks=400 if alone else 70,
                max_model_len=120,
                max_num_seqs=24,
                max_num_batched_tokens=48,
                pipeline_depth=1 if alone else 2,
                step_time=0.0 if alone else 0.0005,
            )
        ]
        return rig[0].engine(
            enable_prefix_caching=not alone, max_queued_requests=150, max_queued_tokens=20_000
        )

    def fault() -> dict[str, Any]:
        request_id = uuid.uuid4().hex
        rig[0].executor.row_errors[request_id] = ZeroDivisionError("on purpose")
        return {"request_id": request_id}

    return Subject("fake device", make, 1000, 60, 50, 60, fault)


def demo_subject() -> Subject:
    def make(alone: bool) -> AsyncLLMEngine:
        return AsyncLLMEngine(
            dtype="float32",
            device="cpu",
            num_blocks=200 if alone else 36,
            block_size=8,
            max_model_len=200,
            max_num_seqs=24,
            max_num_batched_tokens=64,
            async_scheduling=not alone,
            enable_prefix_caching=not alone,
            max_queued_requests=150,
            max_queued_tokens=20_000,
        )

    return Subject("demo model", make, 2048, 60, 40, 40, lambda: {"logits_processors": [faulty]})


async def run(subject: Subject, seconds: float, seed: int, clients: int) -> Outcome:
    """``clients`` tasks on each of three loops and two threads, for ``seconds``."""
    rng = random.Random(f"{seed}:{subject.name}")
    # libuv keeps a pipe for the rest of the process once a loop of it has run.
    for options in _LOOPS.values():
        await asyncio.to_thread(anyio.run, _nothing, **options)
    before = leftovers()
    async with subject.make(True) as engine:
        requests = draw_requests(
            rng,
            subject.num_tasks,
            subject.vocab_size,
            subject.longest_prompt,
            subject.longest_output,
        )
        tasks = await run_alone(engine, requests)
    ledger = Ledger()
    engine = subject.make(False)
    await engine.start()
    ledger.cancel_to_free = AbortWatch(engine).times
    began = time.monotonic()
    async with LagMeter() as meter:
        await unleash(engine, tasks, ledger, subject, rng, clients, began + seconds)
    await settle(engine, ledger)
    stats = engine.stats()
    await engine.aclose()
    del engine
    gc.collect()
    await asyncio.sleep(0.05)
    for what, left in leftovers().items():
        if left - before[what]:
            ledger.complain(f"{subject.name}: {what} left: {sorted(left - before[what])}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Outcome(subject.name, ledger, stats, meter.lags, time.monotonic() - began, peak)


async def _nothing() -> None:
    return None


async def unleash(
    engine: AsyncLLMEngine,
    tasks: Sequence[Task],
    ledger: Ledger,
    subject: Subject,
    rng: random.Random,
    clients: int,
    until: float,
) -> None:
    def client() -> Client:
        return Client(engine, tasks, ledger, random.Random(rng.getrandbits(64)), subject.fault)

    async def one_loop(group_of: list[Client]) -> None:
        try:
            async with anyio.create_task_group() as group:
                for member in group_of:
                    group.start_soon(member.run, until)
        except BaseException as error:
            ledger.complain(f"a loop ended with {error!r}")
            raise

    def other_loop(name: str, group_of: list[Client]) -> None:
        anyio.run(one_loop, group_of, **_LOOPS[name])

    llm = LLM(engine=engine)
    threads = [
        threading.Thread(target=other_loop, args=(name, [client() for _ in range(clients)]))
        for name in ("uvloop", "trio")
    ]
    threads += [threading.Thread(target=run_thread, args=(llm, client(), until)) for _ in range(4)]
    for thread in threads:
        thread.start()
    await one_loop([client() for _ in range(clients)])
    for thread in threads:
        await asyncio.to_thread(thread.join)


async def settle(engine: AsyncLLMEngine, ledger: Ledger) -> None:
    """After the last request everything must be free soon, and the books balance."""
    assert engine._thread is not None
    core = engine._thread.core
    for _ in range(2000):
        gc.collect(0)
        stats = engine.stats()
        if stats.num_free_blocks == stats.num_blocks and not stats.num_waiting:
            break
        await asyncio.sleep(0.005)
    else:
        ledger.complain(f"not all blocks are free: {stats}")
    await asyncio.wrap_future(core.call(check_scheduler, core.scheduler))
    if core.admission.num_live_requests or len(core.admission.queued_requests):
        ledger.complain(f"{core.admission.num_live_requests} requests are still accounted for")


async def fatal(seed: int) -> list[str]:
    """The device fails in the middle: every stream ends once, with the cause."""
    rng = random.Random(f"{seed}:fatal")
    wrong = []
    rig = fake(pipeline_depth=rng.choice([1, 2]), step_time=0.0002)
    engine = rig.engine()
    await engine.start()
    await engine.pause()
    streams = [engine.stream([i], max_tokens=200) for i in range(20)]
    rig.executor.faults[rng.randint(1, 60)] = OSError("the device is gone")
    await engine.resume()
    for stream in streams:
        try:
            await stream.result()
        except EngineDeadError as error:
            if not isinstance(error.__cause__, OSError):
                wrong.append(f"the cause is {error.__cause__!r}")
        else:
            wrong.append("a stream survived the device")
    await asyncio.wait_for(engine.aclose(), 10)
    return wrong


def leftovers() -> dict[str, set[str]]:
    """Threads, asyncio tasks and open files of this process. The tokenizer library's own
    worker pool is not among Python's threads."""
    files = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            files.add(f"{number} -> {os.readlink(f'/proc/self/fd/{number}')}")
        except OSError:
            continue
    tasks = {task.get_name() for task in asyncio.all_tasks()}
    names = {thread.name for thread in threading.enumerate()}
    return {
        "threads": {name for name in names if not name.startswith("asyncio_")},
        "tasks": tasks,
        "files": {file for file in files if "eventpoll" not in file and "socket" not in file},
    }
