"""Every fault of a device, met while every verb of the engine is under way, with one step in
flight and with two: each stream ends once, with the right tokens and the right cause, every
call returns or raises, and nothing is left."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from asyncllm import EngineClosedError, EngineDeadError, RequestError
from asyncllm.core.executor import StepOutOfMemoryError
from asyncllm.runtime.event_loop import wait_for
from asyncllm.testing import FakeExecutor
from tests.fakes import core_of, fake, thread_of
from tests.idle import until
from tests.integrity import check_scheduler

STEP = 4
LENGTH = 12
PROMPTS = {"a": [1, 2, 3], "b": [4, 5], "c": [6]}


@dataclass
class Fault:
    """What happens in step ``STEP``; ``fatal`` faults kill the engine."""

    where: str
    error: type[BaseException] | None = None
    result: Callable[[Any], Any] | None = None
    row_error: bool = False
    hangs: bool = False

    @property
    def fatal(self) -> bool:
        return not self.row_error and self.error is not StepOutOfMemoryError


FAULTS = {
    "launch raises": Fault("launch", RuntimeError),
    "collect raises": Fault("collect", RuntimeError),
    "launch exits": Fault("launch", SystemExit),
    "collect is interrupted": Fault("collect", KeyboardInterrupt),
    "launch hangs": Fault("launch", hangs=True),
    "collect hangs": Fault("collect", hangs=True),
    "too few rows": Fault(
        "collect", result=lambda r: dataclasses.replace(r, token_ids=[], counts=[])
    ),
    "too few tokens": Fault("collect", result=lambda r: dataclasses.replace(r, token_ids=[1])),
    "no such token": Fault("collect", result=lambda r: dataclasses.replace(r, token_ids=[1, 1000])),
    "another step": Fault("collect", result=lambda r: dataclasses.replace(r, step=r.step + 1)),
    "one row fails": Fault("collect", row_error=True),
    "launch has no memory": Fault("launch", StepOutOfMemoryError),
    "collect has no memory": Fault("collect", StepOutOfMemoryError),
}
CAUSES = {
    "launch hangs": "longer than step_timeout=600 s",
    "collect hangs": "longer than step_timeout=600 s",
    "too few rows": "step 4 has 2 rows, its result 0",
    "too few tokens": "step 4 counts 2 tokens, its result has 1",
    "no such token": "step 4 sampled token 1000; the vocabulary has 1000 tokens",
    "another step": "expected the result of step 4, got that of 5",
}


class FaultyExecutor(FakeExecutor):
    """Waits until it is let go, so that the test can do something meanwhile: in the step of
    the fault or, ``early``, in the collection of the one before."""

    def __init__(self, info, fault: Fault, early: bool):
        super().__init__(info)
        self.fault = fault
        self.injected = fault.error("on purpose") if fault.error else ZeroDivisionError("b's own")
        self.waits_in = ("collect", STEP - 1) if early else (fault.where, STEP)
        self.reached, self.go = threading.Event(), threading.Event()
        self.hangs, self.wake_up = threading.Event(), threading.Event()
        if fault.result is not None:
            self.faults[STEP] = fault.result

    def launch(self, batch):
        self._meet("launch", batch.step)
        super().launch(batch)

    def collect(self):
        self._meet("collect", self._launched_batches[0].step)
        return super().collect()

    def _meet(self, where, step):
        if (where, step) == self.waits_in:
            self.reached.set()
            assert self.go.wait(20)
        if (where, step) != (self.fault.where, STEP):
            return
        if self.fault.hangs:
            self.hangs.set()
            assert self.wake_up.wait(20)
        elif self.fault.row_error:
            self.row_errors["b"] = self.injected
        elif self.fault.error is not None:
            raise self.injected


VERBS = {
    "nothing": None,
    "stream": None,
    "abort": None,
    "pause": lambda engine: engine.pause(),
    "resume": lambda engine: engine.resume(),
    "reset": lambda engine: engine.reset_prefix_cache(),
    "aclose": lambda engine: engine.aclose(),
    "drain": lambda engine: engine.aclose(drain=None),
    "wait": lambda engine: engine.wait_closed(),
}
QUIESCENT = ("pause", "resume", "reset")
CANCELLED = ["cancelled read", *(f"cancelled {name}" for name, call in VERBS.items() if call)]


async def outcome(awaitable):
    """What it returns, or the exception that it raises."""
    try:
        return await asyncio.wait_for(awaitable, 10)
    except BaseException as error:
        return error


async def read(stream):
    """Its tokens, and its finish reason or exception; after which there is nothing more."""
    tokens, end = [], None
    try:
        async for delta in stream:
            assert end is None
            tokens += delta.token_ids
            end = delta.finish_reason
    except Exception as error:
        end = error
    if isinstance(end, Exception):
        again = await outcome(stream.result())
        assert (type(again), str(again)) == (type(end), str(end))
        assert again.__cause__ is end.__cause__
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    return tokens, end


class Case:
    """One fault, one verb, one depth."""

    def __init__(self, name: str, verb: str, depth: int):
        self.name, self.verb, self.depth = name, verb, depth
        self.fault = FAULTS[name]
        rig = fake(pipeline_depth=depth)
        # Of two steps in flight, a verb that wants none runs into the second's fault.
        early = depth == 2 and self.fault.where == "collect" and verb.endswith(QUIESCENT)
        self.executor = rig.executor = FaultyExecutor(rig.info, self.fault, early)
        self.engine = rig.engine(step_timeout=600)
        self.closes = verb.endswith(("aclose", "drain"))
        self.closes |= verb == "wait" and not self.fault.fatal

    async def run(self):
        await self.engine.start()
        self.core = core_of(self.engine)
        await self.engine.pause()
        self.streams = {name: self.submit(name) for name in ("a", "b")}
        reader = asyncio.ensure_future(read(self.streams["a"]))
        await self.engine.resume()
        await until(self.executor.reached.is_set)
        result = await self.act(reader)
        if not (self.fault.fatal or self.closes):
            await self.engine.resume()
        self.ends = {n: await read(s) for n, s in self.streams.items() if n != "a"}
        if self.verb != "cancelled read":
            self.ends["a"] = await asyncio.wait_for(reader, 10)
        (self.check_death if self.fault.fatal else self.check_life)(result)
        await self.check_afterwards()
        await self.close()

    def submit(self, name):
        return self.engine.stream(PROMPTS[name], max_tokens=LENGTH, request_id=name)

    async def act(self, reader):
        """Does the verb while the device waits, and lets that go on."""
        verb, acting = self.verb.removeprefix("cancelled "), None
        if verb == "stream":
            self.streams["c"] = self.submit("c")
        elif verb == "abort":
            self.engine.abort("b")
        elif verb == "read":
            acting = reader
        elif verb != "nothing":
            acting = asyncio.ensure_future(VERBS[verb](self.engine))
        for _ in range(3):
            await asyncio.sleep(0)
        if acting is not None and verb != self.verb:
            acting.cancel()
        self.executor.go.set()
        if self.fault.hangs:
            await until(self.executor.hangs.is_set)
            self.core.clock = lambda: time.monotonic() + 601
            thread_of(self.engine).check_for_hung_step()
        if self.verb == "wait" and not self.fault.fatal:
            await until(lambda: not self.core.admission.num_live_requests)
            await self.engine.aclose()
        return None if acting is None else await outcome(acting)

    def is_cause(self, error):
        if self.name in CAUSES:
            return CAUSES[self.name] in str(error)
        return error is self.executor.injected

    def reference(self, name, count=LENGTH):
        return self.executor.reference(PROMPTS[name], count)

    def check_death(self, result):
        """Every stream and every call has the device's own error for a cause."""
        known = STEP - (self.depth - 1 if self.fault.where == "launch" else 0)
        for name, (tokens, end) in self.ends.items():
            assert tokens == self.reference(name, 0 if name == "c" else known)
            assert isinstance(end, EngineDeadError)
            assert self.is_cause(end.__cause__)
        if self.verb in ("pause", "resume", "reset", "wait"):
            assert isinstance(result, EngineDeadError)
            assert self.is_cause(result.__cause__)
        else:
            self.check_result(result)

    def check_life(self, result):
        """A request that was neither aborted nor at fault has all of its tokens."""
        for name, (tokens, end) in self.ends.items():
            if self.fault.row_error and name == "b":
                assert tokens == self.reference("b", STEP)
                assert isinstance(end, RequestError)
                assert end.__cause__ is self.executor.injected
            elif self.verb.endswith("aclose") or (self.verb, name) == ("abort", "b"):
                assert end == "abort"
                assert tokens == self.reference(name, len(tokens))
                assert STEP - 1 <= len(tokens) < LENGTH
            else:
                assert (tokens, end) == (self.reference(name), "length")
        self.check_result(result)

    def check_result(self, result):
        if self.verb in CANCELLED:
            assert isinstance(result, asyncio.CancelledError)
        else:
            # Prefixes are kept while requests hold KV, which those of a failed step do not.
            reset = self.fault.error is StepOutOfMemoryError
            assert result is (reset if self.verb == "reset" else None)

    async def check_afterwards(self):
        engine = self.engine
        if self.closes:
            await engine.aclose()
            assert engine.state == "closed"
            with pytest.raises(EngineClosedError):
                engine.stream([1])
        elif self.fault.fatal:
            assert engine.state == "dead"
            for call in (engine.pause, engine.resume, engine.reset_prefix_cache):
                assert self.is_cause((await outcome(call())).__cause__)
            with pytest.raises(EngineDeadError) as caught:
                engine.stream([1])
            assert self.is_cause(caught.value.__cause__)
            engine.abort(["a", "b"])
            self.check_idle(engine.stats())
        else:
            assert engine.state == "running"
            await wait_for(self.core.call(check_scheduler, self.core.scheduler))
            self.check_idle(engine.stats())
            completion = await engine.generate([7], max_tokens=5)
            assert list(completion.token_ids) == self.executor.reference([7], 5)

    def check_idle(self, stats):
        assert (stats.num_running, stats.num_waiting, stats.num_paused) == (0, 0, 0)
        assert stats.num_free_blocks == stats.num_blocks

    async def close(self):
        """Nothing is left; a thread that comes back too late changes nothing any more."""
        thread, core, engine = thread_of(self.engine), self.core, self.engine
        await asyncio.wait_for(engine.aclose(), 10)
        stats = core.stats()
        self.executor.wake_up.set()
        await until(lambda: not thread._thread.is_alive())
        assert core.stats() == stats
        assert stats.num_finished + stats.num_aborted + stats.num_failed == stats.num_requests
        assert (engine.state, self.executor.closed) == ("closed", True)
        assert (core.admission.num_live_requests, len(core.admission.queued_requests)) == (0, 0)
        assert not core._in_flight
        assert not core._calls_between_steps._unfinished_futures
        assert not engine._mailboxes._mailbox_by_loop
        assert (engine.error is None) is not self.fault.fatal
        ended = await outcome(engine.wait_closed())
        if self.fault.fatal:
            assert isinstance(ended, EngineDeadError)
            assert self.is_cause(ended.__cause__)
            assert self.is_cause(engine.error.__cause__)
        else:
            assert ended is None


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("verb", [*VERBS, *CANCELLED])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault(fault, verb, depth):
    asyncio.run(Case(fault, verb, depth).run())
