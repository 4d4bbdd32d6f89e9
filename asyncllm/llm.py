"""LLM: the engine for programs without an event loop."""

from __future__ import annotations

import contextlib
import numbers
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, overload

from asyncllm.config import EngineConfig
from asyncllm.engine import AsyncLLMEngine, EngineState
from asyncllm.errors import EngineError, EngineOverloadedError, RequestError
from asyncllm.outputs import Completion, Delta, EngineStats, FinishReason, Usage
from asyncllm.rows import RowJob, RowResult, blocking_results
from asyncllm.runtime.handle import UncopyableHandle
from asyncllm.runtime.mailbox import ThreadMailbox
from asyncllm.sampling_params import SamplingParams
from asyncllm.stream import TokenStream
from asyncllm.validation import argument_error, value_error

_MAX_RETRY_SECONDS = 0.1
"""Maximum number of seconds between a batch's attempts to submit to a full queue."""

Prompt = str | Sequence[int]
Messages = Sequence[dict[str, Any]]


@dataclass(eq=False, repr=False)
class LLMStream(UncopyableHandle, Iterator[Delta]):
    """Output of a request as a plain iterator. One thread at a time may read it. ``close``, the end
    of a ``with`` block, or losing the last reference aborts the request."""

    _stream: TokenStream
    _mailbox: ThreadMailbox

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._stream.finish_reason

    @property
    def usage(self) -> Usage | None:
        return self._stream.usage

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        delta = self._stream.read_blocking(self._mailbox)
        if delta is None:
            raise StopIteration
        return delta

    def result(self) -> Completion:
        """Read the output to its end; returns the completion."""
        for _ in self:
            pass
        return self._stream.completion()

    def abort(self) -> None:
        """End the request with finish reason ``abort``; its output so far can still be read."""
        self._stream.abort()

    def close(self) -> None:
        """Abort the request and end the iteration."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class LLM(UncopyableHandle):
    """The synchronous facade: the same engine, read by threads instead of tasks.

        with LLM() as llm:
            print(llm.generate("Tell me a story about Mia and a boat.").text)

    It needs no event loop and starts none: a call waits on the engine thread directly. So it works
    in a notebook, and in a thread with a running loop (which it blocks, as every synchronous call
    does). Any number of threads may use it at once.

    Args:
        model, config, overrides: as for ``AsyncLLMEngine``; the engine is started here and
            closed by ``close``.
        engine: a started engine to borrow instead; it is not closed.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        engine: AsyncLLMEngine | None = None,
        config: EngineConfig | None = None,
        **overrides: Any,
    ) -> None:
        self._owns_engine = engine is None
        if engine is not None:
            if model is not None or config is not None or overrides:
                problem = "expected either an engine or a model and its settings, not both"
                raise argument_error("engine", problem)
            self.engine = engine
            self._mailbox = engine._thread_mailbox()
        else:
            self.engine = AsyncLLMEngine(model, config=config, **overrides)
            self._mailbox = self.engine._start_blocking()

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]  # a str is a sequence of str
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        progress: bool | None = None,
        **options: Any,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **options: Any,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Any,
        sampling_params: Any = None,
        *,
        progress: bool | None = None,
        **options: Any,
    ) -> Completion | list[Completion]:
        """Complete one prompt, or a sequence of prompts as one batch, in order. A batch may be
        larger than the queue: the rest is submitted as requests end.

        Args:
            prompts: text or token ids; or a sequence of these.
            sampling_params: for all prompts, or one for each.
            progress: show a bar on standard error; None shows a bar for a batch if standard error
                is a terminal.
            options: as for ``AsyncLLMEngine.stream``.

        Raises:
            AsyncLLMError: the first error of any prompt; the other requests are then aborted.
            EngineOverloadedError: only if not even the first prompt is accepted.
        """
        is_one = isinstance(prompts, str) or _starts_with_type(prompts, "prompts", numbers.Integral)
        name = None if is_one else "prompts"
        return self._complete_batch(
            self.engine.stream, name, prompts, sampling_params, progress, options
        )

    def chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        *,
        progress: bool | None = None,
        **options: Any,
    ) -> Any:
        """Answer one conversation, or a sequence of conversations as one batch. Arguments and
        errors are those of ``generate`` and of ``AsyncLLMEngine.chat``."""
        is_one = _starts_with_type(messages, "messages", Mapping) or len(messages) == 0
        name = None if is_one else "messages"
        return self._complete_batch(
            self.engine.chat, name, messages, sampling_params, progress, options
        )

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Any
    ) -> LLMStream:
        """Submit a request at once; returns its output as a plain iterator."""
        return LLMStream(self.engine.stream(prompt, sampling_params, **options), self._mailbox)

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **options: Any
    ) -> LLMStream:
        """Submit a conversation at once; returns its output as a plain iterator."""
        return LLMStream(self.engine.chat(messages, sampling_params, **options), self._mailbox)

    def map(
        self,
        rows: Iterable[Any],
        *,
        prompt: Callable[[Any], Any] | None = None,
        sampling_params: SamplingParams | Callable[[Any], SamplingParams | None] | None = None,
        key: Callable[[Any], Any] | None = None,
        done: Container[Any] = (),
        ordered: bool = True,
        max_under_way: int | None = None,
        progress: Callable[[int, int], object] | None = None,
        **options: Any,
    ) -> Generator[RowResult]:
        """Complete the rows of a batch job; returns an iterator of their results. The thread
        that reads results also reads ``rows``. Closing the iterator, or losing the last
        reference to it, aborts the rows under way. Arguments and errors are those of
        ``AsyncLLMEngine.map``."""
        if not isinstance(rows, Iterable):
            raise value_error("rows", rows, "an iterable; an async one is for AsyncLLMEngine.map")
        job = RowJob(rows, prompt, sampling_params, key, done, ordered, max_under_way, progress)
        self.engine._check_map_options(job, options)

        def submit(prompt: Any, sampling_params: SamplingParams | None) -> TokenStream:
            inputs = self.engine._require_input_processor()
            submission = inputs.make_submission(prompt, sampling_params, dict(options))
            while True:
                try:
                    return inputs.submitter.enqueue(submission)
                except EngineOverloadedError as refused:
                    # The queue is full of other callers' requests.
                    time.sleep(min(refused.retry_after, _MAX_RETRY_SECONDS))

        return blocking_results(job, submit, self._mailbox)

    def tokenize(self, prompt: str | Messages, **options: Any) -> list[int]:
        """``AsyncLLMEngine.tokenize`` in the calling thread, with its arguments and errors."""
        _, encode = self.engine._require_input_processor().prompts.prepare_tokenize(
            prompt, **options
        )
        return encode(None)  # pyright: ignore[reportReturnType]

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """``AsyncLLMEngine.detokenize`` in the calling thread, with its arguments and errors."""
        prompts = self.engine._require_input_processor().prompts
        return prompts.detokenize(token_ids, skip_special_tokens)

    def _complete_batch(
        self,
        submit: Callable[..., TokenStream],
        name: str | None,
        prompts: Any,
        sampling_params: Any,
        progress: bool | None,
        options: dict[str, Any],
    ) -> Any:
        """Complete a batch in order, with as many requests at a time as the queue accepts. If an
        item fails, the error message has the argument's ``name`` and the item's index. If ``name``
        is None, ``prompts`` is a single prompt."""
        if name is None:
            prompts, sampling_params, progress = [prompts], [sampling_params], bool(progress)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        elif len(sampling_params) != len(prompts):
            problem = f"{len(sampling_params)} for {len(prompts)} prompts, expected one for each"
            raise argument_error("sampling_params", problem)
        live: deque[LLMStream] = deque()
        results: list[Completion] = []

        def read_first_stream() -> None:
            with _add_index_to_error(name, len(results)):
                results.append(live[0].result())
            live.popleft()
            advance()

        with _progress_bar(len(prompts), progress) as advance:
            try:
                for index, request in enumerate(zip(prompts, sampling_params, strict=True)):
                    while True:
                        try:
                            with _add_index_to_error(name, index):
                                stream = submit(*request, **options)
                            live.append(LLMStream(stream, self._mailbox))
                            break
                        except EngineOverloadedError as refused:
                            if live:
                                read_first_stream()
                            elif results:
                                # The queue is full of other callers' requests.
                                time.sleep(min(refused.retry_after, _MAX_RETRY_SECONDS))
                            else:
                                raise
                while live:
                    read_first_stream()
            finally:
                # Close the streams here: if the caller keeps the exception, its traceback keeps
                # them alive, and no destructor runs.
                for stream in live:
                    stream.close()
        return results[0] if name is None else results

    def stats(self) -> EngineStats:
        """Snapshot of the engine's counters."""
        return self.engine.stats()

    def cached_prefix(self, token_ids: Sequence[int], cache_salt: str | None = None) -> int:
        """Number of leading tokens of a prompt that are in the prefix cache; see
        ``AsyncLLMEngine.cached_prefix``."""
        return self.engine.cached_prefix(token_ids, cache_salt)

    @property
    def state(self) -> EngineState:
        """State of the engine's life cycle; see ``AsyncLLMEngine.state``."""
        return self.engine.state

    @property
    def error(self) -> EngineError | None:
        """Error that ended the engine; see ``AsyncLLMEngine.error``."""
        return self.engine.error

    def close(self, *, drain: float | None = 0.0) -> None:
        """Close the engine, unless it was passed as ``engine``. Idempotent."""
        if self._owns_engine:
            self.engine._close_blocking(drain)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@contextlib.contextmanager
