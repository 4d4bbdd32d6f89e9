"""One request's output without an engine: its delivery, its channel and its reader, each driven
by hand, and a way to run the one in the middle of the other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import asyncllm
from asyncllm.core.channel import Channel
from asyncllm.core.output_processor import DetokenizerState, OutputProcessor
from asyncllm.core.parser_memory import ParserMemory
from asyncllm.core.request import Request, RequestGroup, Status
from asyncllm.errors import RequestError
from asyncllm.observer import ObserverNotifier
from asyncllm.outputs import Delta, Logprob, TokenLogprobs
from asyncllm.runtime.mailbox import LoopMailbox
from asyncllm.sampling_params import SamplingParams
from asyncllm.stream import TokenStream

_ROOT = Path(asyncllm.__file__).parent
_SHARED = {
    str(_ROOT / name) for name in ("core/channel.py", "core/output_processor.py", "hosts.py")
} | {str(_ROOT / "stream.py")}


def run_with_switch(call: Callable[[], object], at: int, other: Callable[[], object]) -> bool:
    """``call()``, and ``other()`` before its ``at``-th bytecode in the files that threads
    share, as if the interpreter had switched threads there. False if it has fewer."""
    seen = 0

    def on_opcode(frame, event, _):
        nonlocal seen
        # Python 3.13 takes it of a frame only once that has its trace function.
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen == at + 1:
                other()
        return on_opcode

    def on_call(frame, event, _):
        if frame.f_code.co_filename not in _SHARED:
            return None
        frame.f_trace_opcodes = True
        return on_opcode

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        call()
    finally:
        sys.settrace(before)
    return seen > at


class Waiter:
    woken = False

    def __await__(self):
        yield

    def done(self) -> bool:
        return self.woken

    def set_result(self, _: None) -> None:
        self.woken = True


class Host:
    """A loop that runs what was posted when it is told to."""

    def __init__(self) -> None:
        self.posted: list[Callable[[], object]] = []

    def post(self, callback: Callable[[], object]) -> None:
        self.posted.append(callback)

    def make_waiter(self) -> Waiter:
        return Waiter()

    def is_closed(self) -> bool:
        return False

    def run_posted(self) -> None:
        posted, self.posted = self.posted, []
        for callback in posted:
            callback()


class Ends:
    """An observer that keeps how the request ended."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def on_submit(self, request, submission) -> None:
        pass

    def on_finish(self, request, usage, error) -> None:
        self.seen.append(error or request.finish_reason or "abort")


class ChannelRig:
    """Attributes:
    tokens: those written, in order.
    deltas: those read, in order; ``end`` is what came after them, a finish reason or an
        exception.
    """

    def __init__(self, *, max_unread=4, on_slow="coalesce", logprobs=True):
        self.logprobs = logprobs
        self.tokens: list[int] = []
        self.deltas: list[Delta] = []
        self.end: object = None
        self.host = Host()
        self.mailbox = LoopMailbox(self.host)
        self.channel = Channel(max_unread=max_unread, on_slow=on_slow)
        detokenizer = SimpleNamespace(push=text_of, finish=lambda: "", stopped=None)
        self.group = RequestGroup("r", self.channel)
        self.request = Request(
            self.group,
            SamplingParams(logprobs=0 if logprobs else None),
            token_ids=[1],
            max_model_len=10**9,
            output=DetokenizerState(str, detokenizer),
        )
        self.request.status = Status.RUNNING
        self.scheduler = SimpleNamespace(
            finish=self._on_finish, pause=lambda _: None, resume=lambda _: None
        )
        self.forgotten: list[RequestGroup] = []
        admission = SimpleNamespace(forget_group=self.forgotten.append)
        self.output_processor = OutputProcessor(
            self.scheduler, admission, lambda: 0.0, ParserMemory()
        )
        self.observed = Ends()
        self.group.notifier = ObserverNotifier(self.request, (self.observed,))
        self.group.notifier.notify_submit(None)
        core = SimpleNamespace(
            abort=self._on_abort,
            abandon=lambda _: None,
            send=lambda run, *args: run(*args),
            on_reader_caught_up=self.output_processor.resume_group,
            check_not_engine_thread=lambda: None,
        )
        self.aborted = False
        self.stream = TokenStream(self.request, core, lambda: self.mailbox)
        self._reading = None
        self._waiter = None

    # --- the engine thread --------------------------------------------------------------

    def put(self) -> None:
        """A token that is not the last."""
        self._deliver()

    def put_last(self) -> None:
        """A token that ends the request."""
        self.request.status = Status.FINISHED
        self.request.finish_reason = "length"
        self._deliver()

    def _deliver(self) -> None:
        token = len(self.tokens) + 1000
        self.tokens.append(token)
        self.request.token_ids.append(token)
        logprobs = logprobs_of(token) if self.logprobs else None
        self.output_processor.deliver((self.request, token, logprobs, None), 0.0)

    def abort(self) -> None:
        self.output_processor.abort(self.group)

    def announce_and_read(self) -> None:
        self.output_processor.flush_wakeups()
        self.read_until_asleep()

    def fail(self) -> None:
        """Ends the request as the watchdog of a hung engine does, on a thread of its own."""
        self.output_processor.end_group(self.request, RuntimeError("hung"))
        self.output_processor.flush_all_wakeups()

    def _on_finish(self, request, reason) -> None:
        request.status = Status.FINISHED
        request.finish_reason = reason

    # --- the reader ---------------------------------------------------------------------

    def read(self) -> None:
        """Runs the reading task until it waits again or has a delta, if it does not sleep."""
        if self.asleep or self.end is not None:
            return
        if self._reading is None:
            self._reading = self.stream.__anext__()
        try:
            self._reading.send(None)
        except StopIteration as stop:
            self._reading = None
            self.deltas.append(stop.value)
            self.end = stop.value.finish_reason
        except (RuntimeError, RequestError) as error:
            self._reading = None
            self.end = error
        else:
            self._waiter = self.channel.waiter

    @property
    def asleep(self) -> bool:
        return self._reading is not None and not self._waiter.woken

    def read_until_asleep(self) -> None:
        """What the loop does with one wake of the engine."""
        self.host.run_posted()
        while not self.asleep and self.end is None:
            self.read()

    def cancel(self) -> None:
        """Cancels a pending read."""
        self._reading.close()
        self._reading = None

    def _on_abort(self, group) -> None:
        group.cancelled = True
        self.aborted = True

    # --- both ---------------------------------------------------------------------------

    def check_read(self, num_tokens: int) -> None:
        """What was read is the first ``num_tokens`` tokens, each once."""
        tokens = self.tokens[:num_tokens]
        read = self.deltas
        assert [token for delta in read for token in delta.token_ids] == tokens
        assert "".join(delta.text for delta in read) == "".join(map(text_of, tokens))
        assert all(len(delta.token_ids) <= self.channel.max_merged for delta in read)
        assert [delta.finish_reason for delta in read[:-1]] == [None] * len(read[:-1])
        wanted = [logprobs_of(token) for token in tokens] if self.logprobs else []
        assert [one for delta in read for one in delta.logprobs or ()] == wanted
        completion = self.stream._make_outputs()[0].token_ids
        assert list(completion) == tokens

    def close(self) -> None:
        """Leaves no coroutine behind that was never awaited."""
        if self._reading is not None:
            self._reading.close()


def text_of(token: int) -> str:
    return f"{token} "


def logprobs_of(token: int) -> TokenLogprobs:
    return TokenLogprobs(Logprob(token, -1.0, 1), ())
