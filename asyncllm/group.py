"""EngineGroup: several engines behind one object."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from typing import Any

from asyncllm import validation as check
from asyncllm.checkpoint.progress import LoadStage
from asyncllm.core.engine_core import CLOSED_MESSAGE
from asyncllm.core.execution_report import ExecutionReport
from asyncllm.engine import AsyncLLMEngine, EngineState
from asyncllm.errors import EngineClosedError, EngineError
from asyncllm.group_agreement import check_compatible_engines
from asyncllm.group_queue import GroupQueue
from asyncllm.observer import Observer
from asyncllm.outputs import EngineStats
from asyncllm.runtime.engine_thread import EngineThread
from asyncllm.runtime.event_loop import join_thread, wait_for
from asyncllm.runtime.input_processor import InputProcessor
from asyncllm.runtime.mailbox import ThreadMailbox
from asyncllm.runtime.prompt_encoder import PromptEncoder
from asyncllm.runtime.request_options import normalized_request_ids
from asyncllm.runtime.worker_thread import Cooldown

_THREAD_JOIN_SECONDS = 2.0

_STEP_CHECK_SECONDS = 1.0
"""Seconds between two checks of the engines' steps while a thread waits without an event loop."""


@dataclass(frozen=True, slots=True)
class GroupStats(EngineStats):
    """Statistics of an EngineGroup: sums over its engines, and each engine's own statistics by
    number. ``is_paused`` is true if all running engines are paused; ``last_step_time`` is the
    longest of the engines' own.

    Attributes:
        engines: statistics of each engine by its number.
        states: state of each engine by its number.
    """

    engines: Mapping[int, EngineStats] = field(default_factory=dict)
    states: Mapping[int, EngineState] = field(default_factory=dict)


def _check_can_join(engine: Any) -> None:
    """Refuse an object that cannot join a group as an engine."""
    if not isinstance(engine, AsyncLLMEngine) or isinstance(engine, EngineGroup):
        raise check.value_error("engine", engine, "an AsyncLLMEngine")
    if engine._group is not None:
        raise check.value_error("engine", engine, "an engine that is in no group")
    if engine.state not in ("new", "running"):
        raise check.value_error("engine", engine, "an engine that is new or running")


