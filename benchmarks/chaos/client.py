"""Clients: each makes one request after the other and treats it in some way."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from asyncllm import (
    LLM,
    AsyncLLMEngine,
    ContextLengthExceededError,
    DeadlineExceededError,
    EngineOverloadedError,
    InvalidRequestError,
    RequestError,
)
from asyncllm.stream import TokenStream
from benchmarks.chaos.ledger import Ledger
from benchmarks.chaos.workload import Task


class Fault(Exception):
    """Raised by a logits processor on purpose."""


def faulty(token_ids: Sequence[int], logits: Any) -> Any:
    raise Fault


class Client:
    """One task of one loop.

    Args:
        fault: options that make one request fail, and no other.
    """

    def __init__(
        self,
        engine: AsyncLLMEngine,
        tasks: Sequence[Task],
        ledger: Ledger,
        rng: random.Random,
        fault: Callable[[], dict[str, Any]],
    ) -> None:
        self.engine = engine
        self.tasks = tasks
        self.ledger = ledger
        self.rng = rng
        self.fault = fault
        self._ways = (
            (35, self.read_whole),
            (8, self.leave_by_break),
            (6, self.leave_by_aclose),
            (6, self.leave_by_abort),
            (6, self.leave_by_cancel),
            (4, self.leave_by_dropping),
            (8, self.read_slowly),
            (6, self.stall),
            (7, self.run_out_of_time),
            (5, self.ask_nonsense),
            (5, self.be_at_fault),
            (4, self.never_read),
        )

    async def run(self, until: float) -> None:
        weights, ways = zip(*self._ways, strict=True)
        while time.monotonic() < until:
            (way,) = self.rng.choices(ways, weights)
            try:
                await way()
            except EngineOverloadedError as error:
                self.ledger.note("overloaded")
                await anyio.sleep(min(error.retry_after, 0.05))

    # --- ways to treat a request ------------------------------------------------------

    def _submit(self, **more: Any) -> tuple[Task, TokenStream]:
        task = self.rng.choice(self.tasks)
        stream = self.engine.stream(task.prompt, **(task.options | more))
        return task, stream

    async def _read(self, task: Task, stream: TokenStream, pace: float = 0.0) -> None:
        """Reads to the end, which comes exactly once."""
        got: list[int] = []
        ends = 0
        async for delta in stream:
            got += delta.token_ids
            ends += delta.finish_reason is not None
            if pace:
                await anyio.sleep(self.rng.random() * pace)
        if ends != 1:
            self.ledger.complain(f"a stream ended {ends} times")
        self.ledger.note(f"finished: {stream.finish_reason}")
        self.ledger.compare(task, got, stream.finish_reason)

    async def _read_some(self, task: Task, stream: TokenStream) -> None:
        got: list[int] = []
        for _ in range(self.rng.randint(0, 3)):
            try:
                got += (await anext(stream)).token_ids
            except StopAsyncIteration:
                break
        self.ledger.compare(task, got, None)

    async def read_whole(self) -> None:
        await self._read(*self._submit())

    async def read_slowly(self) -> None:
        mode = self.rng.choice(["coalesce", "pause", "abort"])
        options = {"on_slow": mode, "max_unread": self.rng.randint(1, 12)}
        await self._read(*self._submit(**options), pace=0.004)

    async def stall(self) -> None:
        task, stream = self._submit(on_slow="pause", max_unread=self.rng.randint(1, 6))
        await anyio.sleep(self.rng.random() * 0.2)
        if self.rng.random() < 0.5:
            await self._read(task, stream)
        else:
            await stream.aclose()
            self.ledger.note("closed while stalled")

    async def leave_by_break(self) -> None:
        task = self.rng.choice(self.tasks)
        left = self.rng.randint(1, 5)
        async for _ in self.engine.stream(task.prompt, **task.options):
            left -= 1
            if not left:
                break
        self.ledger.note("cancelled: break")

    async def leave_by_aclose(self) -> None:
        task, stream = self._submit()
        async with stream:
            await self._read_some(task, stream)
        self.ledger.note("cancelled: aclose")

    async def leave_by_abort(self) -> None:
        task, stream = self._submit()
        await self._read_some(task, stream)
        self.engine.abort(stream.request_id)
        got = [token for delta in [d async for d in stream] for token in delta.token_ids]
        if stream.finish_reason is None:
            self.ledger.complain("an aborted stream had no end")
        self.ledger.note("cancelled: abort")
        del got

    async def leave_by_cancel(self) -> None:
        with anyio.move_on_after(self.rng.random() * 0.03):
            task, stream = self._submit()
            await self._read(task, stream, pace=self.rng.choice([0.0, 0.002]))
        self.ledger.note("cancelled: scope")

    async def leave_by_dropping(self) -> None:
        task, stream = self._submit()
        await self._read_some(task, stream)
        del stream
        self.ledger.note("cancelled: dropped")

    async def never_read(self) -> None:
        self._submit()
        self.ledger.note("cancelled: never read")

    async def run_out_of_time(self) -> None:
        task, stream = self._submit(timeout=0.001 + self.rng.random() * 0.05)
        try:
            await self._read(task, stream)
        except DeadlineExceededError as error:
            self.ledger.note("deadline")
            if error.partial is not None:
                self.ledger.compare(task, list(error.partial.token_ids), None)

    async def ask_nonsense(self) -> None:
        options: dict[str, Any] = self.rng.choice(
            [
                {"temperature": -1.0},
                {"max_tokens": 0},
                {"n": 3, "temperature": 0.0},
                {"on_slow": "explode"},
                {"stop_token_ids": [10**9]},
                {"no_such_field": 1},
            ]
        )
        prompt: Any = self.rng.choice([[1], [], [10**9], "", None, [1] * 100_000])
        try:
            self.engine.stream(prompt, **options)
        except (InvalidRequestError, ContextLengthExceededError):
            self.ledger.note("refused")
        else:
            self.ledger.complain(f"accepted {prompt!r:.40} with {options}")

    async def be_at_fault(self) -> None:
        _, stream = self._submit(**self.fault())
        with contextlib.suppress(RequestError):
            await stream.result()
            self.ledger.complain("a faulty request did not fail")
            return
        self.ledger.note("failed alone")


def run_thread(llm: LLM, client: Client, until: float) -> None:
    """A client without an event loop."""
    rng, ledger = client.rng, client.ledger
    while time.monotonic() < until:
        task = rng.choice(client.tasks)
        try:
            stream = llm.stream(task.prompt, **task.options)
        except EngineOverloadedError as error:
            ledger.note("overloaded")
            time.sleep(min(error.retry_after, 0.05))
            continue
        if rng.random() < 0.3:
            next(stream)
            stream.close()
            ledger.note("cancelled: thread")
        else:
            result = stream.result()
            ledger.note(f"finished: {result.finish_reason}")
            ledger.compare(task, list(result.token_ids), result.finish_reason)
