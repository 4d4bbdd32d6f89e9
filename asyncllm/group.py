"""EngineGroup: several engines behind one object."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from asyncllm import validation as check
from asyncllm.checkpoint.progress import LoadStage
from asyncllm.core.engine_core import CLOSED, EngineCore
from asyncllm.core.execution_report import ExecutionReport
from asyncllm.core.request import Request
from asyncllm.engine import AsyncLLMEngine, EngineState
from asyncllm.errors import (
    AsyncLLMError,
    EngineClosedError,
    EngineError,
    EngineOverloadedError,
    InvalidRequestError,
)
from asyncllm.observer import Observer, Observers, RequestInfo
from asyncllm.outputs import EngineStats, Usage
from asyncllm.routing import (
    TEXT_PIECE,
    Candidate,
    PrefixIndex,
    Route,
    Router,
    Sent,
    text_hashes,
)
from asyncllm.runtime.engine_thread import EngineThread
from asyncllm.runtime.event_loop import join, wait_for
from asyncllm.runtime.input_processor import InputProcessor
from asyncllm.runtime.mailbox import ThreadMailbox
from asyncllm.runtime.prompt_encoder import PromptEncoder
from asyncllm.runtime.request_options import request_ids
from asyncllm.runtime.submitter import Submission, Submitter
from asyncllm.runtime.worker_thread import Rest
from asyncllm.stream import TokenStream
from asyncllm.structured.compiler import GrammarCompiler

_JOIN_TIMEOUT = 2.0

_WATCH_INTERVAL = 1.0
"""Seconds between two checks of the engines' steps while a thread waits without an event loop."""

_MAX_PIECES = 4096
"""Maximum number of pieces of text that are remembered for each engine: 8 MiB of text."""

_MAX_CHARACTERS = 1 << 16
"""Number of characters of a text that are hashed before it is tokenised."""

_TOKENS_PER_PIECE = TEXT_PIECE // 4

_COMMON_SETTINGS = (
    "scheduling_policy",
    "max_logprobs",
    "logits_processors",
    "tool_call_parser",
    "reasoning_parser",
)
"""Fields of EngineConfig by which a request is checked before its engine is chosen."""


@dataclass(frozen=True, slots=True)
class GroupStats(EngineStats):
    """Statistics of an EngineGroup: the sums of its engines' statistics, and these by number. It is
    paused if all engines are. ``last_step_time`` is the longest.

    Attributes:
        engines: statistics of each engine by its number.
        states: state of each engine by its number.
    """

    engines: Mapping[int, EngineStats] = field(default_factory=dict)
    states: Mapping[int, EngineState] = field(default_factory=dict)