class EngineGroup(AsyncLLMEngine):
    """Several engines of one process as one engine, such as one per GPU.

        engines = [AsyncLLMEngine(model, device=f"cuda:{i}") for i in range(2)]
        async with EngineGroup(engines) as engine:
            async for delta in engine.stream("Tell me a story."):
                print(delta, end="", flush=True)

    Each request goes to the engine that is expected to answer first: the one that has the longest
    part of the prompt cached, unless more work waits at that engine. The request's stream is that
    engine's own. A request gets the same tokens from whichever engine runs it.

    Functions with an ``engine`` argument accept a group. The group owns its engines: it starts new
    ones when it is started, and closes all when it is closed. The engines may still be used by
    themselves. A paused engine gets requests only while all engines are paused.

    Args:
        engines: engines, all new or all running. They have to agree in vocabulary, chat template,
            ``max_model_len``, and all other settings by which requests are checked. A group of
            running engines needs no ``start``.
        retries: how often a request that has no token yet may be sent again because its engine
            died. The request is sent again when its stream is read, and fails if all other engines
            are full.

    Raises:
        InvalidRequestError: for engines that cannot form a group.
    """

    def __init__(self, engines: Sequence[AsyncLLMEngine], *, retries: int = 0) -> None:
        engine_tuple = check.bounded_tuple("engines", engines, "engines")
        if not engine_tuple:
            raise check.value_error("engines", engines, "at least one engine")
        for index, engine in enumerate(engine_tuple):
            _check_can_join(engine)
            if any(engine is other for other in engine_tuple[:index]):
                raise check.value_error("engines", engine, "each engine once")
        running = [engine for engine in engine_tuple if engine.state == "running"]
        if running and len(running) < len(engine_tuple):
            raise check.value_error("engines", engines, "engines that are all new, or all running")
        for engine in running:
            check_compatible_engines(engine, running[0])
        super().__init__(config=engine_tuple[0].config)
        self._queue = GroupQueue(check.integer("retries", retries, 0, 100))
        self._engine_numbers = itertools.count()
        self._is_paused = False
        self._cooldown = Cooldown(self._queue.has_running_requests)
        for engine in engine_tuple:
            self._add_engine(engine)
        if running:
            self._set_primary(running[0])

    @property
    def engines(self) -> Mapping[int, AsyncLLMEngine]:
        """The engines by number. Numbers count from 0 and are not used again. An engine that is
        being removed is among them until it has closed."""
        return dict(self._queue.engines)

    # --- lifecycle ---------------------------------------------------------------------

    async def start(self) -> None:
        """Start all new engines at the same time. If one fails or the call is cancelled, the new
        engines are as if never started, and may form another group. Raises the errors of
        ``AsyncLLMEngine.start``, and InvalidRequestError for an engine that another group has
        taken."""
        if self.state != "new":
            raise EngineError(f"start(): the group is {self.state}; expected a new one")
        engines = self._queue.engines
        try:
            for number, engine in engines.items():
                self._queue.claim_engine(engine, number)
            await self._start_engines(list(engines.values()))
            for engine in engines.values():
                self._queue.admit_waiting_requests(engine)
        except BaseException:
            self._queue.release_engines(*engines.values())
            raise

    async def add(self, engine: AsyncLLMEngine) -> None:
        """Add an engine; a new one is started first. Later requests may go to it.

        Raises:
            InvalidRequestError: for an engine that belongs to a group, for one that is neither new
                nor running, and for one whose model or settings differ from the others'.
            AsyncLLMError: any error of the engine's start.
        """
        self._require_input_processor()
        _check_can_join(engine)
        # Claim the engine now: while it starts, another group could take it.
        self._queue.claim_engine(engine, -1)
        try:
            await self._start_engines([engine])
            if self._is_paused:
                await engine.pause()
            self._require_input_processor()
        except BaseException:
            self._queue.release_engines(engine)
            if self._is_closed:
                await engine.aclose()
            raise
        self._add_engine(engine)

    async def remove(self, engine: AsyncLLMEngine, *, drain: float | None = 0.0) -> None:
        """Remove an engine and close it. No request goes to it from now on.

        Args:
            drain: seconds that its requests may go on, as for ``aclose``.

        Raises:
            InvalidRequestError: for an engine that is not in the group, and for the last one that
                runs.
        """
        self._require_input_processor()
        number = engine._observers.engine if isinstance(engine, AsyncLLMEngine) else None
        if number is None or self._queue.engines.get(number) is not engine:
            raise check.value_error("engine", engine, "an engine of this group")
        others = [other for other in self._queue.running_engines() if other is not engine]
        if not others:
            accepted = "an engine beside which another runs; aclose() closes the group"
            raise check.value_error("engine", engine, accepted)
        if engine._submitter is self._queue.primary_submitter:
            self._set_primary(others[0])
        try:
            await engine.aclose(drain=drain)
        finally:  # Even if this call is cancelled, the engine goes on closing.
            self._queue.drop_engine(number)

    async def aclose(self, *, drain: float | None = 0.0) -> None:
        """Close all engines at the same time; see ``AsyncLLMEngine.aclose``."""
        is_in_other_group = self._queue.is_in_other_group
        engines = [one for one in self._queue.engines.values() if not is_in_other_group(one)]
        if self.state == "starting":
            raise EngineError("aclose(): the group is starting; cancel start() instead")
        for engine in engines:
            engine._begin_close(drain)
        self._is_closed = True
        for engine in engines:
            await engine.aclose(drain=drain)
        if self._input_processor is not None:
            for thread in self._input_processor.prompts.tokenizer_threads.close():
                await join_thread(thread, _THREAD_JOIN_SECONDS)

    async def wait_closed(self) -> None:
        """Wait until no engine runs; see ``AsyncLLMEngine.wait_closed``."""
        if self._input_processor is None and not self._is_closed:
            raise self._not_started_error()
        while True:
            for engine in list(self._queue.engines.values()):
                with suppress(EngineError):
                    await engine.wait_closed()
            if self.state != "running":
                break
        if self.error is not None:
            raise self.error

    @property
    def state(self) -> EngineState:
        """State of the group: "running" while one of its engines is, and "dead" if one is dead and
        none runs. ``stats().states`` has the state of each engine."""
        states: list[EngineState] = [
            "new" if self._queue.is_in_other_group(engine) else engine.state
            for engine in self._queue.engines.values()
        ]
        order = ("starting", "new", "running", "dead")
        if self._input_processor is not None:
            order = ("running", "dead")
        best = min(states, key=lambda state: order.index(state) if state in order else len(order))
        return best if best in order and not self._is_closed else "closed"

    @property
    def error(self) -> EngineError | None:
        """Error of the first engine that failed. None while an engine runs, and after the
        application's own ``aclose``."""
        if self.state == "running":
            return None
        errors = [engine.error for engine in self._queue.engines.values()]
        return next((error for error in errors if error is not None), None)

    def __del__(self) -> None:
        """Release the engines from the group; their own destructors close them."""
        if hasattr(self, "_queue"):
            self._queue.release_engines(*self._queue.engines.values())

    @property
    def load_progress(self) -> tuple[int, int]:
        """Sums of the engines' ``load_progress``."""
        progress = [engine.load_progress for engine in self._queue.engines.values()]
        return sum(done for done, _ in progress), sum(total for _, total in progress)

    @property
    def load_stage(self) -> LoadStage:
        """Stage of the first engine that is still loading."""
        engines = list(self._queue.engines.values())
        loading = [engine for engine in engines if engine.state == "starting"]
        return (loading or engines)[0].load_stage

    # --- requests ----------------------------------------------------------------------

    def abort(self, request_id: str | Iterable[str]) -> None:
        ids = normalized_request_ids(request_id)
        self._require_input_processor()
        for core in self._queue.engine_cores().values():
            for each_id in ids:
                group = core.admission.get_live_group(each_id)
                if group is not None:
                    core.abort(group)
        for each_id in ids:
            stream = self._queue.retryable_streams.get(each_id)
            if stream is not None:
                stream.abort()

    def cached_prefix(self, token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        """Largest result of ``AsyncLLMEngine.cached_prefix`` among the engines."""
        self._require_input_processor()
        longest = 0
        for engine in self._queue.running_engines():
            with suppress(EngineError):  # The engine may be removed meanwhile.
                longest = max(longest, engine.cached_prefix(token_ids, cache_salt))
        return longest

    # --- the group as a whole ----------------------------------------------------------

    async def _set_paused(self, is_paused: bool) -> None:
        self._require_input_processor()
        self._is_paused = is_paused
        await self._call_running_engines(lambda core: core.set_suspended(is_paused))

    async def reset_prefix_cache(self) -> bool:
        """Evict all cached prefixes of all engines; an engine whose requests hold KV blocks keeps
        its own. Returns False if any engine kept its prefixes."""
        self._require_input_processor()
        return all(
            await self._call_running_engines(lambda core: core.scheduler.kv.reset_prefix_cache())
        )

    async def _call_running_engines(self, function: Any) -> list[Any]:
        """Run ``function(core)`` on the threads of all running engines at the same time. Results of
        engines that end meanwhile are left out."""
        cores = [
            engine._submitter.core for engine in self._queue.running_engines() if engine._submitter
        ]
        if not cores:
            raise self.error or EngineClosedError(CLOSED_MESSAGE)
        results = []
        for call in [core.call(function, core) for core in cores]:
            with suppress(EngineError):
                results.append(await wait_for(call))
        return results

    async def execution_report(self) -> ExecutionReport:
        """``AsyncLLMEngine.execution_report`` of the first engine that runs."""
        self._require_input_processor()
        for engine in self._queue.running_engines():
            return await engine.execution_report()
        raise self.error or EngineClosedError(CLOSED_MESSAGE)

    def stats(self) -> GroupStats:
        """Snapshot of the engines' counters and their sums. Never blocks; any thread may call
        it."""
        self._require_input_processor()
        states: dict[int, EngineState] = {
            number: engine.state for number, engine in self._queue.engines.items()
        }
        engine_stats = {number: core.stats() for number, core in self._queue.engine_cores().items()}
        total: dict[str, Any] = {
            counter.name: sum(getattr(stats, counter.name) for stats in engine_stats.values())
            for counter in fields(EngineStats)
        }
        total["kv_cache_usage"] = 1.0 - total["num_free_blocks"] / max(total["num_blocks"], 1)
        running = [engine_stats[n] for n in engine_stats if states.get(n) == "running"]
        total["is_paused"] = all(stats.is_paused for stats in running)
        total["last_step_time"] = max(stats.last_step_time for stats in engine_stats.values())
        return GroupStats(**total, engines=engine_stats, states=states)

    def add_observer(self, observer: Observer) -> None:
        """Register an observer with every engine, those that are added later included."""
        self._observers.add(observer)
        for engine in self._queue.engines.values():
            engine.add_observer(observer)

    def remove_observer(self, observer: Observer) -> None:
        self._observers.remove(observer)
        for engine in self._queue.engines.values():
            engine.remove_observer(observer)

    @property
    def _max_queued_requests(self) -> int:
        return sum(engine.config.max_queued_requests for engine in self._queue.engines.values())

    @property
    def _num_slots(self) -> int:
        return sum(engine._num_slots for engine in self._queue.engines.values())

    # --- engines and checks ------------------------------------------------------------

    async def _start_engines(self, engines: Sequence[AsyncLLMEngine]) -> None:
        """Start the new engines, all or none. Refuse engines that do not agree with the group."""
        with ExitStack() as stack:
            new = [engine for engine in engines if engine.state == "new"]
            for engine in new:
                # Share one cooldown: a job on any thread of the process delays all engines.
                engine._cooldown = self._cooldown
            threads = [stack.enter_context(engine._start_thread()) for engine in new]
            for engine, thread in zip(new, threads, strict=True):
                await wait_for(thread.ready)
                engine._adopt_thread(thread)
            primary = self if self._input_processor is not None else engines[0]
            for engine in engines:
                check_compatible_engines(engine, primary)
            for thread in threads:
                thread.supervise()
        if self._input_processor is None:
            self._set_primary(engines[0])

    def _add_engine(self, engine: AsyncLLMEngine) -> None:
        """Number an engine, and let the queue send requests to it."""
        for observer in self._observers.registered:
            engine.add_observer(observer)
        self._queue.add_engine(engine, next(self._engine_numbers))

    def _set_primary(self, engine: AsyncLLMEngine) -> None:
        """Use an engine's model and tokenizer to prepare later requests."""
        loaded = engine._require_started().loaded_model
        assert engine._submitter is not None
        self._queue.primary_submitter = engine._submitter
        if self._input_processor is None:
            prompts = PromptEncoder(loaded, engine.config, self._cooldown)
            self._input_processor = InputProcessor(loaded, engine.config, prompts, self._queue)
        else:
            self._input_processor.loaded_model = self._input_processor.prompts.loaded_model = loaded

    def _require_started(self) -> EngineThread:
        for engine in self._queue.engines.values():
            if engine._submitter is self._queue.primary_submitter and engine._submitter is not None:
                return engine._require_started()
        raise self._not_started_error()

    def _require_input_processor(self) -> InputProcessor:
        if self._input_processor is None:
            raise self._not_started_error()
        if self._is_closed:
            raise EngineClosedError(CLOSED_MESSAGE)
        if os.getpid() != self._queue.core.pid:
            raise self._require_started().forked_error()
        return self._input_processor

    def _thread_mailbox(self) -> ThreadMailbox:
        self._require_input_processor()
        return ThreadMailbox(_STEP_CHECK_SECONDS, self._check_for_hung_steps)

    def _check_for_hung_steps(self) -> None:
        for engine in self._queue.engines.values():
            if engine._thread is not None:
                engine._thread.check_for_hung_step()

    def __repr__(self) -> str:
        return f"<EngineGroup of {len(self._queue.engines)} {self.state}>"