def _add_index_to_error(name: str | None, index: int) -> Iterator[None]:
    """Context manager that adds the index of a batch's item to the message of its error."""
    try:
        yield
    except RequestError as error:
        # Errors of other parameters concern every item, so they get no index.
        if name is not None and getattr(error, "param", None) in (None, "prompt", "messages"):
            error.args = (f"{name}[{index}]: {error}", *error.args[1:])
        raise


def _starts_with_type(value: Any, name: str, item_type: type) -> bool:
    """Whether the first item of ``value`` is an instance of ``item_type``.

    Raises:
        InvalidRequestError: if ``value`` is not a sequence of items.
    """
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__getitem__"):
        raise argument_error(name, f"is a {type(value).__name__}, expected a sequence")
    return len(value) > 0 and isinstance(value[0], item_type)


@contextlib.contextmanager
def _progress_bar(total: int, is_shown: bool | None) -> Iterator[Callable[[], None]]:
    """Show a bar; yields a function that counts one more prompt as done."""
    if is_shown is None:
        # A process without a console has no standard error.
        is_shown = sys.stderr is not None and sys.stderr.isatty()
    if not is_shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    # A bar cannot be redrawn in a file, so only the full bar is written.
    with Progress(*columns, console=console, transient=console.is_terminal) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda: bar.advance(task)
