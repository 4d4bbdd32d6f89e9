"""AsyncLLMEngine: lifecycle, submission of requests, and control of the engine."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import AsyncIterable, Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, Self

from asyncllm import validation as check
from asyncllm.checkpoint.progress import LoadStage
from asyncllm.config import EngineConfig, make_config
from asyncllm.core.block_hashes import PromptHashes
from asyncllm.core.channel import OnSlow
from asyncllm.core.engine_core import EngineCore
from asyncllm.core.execution_report import ExecutionReport
from asyncllm.errors import EngineClosedError, EngineError
from asyncllm.observer import Observer, Observers
from asyncllm.outputs import Completion, EngineStats
from asyncllm.rows import RowJob, RowStream
from asyncllm.runtime.engine_thread import EngineThread
from asyncllm.runtime.event_loop import join_thread, wait_for
from asyncllm.runtime.handle import UncopyableHandle
from asyncllm.runtime.input_processor import InputProcessor
from asyncllm.runtime.loading import Loader, load_model
from asyncllm.runtime.mailbox import MailboxRegistry, ThreadMailbox
from asyncllm.runtime.prompt_encoder import PromptEncoder
from asyncllm.runtime.request_options import ChatOptions, RequestOptions, normalized_request_ids
from asyncllm.runtime.submitter import Submitter
from asyncllm.runtime.worker_thread import Cooldown
from asyncllm.sampling_params import SamplingParams
from asyncllm.stream import TokenStream
from asyncllm.text.long_text import LONG_TEXT_CHARACTERS, SHORT_TEXT_CHARACTERS

EngineState = Literal["new", "starting", "running", "dead", "closed"]
_THREAD_JOIN_SECONDS = 2.0
"""Maximum number of seconds that closing an engine spends on joining its threads."""


class AsyncLLMEngine(UncopyableHandle):
    """A streaming LLM engine inside the application.

        async with AsyncLLMEngine("path/or/hub-id") as engine:
            async for delta in engine.stream("Tell me a story."):
                print(delta, end="", flush=True)

    The step loop runs on a daemon thread of its own. ``stream``, ``chat``, ``abort`` and
    ``stats`` are plain functions that any thread may call. Streams may be read on several event
    loops, but each stream on only one. The constructor uses no files, threads or devices;
    ``start`` does.

    Args:
        model: local directory or hub id in the Hugging Face layout; None uses the model that
            comes with the package.
        config: every other setting. ``overrides`` replace its fields.

    Raises:
        InvalidRequestError: for an invalid configuration.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        config: EngineConfig | None = None,
        **overrides: Any,
    ) -> None:
        self.config = make_config(model, config, overrides)
        self._loader: Loader = load_model
        self._thread: EngineThread | None = None
        self._is_closed = False
        self._mailboxes = MailboxRegistry()
        self._observers = Observers()
        self._group: object | None = None
        """GroupQueue of the EngineGroup that this engine belongs to; None without a group."""
        self._cooldown = Cooldown(self._has_running_requests)
        self._submitter: Submitter | None = None
        self._input_processor: InputProcessor | None = None

    @classmethod
    def _with_loader(cls, loader: Loader, **overrides: Any) -> Self:
        """Make an engine that loads its model with ``loader``, for tests."""
        engine = cls(**overrides)
        engine._loader = loader
        return engine

    # --- lifecycle ---------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model and start the engine thread. If the call is cancelled, the engine is as if
        it had never been started.

        Raises:
            ModelLoadError, InvalidRequestError, KVCacheTooSmallError: for a model that cannot be
                loaded at all, or not with this configuration.
            EngineError: if the engine was started already.
        """
        with self._start_thread() as thread:
            await wait_for(thread.ready)
            self._adopt_thread(thread)
            thread.supervise()

    def _start_blocking(self) -> ThreadMailbox:
        """``start`` for a thread without an event loop; returns the mailbox for reading the
        engine's streams."""
        with self._start_thread() as thread:
            thread.ready.result()
            self._adopt_thread(thread)
            return self._thread_mailbox()

    @contextlib.contextmanager
    def _start_thread(self) -> Iterator[EngineThread]:
        """Start an engine thread, as a context manager. If the start fails or is cancelled, the
        engine is as if it had never been started."""
        if self.state == "closed":
            raise EngineClosedError("start(): the engine is closed; expected a new engine")
        if self.state != "new":
            raise EngineError(f"start(): the engine is {self.state}; expected a new engine")
        self._thread = thread = EngineThread(self.config, self._loader)
        try:
            thread.start()
            yield thread
        except BaseException:
            thread.abort_start()
            self._thread = self._input_processor = self._submitter = None
            raise

    def _adopt_thread(self, thread: EngineThread) -> None:
        loaded, core, config = thread.loaded_model, thread.core, self.config
        prompts = PromptEncoder(loaded, config, self._cooldown)
        submitter = Submitter(
            core, thread.grammar_compiler, self._mailboxes, self._observers, self._cooldown
        )
        self._submitter = submitter
        self._input_processor = InputProcessor(loaded, config, prompts, submitter)
        # The callback does not refer to the engine, so that a dropped engine is collected.
        thread.exited.add_done_callback(partial(_report_death, core, self._observers))

    def _thread_mailbox(self) -> ThreadMailbox:
        self._require_input_processor()
        assert self._thread is not None
        return ThreadMailbox(self._thread.hang_check_interval, self._thread.check_for_hung_step)

    async def aclose(self, *, drain: float | None = 0.0) -> None:
        """End the engine and release its thread, files and device memory.

        Args:
            drain: seconds that live requests may go on; 0 aborts them at once, None lets them
                finish. Paused streams that nobody reads are aborted once only they are left.

        Idempotent, and safe to call from several tasks. Closing goes on if the call is cancelled.
        """
        thread = self._begin_close(drain)
        if thread is not None:
            await wait_for(thread.exited)
            for leftover, seconds in self._clean_up(thread):
                await join_thread(leftover, seconds)
            await thread.join_watch_task()

    def _close_blocking(self, drain: float | None = 0.0) -> None:
        """``aclose`` for a thread without an event loop."""
        thread = self._begin_close(drain)
        if thread is not None:
            thread.wait_exited()
            for leftover, seconds in self._clean_up(thread):
                leftover.join(seconds)

    def _begin_close(self, drain: float | None) -> EngineThread | None:
        drain = check.seconds("drain", drain, optional=True)
        if self.state == "starting":
            raise EngineError("aclose(): the engine is starting; cancel start() instead")
        thread = self._thread
        if thread is not None:
            thread.core.check_not_engine_thread()
        self._is_closed = True
        if thread is not None:
            thread.check_not_forked()
            thread.close(drain)
        return thread

    def _clean_up(self, thread: EngineThread) -> Iterator[tuple[threading.Thread, float]]:
        """Drop the mailboxes, and the worker threads' queued jobs. Yields each thread to join, with
        the seconds that are left to wait for it."""
        assert self._input_processor is not None
        assert self._submitter is not None
        self._mailboxes.clear()
        leftovers = (
            thread.thread_to_join,
            *self._input_processor.prompts.tokenizer_threads.close(),
            *self._submitter.close(),
        )
        deadline = time.monotonic() + _THREAD_JOIN_SECONDS
        for leftover in leftovers:
            if leftover is not None:
                yield leftover, max(0.0, deadline - time.monotonic())

    async def wait_closed(self) -> None:
        """Wait until the engine has ended, by ``aclose`` or otherwise. Any task on any loop may
        wait.

        Raises:
            EngineDeadError, EngineClosedError: the engine's ``error``, unless ``aclose`` ended the
                engine.
            EngineClosedError: if the engine was not started.
        """
        if self._thread is not None or not self._is_closed:
            thread = self._require_started()
            thread.check_not_forked()
            thread.core.check_not_engine_thread()
            await wait_for(thread.exited)
        if self.error is not None:
            raise self.error

    @property
    def state(self) -> EngineState:
        """State of the engine's life cycle; any thread may read it. Requests are accepted while it
        is "running". It is "dead" if the model or the device failed, and "closed" once ``aclose``
        was called or the loop that the engine was started on has ended."""
        thread = self._thread
        if self._is_closed:
            return "closed"
        if thread is None or self._input_processor is None:
            return "new" if thread is None else "starting"
        if thread.core.fatal_error is not None:
            return "dead"
        return "closed" if thread.closing or thread.is_forked_child() else "running"

    @property
    def error(self) -> EngineError | None:
        """Error that ended the engine; None after the application's own ``aclose``. It is an
        EngineDeadError, whose ``__cause__`` is the failure, or an EngineClosedError, for example
        because the event loop of ``start`` has ended. Any thread may read it."""
        return None if self._input_processor is None else self._require_started().error

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # A destructor may run on any thread, in the middle of any operation, so it takes no lock.
        if getattr(self, "_input_processor", None) is None or self.state != "running":
            return
        assert self._thread is not None
        self._thread.close(0.0)
        warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)

    @property
    def load_progress(self) -> tuple[int, int]:
        """Progress of ``start`` as ``(done, total)``. The unit depends on ``load_stage``:
        downloaded bytes, then bytes of weights read; on a GPU then steps that compile kernels, and
        at last captured CUDA graphs."""
        return self._thread.progress if self._thread is not None else (0, 0)

    @property
    def load_stage(self) -> LoadStage:
        """Current stage of ``start``, which determines the unit of ``load_progress``."""
        return self._thread.stage if self._thread is not None else "weights"

    # --- requests ----------------------------------------------------------------------

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        max_unread: int = 256,
        on_slow: OnSlow = "coalesce",
        cache_salt: str | None = None,
        owner: str | None = None,
        **sampling: Any,
    ) -> TokenStream:
        """Submit a request at once; returns the stream of its output.

        Args:
            prompt: text, to which the tokenizer adds its special tokens, or token ids.
            sampling_params: how to sample. ``sampling`` replaces fields of it.
            request_id: unique among live requests, of at most 256 characters; None generates one.
            priority: a smaller number is scheduled sooner; only with the "priority" or "deadline"
                policy.
            timeout: seconds after which the request fails with DeadlineExceededError.
            max_unread: with "coalesce" the maximum number of tokens merged into one delta;
                otherwise the number of unread tokens at which ``on_slow`` applies.
            on_slow: policy for a slow reader: "coalesce" merges unread deltas, "pause" stops
                generating until at most half of ``max_unread`` tokens are unread, "abort" aborts
                the request.
            cache_salt: requests share cached prefixes only with equal salts, of at most 256
                characters.
            owner: name of the user that the request is for, of at most 256 characters; None is an
                owner like any other. Requests of equal rank are admitted in turns by owner; see
                docs/streaming.md.

        Raises:
            InvalidRequestError: for an argument that cannot be served, with ``param`` set.
            ContextLengthExceededError: if the prompt leaves no room for one token.
            EngineOverloadedError: if the queue is full.
            EngineClosedError, EngineDeadError: if the engine is closed, not started, or dead.

        A text of more than a few thousand characters is tokenised on a worker thread. Errors of
        tokenising are raised at the first read. A text whose number of characters alone shows that
        it is too long is refused at once.
        """
        inputs = self._require_input_processor()
        options = RequestOptions(
            request_id, priority, timeout, max_unread, on_slow, cache_salt, owner
        )
        submission = inputs.make_prompt_submission(prompt, sampling_params, options, sampling)
        return inputs.submitter.enqueue(submission)

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> Completion:
        """Complete a prompt: reads ``stream(prompt, sampling_params, **options)`` to its end."""
        return await self.stream(prompt, sampling_params, **options).result()

    async def submit(
        self,
        prompt: str | Sequence[int] | Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> TokenStream:
        """Submit a request, waiting while the queue is full; returns its stream. So a batch may be
        larger than the queue.

        Args:
            prompt: text or token ids, as for ``stream``; or messages, as for ``chat``.
            options: as for ``stream``, or ``chat``. ``timeout`` does not count the time that this
                call waits.

        Raises:
            InvalidRequestError, ContextLengthExceededError: as ``stream``, before the call waits;
                or afterwards, if another request took the ``request_id`` during the wait.
            EngineClosedError, EngineDeadError: if the engine closes or dies during the wait.

        Waiting calls are admitted in turns by owner, before new calls of ``stream`` and ``chat``.
        Calls without long texts pass those whose texts find no room in memory.
        While the engine is paused, calls keep waiting. A cancelled call leaves nothing behind.
        """
        inputs = self._require_input_processor()
        submission = inputs.make_submission(prompt, sampling_params, options)
        return await inputs.submitter.enqueue_or_wait(submission)

    def map(
        self,
        rows: Iterable[Any] | AsyncIterable[Any],
        *,
        prompt: Callable[[Any], Any] | None = None,
        sampling_params: SamplingParams | Callable[[Any], SamplingParams | None] | None = None,
        key: Callable[[Any], Any] | None = None,
        done: Container[Any] = (),
        ordered: bool = True,
        max_under_way: int | None = None,
        progress: Callable[[int, int], object] | None = None,
        **options: Any,
    ) -> RowStream:
        """Complete the rows of a batch job; returns the stream of their results.

            async with engine.map(rows, prompt=lambda row: row["text"], max_tokens=64) as results:
                async for result in results:
                    print(result.key, result.completion or result.error)

        Args:
            rows: iterable or async iterable of any number of rows, of any type. A row is drawn when
                there is room for it. A list or a tuple is read on this loop, as is an async
                iterable; any other iterable may block, and is read on a separate thread.
            prompt: function of a row that makes its prompt: text, token ids or messages. None takes
                the rows themselves as prompts.
            sampling_params: for all rows, or a function of a row.
            key: function of a row that makes its key; None counts the rows from 0.
            done: keys of rows to leave out, such as those whose results an earlier run has stored.
            ordered: yield the results in the order of the rows; False yields them as they come, so
                that no row waits for a longer one before it.
            max_under_way: maximum number of rows that were drawn but whose results were not read
                yet. The default and the largest value is ``max_queued_requests``.
            progress: function called before each result is returned, with the number of rows done
                (including those of ``done``) and the number of rows failed; its exceptions are
                logged.
            options: options of ``stream``, or of ``chat`` if prompts are messages, except
                ``request_id``, ``max_unread`` and ``on_slow``.

        If ``key``, ``prompt``, ``sampling_params`` or a row's request raises an exception, only
        that row fails: its result has the exception, and the other rows go on. An exception of the
        iterable, or the end of the engine, ends the job.

        Raises:
            InvalidRequestError: for an argument that cannot be used, with ``param`` set.
            EngineClosedError, EngineDeadError: as ``stream``.
        """
        job = RowJob(rows, prompt, sampling_params, key, done, ordered, max_under_way, progress)
        self._check_map_options(job, options)

        async def submit(prompt: Any, sampling_params: SamplingParams | None) -> TokenStream:
            return await self.submit(prompt, sampling_params, **options)

        return RowStream(job, submit)

    def _check_map_options(self, job: RowJob, options: dict[str, Any]) -> None:
        """Check the options that all rows of ``map`` share, and bind the job to this engine."""
        for name in ("request_id", "max_unread", "on_slow"):
            if name in options:
                accepted = (
                    "not in map(), whose rows have ids of their own and are read at their end"
                )
                raise check.value_error(name, options[name], accepted)
        common = None if callable(job.sampling_params) else job.sampling_params
        self._require_input_processor().check_options(common, options)
        job.bind_to_engine(self._max_queued_requests, lambda: self.state == "running")

    @property
    def _max_queued_requests(self) -> int:
        return self.config.max_queued_requests

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: str | dict[str, Any] | None = "auto",
        parallel_tool_calls: bool = True,
        response_format: Any = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        split_special_tokens: bool = True,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        max_unread: int = 256,
        on_slow: OnSlow = "coalesce",
        cache_salt: str | None = None,
        owner: str | None = None,
        **sampling: Any,
    ) -> TokenStream:
        """Submit a conversation, which a chat template renders; returns its stream.

        Args:
            messages: dicts such as ``{"role": "user", "content": "Hello"}``.
            tools: tools for the model: OpenAI's schemas, Python functions, or Pydantic models
                of the arguments; see docs/tools.md. Calls come as ``Delta.tool_calls``.
            tool_choice: "auto" lets the model decide; "none" hides the tools from it;
                "required" and ``{"type": "function", "function": {"name": …}}`` force calls whose
                arguments fit the tool's schema, by a grammar as for ``structured_outputs``.
            parallel_tool_calls: allow several calls in one answer; False ends the answer with the
                first call.
            response_format: as in OpenAI's API ``{"type": "text"}``, ``{"type": "json_object"}``,
                or ``{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}``; or a
                Pydantic model, a dataclass or a TypedDict. See docs/structured_output.md. If tools
                are given too, the model either calls tools or answers in that format.
            chat_template: a template's text, or the name of one of the model's, in place of the
                usual one. A template is a program: use only templates that you would trust as code.
            chat_template_kwargs: further variables of the template, such as ``enable_thinking``;
                1024 at most.
            split_special_tokens: treat special tokens written in the messages, tools and variables
                as ordinary text, so that a user cannot forge another role's turn. With False they
                are control tokens, like those that the template writes.

        Other arguments and exceptions are those of ``stream``. Messages are copied. A conversation
        or prompt of more than a few thousand characters is rendered and tokenised on a worker
        thread; see docs/chat.md.
        """
        inputs = self._require_input_processor()
        options = RequestOptions(
            request_id, priority, timeout, max_unread, on_slow, cache_salt, owner
        )
        chat = ChatOptions(
            tools,
            chat_template,
            chat_template_kwargs,
            split_special_tokens,
            tool_choice,
            parallel_tool_calls,
            response_format,
        )
        submission = inputs.make_chat_submission(messages, sampling_params, options, chat, sampling)
        return inputs.submitter.enqueue(submission)

    def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort one request or several; unknown and finished ids are ignored. Any thread may call
        it, any number of times. The ids are free again when this returns.

        Raises:
            InvalidRequestError: for anything but a string or strings; no request is aborted then.
        """
        core = self._require_input_processor().submitter.core
        for each_id in normalized_request_ids(request_id):
            group = core.admission.get_live_group(each_id)
            if group is not None:
                core.abort(group)

    # --- text and tokens ---------------------------------------------------------------

    async def tokenize(
        self,
        prompt: str | Sequence[dict[str, Any]],
        *,
        add_special_tokens: bool | None = None,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        split_special_tokens: bool = True,
    ) -> list[int]:
        """Tokenise a text as ``stream`` does, or messages as ``chat`` does.

        Args:
            prompt: a text, which may be empty, or messages.
            add_special_tokens: add the tokenizer's special tokens. None adds them to a text, but
                not to messages, whose template already writes them.
            add_generation_prompt: begin the assistant's turn after the messages.
            tools, chat_template, chat_template_kwargs, split_special_tokens: as for ``chat``; only
                with messages.

        Raises:
            InvalidRequestError: for an argument that cannot be tokenised, with ``param`` set. A
                prompt longer than the context is no error.
            EngineClosedError: if the engine is not started, or closed.

        Long texts are tokenised on a worker thread, one at a time.
        """
        prompts = self._require_input_processor().prompts
        num_characters, encode = prompts.prepare_tokenize(
            prompt,
            add_special_tokens=add_special_tokens,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            split_special_tokens=split_special_tokens,
        )
        token_ids = encode(SHORT_TEXT_CHARACTERS)
        if token_ids is None:
            token_ids = await prompts.tokenizer_threads.call(encode, num_characters)
        return token_ids  # pyright: ignore[reportReturnType]

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str:
        """Text of up to 524,288 token ids; ids outside the vocabulary have no text. Long lists are
        checked and decoded on a worker thread, and must not change until then.

        Raises:
            InvalidRequestError: for anything but integers from 0 to 2**32 - 1.
            EngineClosedError: if the engine is not started, or closed.
        """
        prompts = self._require_input_processor().prompts
        decode = partial(prompts.detokenize, token_ids, skip_special_tokens)
        length = LONG_TEXT_CHARACTERS
        with contextlib.suppress(Exception):  # An iterator has no length.
            length = len(token_ids)
        if length < LONG_TEXT_CHARACTERS:
            return decode()
        return await prompts.tokenizer_threads.long_thread.call(decode, length)

    # --- the engine as a whole ---------------------------------------------------------

    async def pause(self) -> None:
        """Stop scheduling; returns when no step is in flight. Streams wait, requests keep their KV
        blocks, and deadlines still expire."""
        await self._set_paused(True)

    async def resume(self) -> None:
        """Schedule again after ``pause``; changes nothing if the engine is not paused."""
        await self._set_paused(False)

    async def _set_paused(self, is_paused: bool) -> None:
        core = self._require_input_processor().submitter.core
        await wait_for(core.call(core.set_suspended, is_paused))

    async def reset_prefix_cache(self) -> bool:
        """Evict all cached prefixes. Evicts none and returns False if a request holds KV blocks."""
        core = self._require_input_processor().submitter.core
        return await wait_for(core.call(core.scheduler.kv.reset_prefix_cache))

    async def execution_report(self) -> ExecutionReport:
        """Report which ops, threads and attention backends this engine uses, and on a CPU the
        measured memory bandwidth. Measuring it blocks steps for a few tenths of a second.

        Raises:
            EngineError: for an executor without a report, or if measuring fails.
        """
        core = self._require_input_processor().submitter.core
        report = getattr(core.executor, "report", None)
        if report is None:
            raise EngineError(f"a {type(core.executor).__name__} has no report of its execution")

        def run() -> ExecutionReport | Exception:
            # Return the error instead of raising it: an exception in ``core.call`` kills the
            # engine.
            try:
                return report()
            except Exception as error:
                return error

        outcome = await wait_for(core.call(run))
        if isinstance(outcome, Exception):
            raise EngineError(
                f"the execution cannot be measured: {check.describe_error(outcome)}"
            ) from outcome
        return outcome

    def stats(self) -> EngineStats:
        """Snapshot of the engine's counters. Never blocks; any thread may call it."""
        return self._require_input_processor().submitter.core.stats()

    def cached_prefix(self, token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        """Number of leading tokens of a prompt that a request would take from the prefix cache now.

        It is at most ``len(token_ids) - 1``: the last token is always computed. The call runs no
        step, and changes nothing, not even the order of eviction. Any thread may call it. A dead
        engine has nothing cached.

        Args:
            token_ids: the prompt, as ``tokenize`` returns it.
            cache_salt: as for ``stream``.

        Raises:
            InvalidRequestError: for more than ``max_model_len`` token ids, an id outside the
                vocabulary, or a ``cache_salt`` that is neither text nor None.
            EngineClosedError: if the engine is not started, or closed.
        """
        inputs = self._require_input_processor()
        info = inputs.loaded_model.executor.info
        token_ids = check.token_ids("token_ids", token_ids, info.vocab_size, info.max_model_len)
        cache_salt = check.string("cache_salt", cache_salt, allow_empty=True, optional=True)
        return inputs.submitter.core.num_cached_tokens(PromptHashes(token_ids, cache_salt))

    def add_observer(self, observer: Observer) -> None:
        """Register an observer of requests accepted from now on; see
        ``asyncllm.observer.Observer``. Allowed in any state of the engine and on any thread.

        Raises:
            InvalidRequestError: for an object without the methods of an Observer.
        """
        self._observers.add(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Unregister an observer. It is still called for the ends of requests whose submission it
        saw. An observer that was never added is ignored."""
        self._observers.remove(observer)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer: ``encode``, ``decode``, ``apply_chat_template``."""
        return self._require_started().loaded_model.tokenizer

    @property
    def model_config(self) -> Any:
        """The model's own configuration: its architecture, sizes and limits."""
        return self._require_started().loaded_model.model_config

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, prompt and output: ``EngineConfig.max_model_len``; if that is
        None, the length that the engine chose at start."""
        return self._require_started().loaded_model.executor.info.max_model_len

    @property
    def _num_slots(self) -> int:
        """Maximum number of sequences in a batch."""
        return self._require_started().loaded_model.executor.info.max_num_seqs

    # --- checks of the state -----------------------------------------------------------

    def _require_started(self) -> EngineThread:
        """Engine thread of a started engine; the thread may have ended since."""
        if self._thread is None or self._input_processor is None:
            raise self._not_started_error()
        return self._thread

    def _require_input_processor(self) -> InputProcessor:
        """Input processor of a running or dead engine. Raises an error for an engine in any other
        state, and in a forked process. Public methods check the engine's state only here."""
        thread, inputs = self._thread, self._input_processor
        if thread is None or inputs is None:
            raise self._not_started_error()
        if os.getpid() != thread.pid:
            raise thread.forked_error()
        if self._is_closed or (thread.closing and thread.core.fatal_error is None):
            raise EngineClosedError(thread.core.close_reason)
        return inputs

    def _has_running_requests(self) -> bool:
        submitter = self._submitter
        return submitter is not None and bool(submitter.core.scheduler.running)

    def _not_started_error(self) -> EngineClosedError:
        return EngineClosedError(
            f"the engine is {self.state}; expected a started one: "
            "`async with engine` or `await engine.start()`"
        )

    def __repr__(self) -> str:
        return f"<AsyncLLMEngine {self.config.model_name!r} {self.state}>"


def _report_death(core: EngineCore, observers: Observers, _: Future[None]) -> None:
    if core.fatal_error is not None:
        observers.report_death(core.shutdown_error())
