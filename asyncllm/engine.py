"""AsyncLLMEngine: lifecycle, submission, and what an application asks of the engine."""

from __future__ import annotations

import contextlib
import math
import os
import random
import uuid
import warnings
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self

from asyncllm.config import EngineConfig
from asyncllm.core.channel import Channel, OnSlow
from asyncllm.core.engine_core import EngineCore, Output
from asyncllm.core.observer import Observer, Observers, Submission
from asyncllm.core.request import Request
from asyncllm.engine_thread import EngineThread
from asyncllm.errors import (
    ContextLengthExceededError,
    EngineClosedError,
    EngineError,
    InvalidRequestError,
)
from asyncllm.hosts import MailboxRegistry, ThreadMailbox, wait_for
from asyncllm.loading import LoadedModel, Loader, load_model
from asyncllm.outputs import Completion, EngineStats
from asyncllm.sampling_params import SamplingParams
from asyncllm.stream import TokenStream
from asyncllm.text_worker import TextWorker

LONG_TEXT = 4096
"""Characters from which a text is handled on a worker thread."""


class AsyncLLMEngine:
    """A streaming LLM engine inside the application.

        async with AsyncLLMEngine("path/or/hub-id") as engine:
            async for delta in engine.stream("Tell me a story."):
                print(delta, end="", flush=True)

    The step loop runs on a daemon thread of its own. ``stream``, ``chat``, ``abort`` and
    ``stats`` are plain functions that any thread may call; streams can be read from several
    event loops, each from one.

    Args:
        model: local directory or hub id in the Hugging Face layout; None is the model in the
            package.
        config: every other setting; ``overrides`` are fields of it, and win.

    Raises:
        InvalidRequestError: for a configuration that makes no sense in itself. Files, threads
            and devices are touched by ``start`` only.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        config: EngineConfig | None = None,
        **overrides: Any,
    ) -> None:
        self.config = _configure(model, config, overrides)
        self._loader: Loader = load_model
        self._thread: EngineThread | None = None
        self._state: Literal["new", "starting", "running", "closed"] = "new"
        self._mailboxes = MailboxRegistry()
        self._observers = Observers()
        self._worker = TextWorker("asyncllm-text")
        self._random = random.Random(self.config.seed)
        self._neutral_params = SamplingParams()

    @classmethod
    def _with_loader(cls, loader: Loader, **overrides: Any) -> Self:
        """An engine on something else than a model's files; the seam that tests use."""
        engine = cls(**overrides)
        engine._loader = loader
        return engine

    # --- lifecycle ---------------------------------------------------------------------

    async def start(self) -> None:
        """Loads the model and starts the engine thread. Cancelled, it leaves the engine as
        if it had never been called.

        Raises:
            ModelLoadError, InvalidRequestError, KVCacheTooSmallError: what is wrong with the
                model, or the configuration for it.
            EngineError: if the engine was started already.
        """
        thread = self._begin()
        try:
            await wait_for(thread.ready)
        except BaseException:
            self._forget(thread)
            raise
        self._state = "running"
        thread.supervise()

    def _begin(self) -> EngineThread:
        if self._state == "closed":
            raise EngineClosedError("start(): the engine is closed; expected a new engine")
        if self._state != "new":
            raise EngineError(f"start(): the engine is {self._state}; expected a new engine")
        self._thread = thread = EngineThread(self.config, self._loader)
        self._state = "starting"
        thread.start()
        return thread

    def _forget(self, thread: EngineThread) -> None:
        """The start failed or was cancelled: as if it had never been called."""
        thread.give_up()
        self._thread = None
        self._state = "new"

    def _start_blocking(self) -> ThreadMailbox:
        """``start`` for a thread without an event loop; returns what its streams are read
        with."""
        thread = self._begin()
        try:
            thread.ready.result()
        except BaseException:
            self._forget(thread)
            raise
        self._state = "running"
        return self._thread_mailbox()

    def _thread_mailbox(self) -> ThreadMailbox:
        self._running()
        assert self._thread is not None
        return ThreadMailbox(self._thread.watch_interval, self._thread.check_step)

    async def aclose(self, *, drain: float | None = 0.0) -> None:
        """Ends the engine and gives everything back: thread, files, device memory.

        Args:
            drain: seconds that live requests may go on; 0 aborts them at once, None lets
                them finish. Paused streams that nobody reads are aborted after any drain.

        Idempotent, and safe to call from several tasks. If it is cancelled, the closing goes
        on without it.
        """
        thread = self._end(drain)
        if thread is not None:
            await wait_for(thread.exited)
            self._clean_up(thread)

    def _close_blocking(self, drain: float | None = 0.0) -> None:
        """``aclose`` for a thread without an event loop."""
        thread = self._end(drain)
        if thread is not None:
            while not thread.exited.done():
                with contextlib.suppress(TimeoutError):
                    thread.exited.result(thread.watch_interval)
                thread.check_step()
            self._clean_up(thread)

    def _end(self, drain: float | None) -> EngineThread | None:
        if drain is not None and (not isinstance(drain, (int, float)) or not drain >= 0):
            raise _bad("drain", drain, "seconds from 0, or None")
        if self._state == "starting":
            raise EngineError("aclose(): the engine is starting; cancel start() instead")
        self._state = "closed"
        thread = self._thread
        if thread is not None:
            thread.check_process()
            thread.close(drain)
        return thread

    def _clean_up(self, thread: EngineThread) -> None:
        thread.join()
        self._worker.close(timeout=2.0)
        self._mailboxes.clear()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        thread = getattr(self, "_thread", None)
        if thread is None or self._state != "running" or not thread.in_own_process():
            return
        if not thread.closing:
            thread.close(0.0)
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)

    @property
    def load_progress(self) -> tuple[int, int]:
        """``(bytes read, bytes in all)`` of the weights while ``start`` runs."""
        return self._thread.progress if self._thread is not None else (0, 0)

    # --- requests ----------------------------------------------------------------------

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        max_unread: int = 256,
        on_slow: OnSlow = "coalesce",
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> TokenStream:
        """Submits a request at once and returns the stream of its output.

        Args:
            prompt: text, to which the tokenizer adds its special tokens, or token ids.
            params: how to sample; ``sampling`` are fields of it, and win.
            request_id: unique among live requests; None makes one up.
            priority: smaller is sooner; only with the "priority" or "deadline" policy.
            timeout: seconds after which the request fails with DeadlineExceededError.
            max_unread: with "coalesce" the most tokens merged into one delta; otherwise the
                number of unread tokens at which ``on_slow`` applies.
            on_slow: for a slow reader: "coalesce" merges unread deltas, "pause" stops
                generating until the stream is read down to half of ``max_unread``, "abort"
                aborts.
            cache_salt: requests share cached prefixes only with equal salts.

        Raises:
            InvalidRequestError: for an argument that cannot be served, with ``param`` set.
            ContextLengthExceededError: if the prompt leaves no room for one token.
            EngineOverloadedError: if the queue is full.
            EngineClosedError, EngineDeadError: if there is no engine to serve it.

        A text of more than a few thousand characters is tokenised on a worker thread; what
        is wrong with such a one raises at the first read, except what its length proves.
        """
        loaded, core = self._running()
        if isinstance(prompt, str):
            text, token_ids = prompt, None
            if not text:
                raise InvalidRequestError("prompt='': expected a non-empty prompt", param="prompt")
        else:
            text, token_ids = None, _token_ids(prompt, loaded.executor.info.vocab_size)
        request = self._request(
            loaded,
            core,
            params,
            sampling,
            request_id=request_id,
            priority=priority,
            timeout=timeout,
            max_unread=max_unread,
            on_slow=on_slow,
            cache_salt=cache_salt,
        )
        asked = Submission("text_completion", prompt)
        if text is None:
            assert token_ids is not None
            self._submit(loaded, core, request, asked, token_ids)
        elif len(text) < LONG_TEXT:
            self._submit(loaded, core, request, asked, loaded.tokenizer.encode(text))
        else:
            tokenizer = loaded.tokenizer
            self._submit_later(
                loaded, core, request, asked, len(text), lambda: tokenizer.encode(text)
            )
        return TokenStream(request, core, self._mailboxes.of_running_loop)

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> Completion:
        """``stream(prompt, params, **options)``, read to the end."""
        return await self.stream(prompt, params, **options).result()

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: str | dict[str, Any] = "auto",
        response_format: Any = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        max_unread: int = 256,
        on_slow: OnSlow = "coalesce",
        cache_salt: str | None = None,
        **sampling: Any,
    ) -> TokenStream:
        """Submits a conversation, rendered by the model's own chat template.

        Args:
            messages: ``{"role": …, "content": …}`` each.
            tools, tool_choice, response_format: not supported yet; anything but the default
                is an InvalidRequestError. A model whose template knows tools gets them
                through ``chat_template_kwargs={"tools": [...]}``.
            chat_template_kwargs: further variables of the template.

        The rest is that of ``stream``, and so are the exceptions.
        """
        for name, value, neutral in (
            ("tools", tools, None),
            ("tool_choice", tool_choice, "auto"),
            ("response_format", response_format, None),
        ):
            if value != neutral:
                raise InvalidRequestError(f"{name} is not supported yet", param=name)
        loaded, core = self._running()
        variables = _template_variables(chat_template_kwargs)
        tokenizer = loaded.tokenizer
        request = self._request(
            loaded,
            core,
            params,
            sampling,
            request_id=request_id,
            priority=priority,
            timeout=timeout,
            max_unread=max_unread,
            on_slow=on_slow,
            cache_salt=cache_salt,
        )

        def render() -> list[int]:
            text = tokenizer.apply_chat_template(messages, **variables)
            return tokenizer.encode(text, add_special_tokens=False)

        asked = Submission("chat", messages)
        length = _text_length(messages) + _text_length(variables)
        if length < LONG_TEXT:
            self._submit(loaded, core, request, asked, render())
        else:
            self._submit_later(loaded, core, request, asked, length, render)
        return TokenStream(request, core, self._mailboxes.of_running_loop)

    def abort(self, request_id: str | Iterable[str]) -> None:
        """Aborts one request or several; unknown and finished ids are ignored. Any thread,
        any number of times. The id is free again when this returns."""
        _, core = self._running()
        ids = (request_id,) if isinstance(request_id, str) else request_id
        for one in ids:
            request = core.admission.get(one)
            if request is not None:
                core.abort(request)

    # --- the engine as a whole ---------------------------------------------------------

    async def pause(self) -> None:
        """Stops scheduling and keeps everything: streams wait, KV stays, deadlines run on.
        Returns when no step is in flight. ``resume`` goes on."""
        await self._suspend(True)

    async def resume(self) -> None:
        await self._suspend(False)

    async def _suspend(self, suspended: bool) -> None:
        _, core = self._running()
        await wait_for(core.call(core.suspend, suspended))

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. False, with nothing done, while requests hold KV."""
        _, core = self._running()
        return await wait_for(core.call(core.reset_prefix_cache))

    def stats(self) -> EngineStats:
        """A snapshot; never blocks, any thread."""
        return self._running()[1].stats()

    def add_observer(self, observer: Observer) -> None:
        """Tells ``observer`` of every request accepted from now on, and of its end; see
        ``asyncllm.core.observer.Observer``. In any state of the engine, any thread."""
        self._observers.add(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Tells it of no further request; it still hears of the end of those it knows.
        One that was never added is ignored."""
        self._observers.remove(observer)

    @property
    def tokenizer(self) -> Any:
        return self._loaded().tokenizer

    @property
    def model_config(self) -> Any:
        return self._loaded().model_config

    # --- inside ------------------------------------------------------------------------

    def _loaded(self) -> LoadedModel:
        if self._thread is None or self._state == "starting":
            raise EngineClosedError(
                f"the engine is {self._state}; expected a started one: "
                "`async with engine` or `await engine.start()`"
            )
        return self._thread.loaded

    def _running(self) -> tuple[LoadedModel, EngineCore]:
        loaded = self._loaded()
        assert self._thread is not None
        self._thread.check_process()
        if self._state != "running":
            raise EngineClosedError("the engine is closed; expected a started one")
        return loaded, self._thread.core

    def _request(
        self,
        loaded: LoadedModel,
        core: EngineCore,
        params: SamplingParams | None,
        sampling: dict[str, Any],
        *,
        request_id: str | None,
        priority: int,
        timeout: float | None,
        max_unread: int,
        on_slow: OnSlow,
        cache_salt: str | None,
    ) -> Request:
        """A request that is valid but for its prompt."""
        self._check_options(request_id, priority, timeout, max_unread, on_slow, cache_salt)
        if params is not None and not isinstance(params, SamplingParams):
            raise _bad("params", params, "SamplingParams or None")
        defaults = loaded.model_config.generation_defaults or {}
        resolved = (params or self._neutral_params).resolve(
            sampling, defaults, draw_seed=lambda: self._random.getrandbits(64)
        )
        info = loaded.executor.info
        resolved.check_vocabulary(info.vocab_size)
        tokenizer = loaded.tokenizer
        now = core.clock()
        return Request(
            uuid.uuid4().hex if request_id is None else request_id,
            resolved,
            max_model_len=info.max_model_len,
            priority=priority,
            arrived_at=now,
            deadline=math.inf if timeout is None else now + timeout,
            eos_token_ids=loaded.model_config.eos_token_ids,
            cache_salt=cache_salt,
            output=Output(
                Channel(max_unread=max_unread, on_slow=on_slow),
                lambda ids: tokenizer.decode(ids, resolved.skip_special_tokens),
            ),
        )

    def _check_options(
        self,
        request_id: str | None,
        priority: int,
        timeout: float | None,
        max_unread: int,
        on_slow: str,
        cache_salt: str | None,
    ) -> None:
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise _bad("request_id", request_id, "a non-empty string or None")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise _bad("priority", priority, "an integer; smaller is sooner")
        if priority and self.config.scheduling_policy == "fcfs":
            raise _bad(
                "priority", priority, '0 with scheduling_policy="fcfs"; "priority" honours it'
            )
        if timeout is not None and (
            isinstance(timeout, bool)
            or not isinstance(timeout, (int, float))
            or not 0 < timeout < math.inf
        ):
            raise _bad("timeout", timeout, "a positive number of seconds or None")
        if isinstance(max_unread, bool) or not isinstance(max_unread, int) or max_unread < 1:
            raise _bad("max_unread", max_unread, "a number of tokens from 1")
        if on_slow not in ("coalesce", "pause", "abort"):
            raise _bad("on_slow", on_slow, '"coalesce", "pause" or "abort"')
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise _bad("cache_salt", cache_salt, "a string or None")

    def _submit(
        self,
        loaded: LoadedModel,
        core: EngineCore,
        request: Request,
        asked: Submission,
        token_ids: list[int],
    ) -> None:
        _prepare(loaded, request, token_ids)
        self._accept(core, request, asked, len(token_ids))
        core.send(core.on_add, request)

    def _accept(
        self, core: EngineCore, request: Request, asked: Submission, num_tokens: int
    ) -> None:
        """Takes a place in the queue for the request, and announces it."""
        self._observers.watch(request)
        core.admission.reserve(request, num_tokens)
        if request.observation is not None:
            request.observation.submitted(asked)

    def _submit_later(
        self,
        loaded: LoadedModel,
        core: EngineCore,
        request: Request,
        asked: Submission,
        length: int,
        tokenise: Any,
    ) -> None:
        """Takes the request's place in the queue now and finds its tokens on the worker."""
        least = loaded.tokenizer.min_tokens(length)
        _check_length(least, loaded.executor.info.max_model_len, "at least ")
        self._accept(core, request, asked, max(least, length // 4))
        if request.deadline < math.inf:
            core.send(core.on_watch_deadline, request)

        def job() -> None:
            if request.cancelled:
                return
            try:
                _prepare(loaded, request, tokenise())
            except Exception as error:
                core.send(core.on_fail, request, error)
                return
            core.admission.correct(request, request.num_prompt_tokens)
            core.send(core.on_add, request)

        self._worker.submit(job)

    def __repr__(self) -> str:
        model = "the packaged model" if self.config.model is None else str(self.config.model)
        return f"<AsyncLLMEngine {model!r} {self._state}>"


def _configure(
    model: str | os.PathLike[str] | None, config: EngineConfig | None, overrides: dict[str, Any]
) -> EngineConfig:
    known = EngineConfig.field_names()
    for name in overrides:
        if name not in known:
            raise InvalidRequestError(
                f"{name}: no such setting (there are {', '.join(sorted(known))})", param=name
            )
    if model is not None:
        overrides["model"] = model
    if config is None:
        return EngineConfig(**overrides)
    if not isinstance(config, EngineConfig):
        raise _bad("config", config, "an EngineConfig or None")
    return config.with_overrides(overrides)


def _prepare(loaded: LoadedModel, request: Request, token_ids: list[int]) -> None:
    """Gives a request its prompt, and the decoder that continues it."""
    if not token_ids:
        raise InvalidRequestError("prompt: has no tokens, expected at least one", param="prompt")
    _check_length(len(token_ids), loaded.executor.info.max_model_len)
    request.output.detokenizer = loaded.tokenizer.detokenizer(request.sampling, token_ids)
    request.set_prompt(token_ids)


def _check_length(num_tokens: int, max_model_len: int, how: str = "") -> None:
    if num_tokens >= max_model_len:
        raise ContextLengthExceededError(
            f"prompt: has {how}{num_tokens} tokens, expected at most {max_model_len - 1}, so "
            f"that one more fits into max_model_len={max_model_len}"
        )


def _token_ids(prompt: Any, vocab_size: int) -> list[int]:
    if isinstance(prompt, (bytes, bytearray, dict)) or not hasattr(prompt, "__iter__"):
        raise InvalidRequestError(
            f"prompt: is a {type(prompt).__name__}, expected text or token ids", param="prompt"
        )
    try:
        token_ids = array("q", prompt).tolist()
    except (TypeError, OverflowError) as error:
        raise InvalidRequestError(
            f"prompt: {error}; expected text or integer token ids", param="prompt"
        ) from None
    if not token_ids:
        raise InvalidRequestError("prompt=[]: expected at least one token", param="prompt")
    for worst in (min(token_ids), max(token_ids)):
        if not 0 <= worst < vocab_size:
            raise InvalidRequestError(
                f"prompt: has token id {worst}, expected ids from 0 to {vocab_size - 1}",
                param="prompt",
            )
    return token_ids


def _template_variables(value: dict[str, Any] | None) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise _bad("chat_template_kwargs", value, "a dict of names to values, or None")
    return dict(value)


def _text_length(value: Any, depth: int = 0) -> int:
    """Characters in all strings of nested dicts and sequences: roughly what a template will
    write. Whatever is malformed is left to the template to complain about."""
    if isinstance(value, str):
        return len(value)
    if depth > 8:
        return 0
    if isinstance(value, dict):
        return sum(_text_length(item, depth + 1) + 8 for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_text_length(item, depth + 1) for item in value)
    return 4


def _bad(name: str, value: object, accepted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}={value!r}: expected {accepted}", param=name)
