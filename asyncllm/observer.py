"""Observers: who wants to know which requests come and how they end."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from asyncllm.logger import get_logger, is_interrupt
from asyncllm.outputs import Usage
from asyncllm.validation import invalid

if TYPE_CHECKING:
    from asyncllm.core.request import Request

logger = get_logger("asyncllm")

Operation = Literal["chat", "text_completion"]


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """The call behind a request.

    Attributes:
        operation: "chat" for a conversation, else "text_completion".
        prompt: as it was given: text, token ids, or messages. Treat it as the caller's own.
    """

    operation: Operation
    prompt: Any


class Observer(Protocol):
    """Is told of every request that the engine accepted, when it comes and when it ends.
    Requests that were refused (overload, bad arguments) are not reported. A request for several
    outputs is one: ``request`` is its first output, and ``outputs_of(request)`` are all.

    An observer that has a method ``on_first_token(request)`` as well is told of the first
    token, at ``request.first_token_at``: once, between the other two, and not at all if no
    token comes.

    The methods must be quick, for the first runs in the application's call and the others
    in the step loop. What they raise is logged and reaches no request, be it CancelledError
    or SystemExit; but Ctrl-C during ``on_submit`` is the caller's, a KeyboardInterrupt on the
    main thread. They may read the request, and must not change it. They run among steps and
    cannot wait for the engine there: its verbs and reads raise RuntimeError.
    """

    def on_submit(self, request: Request, submission: RequestInfo) -> None:
        """In the thread and context of ``stream()`` or ``chat()``, before they return. The
        prompt may not be tokenised yet."""

    def on_finish(self, request: Request, usage: Usage, error: BaseException | None) -> None:
        """Once, after ``on_submit``, and before the reader can see the end. On the engine
        thread as a rule; where that is stuck or gone, on the thread that found out.

        Args:
            usage: counts and timings up to the end, or up to the failure.
            error: what the reader gets; None if the request ended with
                ``request.finish_reason``.
        """


def outputs_of(request: Request) -> list[Request]:
    """All outputs of a request that an observer is being told of, in order of their index. The
    first alone if its engine died while the request was announced."""
    return request.group.members or [request]


@dataclass(slots=True, eq=False)
class ObserverNotifier:
    """One request and the observers that it was announced to. RequestInfo and end may meet
    on two threads (the engine may die in the middle of ``stream()``); the later of them
    reports the end. A first token that comes before the submission was announced is reported
    just before the end."""

    _request: Request
    _observers: tuple[Observer, ...]
    _submitted: bool = False
    _first_token_seen: bool = False
    _end: tuple[Usage, BaseException | None] | None = None
    # Popping from a list is atomic: it settles who delivers.
    _undelivered: list[bool] = field(default_factory=lambda: [True])
    _to_tell_of_first_token: list[Observer] = field(init=False)

    def __post_init__(self) -> None:
        self._to_tell_of_first_token = list(self._observers)

    def submitted(self, submission: RequestInfo) -> None:
        for observer in self._observers:
            _tell(observer, "on_submit", self._request, submission)
        self._submitted = True
        if self._end is not None:
            self._deliver()

    def first_token(self) -> None:
        self._first_token_seen = True
        if self._submitted:
            self._deliver_first_token()

    def finished(self, usage: Usage, error: BaseException | None) -> None:
        self._end = (usage, error)
        if self._submitted:
            self._deliver()

    def _deliver(self) -> None:
        try:
            self._undelivered.pop()
        except IndexError:
            return
        assert self._end is not None
        if self._first_token_seen:
            self._deliver_first_token()
        for observer in self._observers:
            _tell(observer, "on_finish", self._request, *self._end)

    def _deliver_first_token(self) -> None:
        while True:
            try:
                observer = self._to_tell_of_first_token.pop(0)
            except IndexError:
                return
            _tell(observer, "on_first_token", self._request)


class Observers:
    """The observers of one engine; any thread may add and remove.

    Attributes:
        all: as it is, and replaced whole.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.all: tuple[Observer, ...] = ()

    def add(self, observer: Observer) -> None:
        """Observes requests from now on; adding one twice changes nothing.

        Raises:
            InvalidRequestError: for an object without the methods of an Observer.
        """
        if not (hasattr(observer, "on_submit") and hasattr(observer, "on_finish")):
            accepted = "an object with the methods on_submit and on_finish"
            raise invalid("observer", observer, accepted)
        with self._lock:
            if not any(one is observer for one in self.all):
                self.all = (*self.all, observer)

    def remove(self, observer: Observer) -> None:
        """Announces nothing more to it. It still hears of the end of what it knows."""
        with self._lock:
            self.all = tuple(one for one in self.all if one is not observer)


def _tell(observer: Observer, method: str, *args: Any) -> None:
    try:
        if method != "on_first_token" or getattr(observer, method, None) is not None:
            getattr(observer, method)(*args)
    except BaseException as error:
        # An end that is being told has to be told to all: only the application's call can be left.
        if method == "on_submit" and is_interrupt(error):
            raise
        logger.exception("an observer failed in %s.%s", type(observer).__name__, method)