class EngineGroup(AsyncLLMEngine):
    """Several engines of one process as one engine, such as one per GPU.

        engines = [AsyncLLMEngine(model, device=f"cuda:{i}") for i in range(2)]
        async with EngineGroup(engines) as engine:
            async for delta in engine.stream("Tell me a story."):
                print(delta, end="", flush=True)

    Each request goes to the engine that is expected to answer first: the one that has the longest
    part of the prompt cached, unless more work waits there. Its stream is that engine's own. A
    request has the same tokens on every engine.

    ``engine`` arguments accept a group. It owns its engines: new ones are started with it, and all
    are closed with it. They may still be used by themselves; one that is paused gets requests only
    while all are.

    Args:
        engines: engines, all new or all running. They have to agree in vocabulary, chat template,
            ``max_model_len``, and all other settings by which requests are checked. A group of
            running engines needs no ``start``.
        retries: how often a request without a token may be sent again because its engine died. It
            is sent when its stream is read, and fails after all if the other engines are full.

    Raises:
        InvalidRequestError: for engines that cannot form a group.
    """

    def __init__(self, engines: Sequence[AsyncLLMEngine], *, retries: int = 0) -> None:
        given = check.items("engines", engines, "engines")
        if not given:
            raise check.invalid("engines", engines, "at least one engine")
        for index, engine in enumerate(given):
            _check_new(engine)
            if any(engine is other for other in given[:index]):
                raise check.invalid("engines", engine, "each engine once")
        running = [engine for engine in given if engine.state == "running"]
        if running and len(running) < len(given):
            raise check.invalid("engines", engines, "engines that are all new, or all running")
        for engine in running:
            _check_agreement(engine, running[0])
        self.config = given[0].config
        self._queue = _GroupQueue(check.integer("retries", retries, 0, 100))
        self._numbers = itertools.count()
        self._thread = None
        self._closed = self._is_paused = False
        self._observers = Observers()
        self._rest = Rest(self._has_running_requests)
        self._input_processor = None
        for engine in given:
            self._add(engine)
        if running:
            self._lead(running[0])

    @property
    def engines(self) -> Mapping[int, AsyncLLMEngine]:
        """The engines by number. Numbers count from 0 and are not used again. An engine that is
        being removed is among them until it has closed."""
        return dict(self._queue.engines)

    # --- lifecycle ---------------------------------------------------------------------

    async def start(self) -> None:
        """Start all engines that are new, at the same time. If one fails or the call is cancelled,
        these are as if they had never been started; exceptions as for an engine."""
        if self.state != "new":
            raise EngineError(f"start(): the group is {self.state}; expected a new one")
        await self._start_engines(list(self._queue.engines.values()))

    async def add(self, engine: AsyncLLMEngine) -> None:
        """Add an engine; a new one is started first. Later requests may go to it.

        Raises:
            InvalidRequestError: for an engine that does not agree with the others, is in a group,
                or is neither new nor running.
            AsyncLLMError: any exception of its start.
        """
        self._running()
        _check_new(engine)
        engine._observers.engine = -1  # Refuses the engine to other groups meanwhile.
        try:
            await self._start_engines([engine])
            if self._is_paused:
                await engine.pause()
            self._running()
        except BaseException:
            engine._observers.engine = None
            if self._closed:
                await engine.aclose()
            raise
        self._add(engine)

    async def remove(self, engine: AsyncLLMEngine, *, drain: float | None = 0.0) -> None:
        """Remove an engine and close it. No request goes to it from now on.

        Args:
            drain: seconds that its requests may go on, as for ``aclose``.

        Raises:
            InvalidRequestError: for an engine that is not in the group, and for the last one that
                runs.
        """
        self._running()
        number = engine._observers.engine if isinstance(engine, AsyncLLMEngine) else None
        if number is None or self._queue.engines.get(number) is not engine:
            raise check.invalid("engine", engine, "an engine of this group")
        others = [one for one in self._queue.running() if one is not engine]
        if not others:
            accepted = "an engine beside which another runs; aclose() closes the group"
            raise check.invalid("engine", engine, accepted)
        if engine._submitter is self._queue.lead:
            self._lead(others[0])
        try:
            await engine.aclose(drain=drain)
        finally:  # If the call is cancelled, closing goes on all the same.
            self._queue.drop(number)
            engine._observers.engine = None

    async def aclose(self, *, drain: float | None = 0.0) -> None:
        """Close all engines at the same time; see ``AsyncLLMEngine.aclose``."""
        engines = list(self._queue.engines.values())
        if self.state == "starting":
            raise EngineError("aclose(): the group is starting; cancel start() instead")
        for engine in engines:
            engine._begin_close(drain)
        self._closed = True
        for engine in engines:
            await engine.aclose(drain=drain)
        if self._input_processor is not None:
            thread = self._input_processor.prompts.long_texts.close()
            if thread is not None:
                await join(thread, _JOIN_TIMEOUT)

    async def wait_closed(self) -> None:
        """Wait until no engine runs; see ``AsyncLLMEngine.wait_closed``."""
        if self._input_processor is None and not self._closed:
            raise self._not_started()
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
        none runs. ``stats().states`` has the engines' own."""
        found: list[EngineState] = [one.state for one in self._queue.engines.values()]
        order = ("starting", "new", "running", "dead")
        if self._input_processor is not None:
            order = ("running", "dead")
        best = min(found, key=lambda state: order.index(state) if state in order else len(order))
        return best if best in order and not self._closed else "closed"

    @property
    def error(self) -> EngineError | None:
        """Why the group ended: the error of the first engine that has one. None while an engine
        runs, and after the application's own ``aclose``."""
        if self.state == "running":
            return None
        errors = [engine.error for engine in self._queue.engines.values()]
        return next((error for error in errors if error is not None), None)

    def __del__(self) -> None:
        """Leave the engines to their own destructors."""

    @property
    def load_progress(self) -> tuple[int, int]:
        """Sums of the engines' ``load_progress``."""
        done, total = zip(*[one.load_progress for one in self._queue.engines.values()], strict=True)
        return sum(done), sum(total)

    @property
    def load_stage(self) -> LoadStage:
        """Stage of the first engine that is still loading."""
        engines = list(self._queue.engines.values())
        loading = [one for one in engines if one.state == "starting"]
        return (loading or engines)[0].load_stage

    # --- requests ----------------------------------------------------------------------

    def abort(self, request_id: str | Iterable[str]) -> None:
        ids = request_ids(request_id)
        self._running()
        for core in self._queue.cores():
            for one in ids:
                group = core.admission.get_live(one)
                if group is not None:
                    core.abort(group)
        for one in ids:
            stream = self._queue.retried.get(one)
            if stream is not None:
                stream.abort()

    def cached_prefix(self, token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        """``AsyncLLMEngine.cached_prefix`` of the engine that has most cached."""
        self._running()
        most = 0
        for engine in self._queue.running():
            with suppress(EngineError):  # It may be removed meanwhile.
                most = max(most, engine.cached_prefix(token_ids, cache_salt))
        return most

    # --- the group as a whole ----------------------------------------------------------

    async def _suspend(self, suspended: bool) -> None:
        self._running()
        self._is_paused = suspended
        await self._call_all(lambda core: core.suspend(suspended))

    async def reset_prefix_cache(self) -> bool:
        """Evict all cached prefixes of all engines; an engine whose requests hold KV blocks keeps
        its own. Returns whether none did."""
        self._running()
        return all(await self._call_all(lambda core: core.scheduler.kv.reset_prefix_cache()))

    async def _call_all(self, run: Any) -> list[Any]:
        """Run ``run(core)`` on the thread of every engine that runs, at the same time. Results of
        engines that end meanwhile are left out."""
        cores = [engine._submitter.core for engine in self._queue.running() if engine._submitter]
        if not cores:
            raise self.error or EngineClosedError(CLOSED)
        results = []
        for call in [core.call(run, core) for core in cores]:
            with suppress(EngineError):
                results.append(await wait_for(call))
        return results

    async def execution_report(self) -> ExecutionReport:
        """``AsyncLLMEngine.execution_report`` of the first engine that runs."""
        self._running()
        for engine in self._queue.running():
            return await engine.execution_report()
        raise self.error or EngineClosedError(CLOSED)

    def stats(self) -> GroupStats:
        """Snapshot of the engines' counters and their sums. Never blocks; any thread may call
        it."""
        self._running()
        engines = self._queue.engines
        each = {n: one._submitter.core.stats() for n, one in engines.items() if one._submitter}
        total: dict[str, Any] = {
            one.name: sum(getattr(stats, one.name) for stats in each.values())
            for one in fields(EngineStats)
        }
        total["kv_cache_usage"] = 1.0 - total["num_free_blocks"] / max(total["num_blocks"], 1)
        total["is_paused"] = all(
            one.is_paused for n, one in each.items() if engines[n].state == "running"
        )
        total["last_step_time"] = max(stats.last_step_time for stats in each.values())
        states: dict[int, EngineState] = {n: one.state for n, one in engines.items()}
        return GroupStats(**total, engines=each, states=states)

    def add_observer(self, observer: Observer) -> None:
        """Register an observer with every engine, those that are added later included."""
        self._observers.add(observer)
        for engine in self._queue.engines.values():
            engine.add_observer(observer)

    def remove_observer(self, observer: Observer) -> None:
        self._observers.remove(observer)
        for engine in self._queue.engines.values():
            engine.remove_observer(observer)

    def _has_running_requests(self) -> bool:
        return any(core.scheduler.running for core in self._queue.cores())

    @property
    def _max_queued_requests(self) -> int:
        return sum(one.config.max_queued_requests for one in self._queue.engines.values())

    # --- engines and checks ------------------------------------------------------------

    async def _start_engines(self, engines: Sequence[AsyncLLMEngine]) -> None:
        """Start those that are new, all or none, unless they do not agree with the group."""
        with ExitStack() as stack:
            new = [one for one in engines if one.state == "new"]
            for engine in new:
                engine._rest = self._rest  # Threads of one process share its GIL.
            threads = [stack.enter_context(engine._starting()) for engine in new]
            for engine, thread in zip(new, threads, strict=True):
                await wait_for(thread.ready)
                engine._adopt_thread(thread)
            lead = self if self._input_processor is not None else engines[0]
            for engine in engines:
                _check_agreement(engine, lead)
            for thread in threads:
                thread.supervise()
        if self._input_processor is None:
            self._lead(engines[0])

    def _add(self, engine: AsyncLLMEngine) -> None:
        """Number an engine, and let requests go to it."""
        number = engine._observers.engine = next(self._numbers)
        for observer in self._observers.all:
            engine.add_observer(observer)
        self._queue.engines = {**self._queue.engines, number: engine}

    def _lead(self, engine: AsyncLLMEngine) -> None:
        """Use an engine's model and tokenizer to prepare later requests."""
        loaded = engine._require_started().loaded
        assert engine._submitter is not None
        self._queue.lead = engine._submitter
        if self._input_processor is None:
            prompts = PromptEncoder(loaded, engine.config, self._rest)
            self._input_processor = InputProcessor(loaded, engine.config, prompts, self._queue)
        else:
            self._input_processor.loaded = self._input_processor.prompts.loaded = loaded

    def _require_started(self) -> EngineThread:
        for engine in self._queue.engines.values():
            if engine._submitter is self._queue.lead and engine._submitter is not None:
                return engine._require_started()
        raise self._not_started()

    def _running(self) -> InputProcessor:
        if self._input_processor is None:
            raise self._not_started()
        if self._closed:
            raise EngineClosedError(CLOSED)
        if os.getpid() != self._queue.core.pid:
            raise self._require_started().forked_error()
        return self._input_processor

    def _thread_mailbox(self) -> ThreadMailbox:
        self._running()
        return ThreadMailbox(_WATCH_INTERVAL, self._check_steps)

    def _check_steps(self) -> None:
        for engine in self._queue.engines.values():
            if engine._thread is not None:
                engine._thread.check_step()

    def __repr__(self) -> str:
        return f"<EngineGroup of {len(self._queue.engines)} {self.state}>"


class _GroupQueue:
    """Chooses the engine of each submission of a group, and submits it there.

    Attributes:
        engines: engines by number; replaced, never changed.
        retried: streams whose requests may be sent again, by id.
        lead: submitter of the engine that stands for all; None before the first has started.
    """

    def __init__(self, retries: int) -> None:
        self.engines: Mapping[int, AsyncLLMEngine] = {}
        self.lead: Submitter | None = None
        self._retries = retries
        self._router = Router()
        self._texts = PrefixIndex(_MAX_PIECES)
        self.retried: WeakValueDictionary[str, TokenStream] = WeakValueDictionary()
        self._lock = threading.Lock()

    @property
    def core(self) -> EngineCore:
        assert self.lead is not None
        return self.lead.core

    @property
    def grammars(self) -> GrammarCompiler:
        assert self.lead is not None
        return self.lead.grammars

    def running(self) -> list[AsyncLLMEngine]:
        return [engine for engine in self.engines.values() if engine.state == "running"]

    def cores(self) -> list[EngineCore]:
        """Step loops of all engines, also of those that close."""
        submitters = [engine._submitter for engine in self.engines.values()]
        return [submitter.core for submitter in submitters if submitter is not None]

    def prompts_made(self) -> list[Future[None]]:
        submitters = [engine._submitter for engine in self.running()]
        return [one for each in submitters if each is not None for one in each.prompts_made()]

    def drop(self, number: int) -> None:
        """Forget an engine that has closed."""
        self.engines = {key: one for key, one in self.engines.items() if key != number}
        self._router.forget(number)
        self._texts.forget(number)

    def enqueue(self, submission: Submission) -> TokenStream:
        """Queue a request at the engine that is expected to answer first, and return its stream.

        Raises:
            EngineOverloadedError: if the queues of all engines are full.
            EngineDeadError, EngineClosedError: if none runs.
        """
        return self._enqueue(submission, self._retries)

    def _enqueue(self, submission: Submission, retries: int) -> TokenStream:
        while True:
            # The lock makes an id unique: no other call looks for it meanwhile.
            with self._lock:
                submitter, sent = self._choose(submission)
                try:
                    submitter.reserve(submission)
                    break
                except BaseException as error:
                    sent.withdraw()
                    # Its place was taken, or it died, since it was chosen: choose again.
                    if not isinstance(error, (EngineOverloadedError, EngineError)):
                        raise
        return self._watch(submitter.start(submission), submission, retries)

    async def enqueue_or_wait(self, submission: Submission) -> TokenStream:
        """Queue a request; if all queues are full, wait in the line of the engine that is expected
        to answer first. If that engine ends meanwhile, try another."""
        while True:
            with suppress(EngineOverloadedError):
                return self.enqueue(submission)
            with self._lock:
                submitter, sent = self._choose(submission, in_line=True)
            try:
                stream = await submitter.enqueue_or_wait(submission)
                self._check_id(submission.request, submitter.core)
            except BaseException as error:
                sent.withdraw()
                if not isinstance(error, EngineError):
                    raise
                submission = submission.again()
                continue
            return self._watch(stream, submission, self._retries)

    def _choose(self, submission: Submission, in_line: bool = False) -> tuple[Submitter, _Sent]:
        """Choose an engine for a request; returns its submitter, and an observer for the router.

        Args:
            in_line: choose among full engines too.
        """
        request = submission.request
        self._check_id(request)
        hashes = [] if request.token_ids else text_hashes(*_beginning(submission))
        found = self._texts.find(hashes, self.core.clock()) if hashes else {}
        candidates, largest = [], 0
        for number, engine in self.engines.items():
            submitter, is_running = engine._submitter, engine.state == "running"
            if submitter is None or not is_running:
                continue
            core, cached = submitter.core, found.get(number, 0) * _TOKENS_PER_PIECE
            largest = max(largest, core.admission.max_queued_requests)
            if len(request.group.members) > core.admission.max_queued_requests:
                continue
            if request.token_ids:
                cached = core.num_cached_tokens(request)
            wait = 0.0
            if not in_line:
                wait = core.admission.retry_after(request.group, submission.num_tokens)
            candidates.append(Candidate(number, core.stats(), cached, wait))
        if largest and not candidates:
            accepted = f"at most max_queued_requests={largest}"
            raise check.invalid("n", len(request.group.members), accepted)
        if not candidates:
            dead = [core for core in self.cores() if core.fatal_error is not None]
            raise (dead[0] if dead else self.core).shutdown_error()
        route = self._router.choose(candidates, submission.num_tokens)
        chosen = self.engines[route.key]._submitter  # pyright: ignore[reportArgumentType]
        assert chosen is not None
        text = self._texts.add(route.key, hashes, self.core.clock()) if hashes else None
        sent = _Sent(self._router, route, self._texts, text)
        submission.observers = (sent,)
        return chosen, sent

    def _check_id(self, request: Request, core: EngineCore | None = None) -> None:
        """Refuse an id that a live request of another engine than ``core`` has."""
        for other in self.cores():
            if other is not core:
                other.admission.check_id(request.request_id)

    def _watch(self, stream: TokenStream, submission: Submission, retries: int) -> TokenStream:
        """Have the request sent again if its engine dies before the first token."""
        submission.stream = None  # Only the reader refers to it: losing the stream aborts.
        stream._resubmit = partial(self._resubmit, submission, retries - 1) if retries else None
        if retries:
            self.retried[stream.request_id] = stream
        return stream

    def _resubmit(self, submission: Submission, retries: int, stream: TokenStream) -> bool:
        try:
            self._enqueue(submission.again(stream), retries)
        except AsyncLLMError:
            return False
        return True


@dataclass(slots=True, eq=False)
class _Sent:
    """Observer of one request, which keeps the router's count of it, and the index of texts."""

    router: Router
    route: Route
    texts: PrefixIndex
    text: Sent | None

    def on_submit(self, request: Request, submission: RequestInfo) -> None:
        """Do nothing: the request was counted when it was routed."""

    def on_first_token(self, request: Request) -> None:
        self.router.settle(self.route, request.num_cached_tokens)

    def on_finish(self, request: Request, usage: Usage, error: BaseException | None) -> None:
        if usage.ttft is None:
            self.withdraw()
        elif self.text is not None:
            pieces = len(self.text.hashes) * usage.cached_tokens / usage.prompt_tokens
            self.texts.correct(self.text, round(pieces))

    def withdraw(self) -> None:
        """Count the request as not sent: it was refused, or ended without a token."""
        self.router.settle(self.route)
        if self.text is not None:
            self.texts.withdraw(self.text)


def _beginning(submission: Submission) -> tuple[str, str | None]:
    """Beginning of a prompt that is not tokenised yet, and its salt."""
    prompt, salt = submission.call[1], submission.request.cache_salt
    if isinstance(prompt, str):
        return prompt[:_MAX_CHARACTERS], salt
    text = ""
    for message in prompt:
        content = message.get("content")
        content = content if isinstance(content, str) else str(content)
        text += f"{message.get('role')}\0{content[:_MAX_CHARACTERS]}\0"
        if len(text) >= _MAX_CHARACTERS:
            break
    return text, salt


def _check_new(engine: Any) -> None:
    """Refuse an object that cannot become an engine of a group."""
    if not isinstance(engine, AsyncLLMEngine) or isinstance(engine, EngineGroup):
        raise check.invalid("engine", engine, "an AsyncLLMEngine")
    if engine._observers.engine is not None:
        raise check.invalid("engine", engine, "an engine that is in no group")
    if engine.state not in ("new", "running"):
        raise check.invalid("engine", engine, "an engine that is new or running")


def _check_agreement(engine: AsyncLLMEngine, other: AsyncLLMEngine) -> None:
    """Refuse an engine whose checks or tokens of a request may differ from those of ``other``."""
    expected = _agreed_values(other)
    for name, value in _agreed_values(engine).items():
        if value != expected[name]:
            raise InvalidRequestError(
                f"engine: its {name} is {check.describe(value)}, expected "
                f"{check.describe(expected[name])}, as in the other engines of the group",
                param="engine",
            )


def _agreed_values(engine: AsyncLLMEngine) -> dict[str, Any]:
    loaded, config = engine._require_started().loaded, engine.config
    info, tokenizer, model = loaded.executor.info, loaded.tokenizer, loaded.model_config
    template = tokenizer.chat_template
    return {
        "max_model_len": info.max_model_len,
        "vocab_size": info.vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "chat_template": (template.sources, template.special_tokens),
        "eos_token_ids": tuple(model.eos_token_ids),
        "generation_config": dict(model.generation_defaults or {}),
        "sampling_limits": info.sampling_limits,
        "max_tokens_per_row": info.max_tokens_per_row,
        **{name: getattr(config, name) for name in _COMMON_SETTINGS},
    }
