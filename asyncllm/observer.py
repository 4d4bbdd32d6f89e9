"""Observers: objects that are notified when requests are submitted and end."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from asyncllm.logger import get_logger, is_interrupt
from asyncllm.outputs import Usage
from asyncllm.validation import value_error

if TYPE_CHECKING:
    from asyncllm.core.request import Request

logger = get_logger("asyncllm")

Operation = Literal["chat", "text_completion"]

_OPTIONAL_METHODS = ("on_first_token", "on_engine_dead")


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """The call that submitted a request.

    Attributes:
        operation: "chat" for a conversation, else "text_completion".
        prompt: the caller's object: text, token ids, or messages. Do not change it. For a request
            that an EngineGroup sends again: its token ids, or the engine's copy of a text that is
            not tokenised yet.
    """

    operation: Operation
    prompt: Any


class Observer(Protocol):
    """Object that is called when a request is accepted, and when it ends. Requests that were
    refused (overload, bad arguments) are not reported. A request for several outputs is reported
    once: ``request`` is its first output, and ``outputs_of(request)`` returns all.

    An optional method ``on_first_token(request)`` is called once, between ``on_submit`` and
    ``on_finish``, if the request gets a token; its time is ``request.first_token_at``.

    An optional method ``on_engine_dead(engine, error)`` is called once if the engine dies, after
    ``on_finish`` of its requests. ``engine`` is the engine's number in an EngineGroup, else None.
    ``request.group.engine`` is the same number.

    The methods must be quick: ``on_submit`` runs in the application's call, the others in the step
    loop. Exceptions, even CancelledError and SystemExit, are logged and affect no request; only
    Ctrl-C in ``on_submit``, a KeyboardInterrupt on the main thread, reaches the caller. The methods
    may read the request, but must not change it. In the step loop they cannot wait for the engine:
    its blocking methods and reads raise RuntimeError.
    """

    def on_submit(self, request: Request, submission: RequestInfo) -> None:
        """Called in the thread and context of ``stream()`` or ``chat()``, before they return. The
        prompt may not be tokenised yet."""

    def on_finish(self, request: Request, usage: Usage, error: BaseException | None) -> None:
        """Called once, after ``on_submit`` and before the reader can see the end. It is called on
        the engine thread; if that is stuck or gone, on the thread that noticed it.

        Args:
            usage: counts and timings up to the end, or up to the failure.
            error: the reader's exception; None if the request ended with ``request.finish_reason``.
        """


def outputs_of(request: Request) -> list[Request]:
    """All outputs of a request, in order of index, for the methods of observers. If the engine died
    during the submission, only the first output."""
    return request.group.members or [request]


@dataclass(slots=True, eq=False)
class ObserverNotifier:
    """Calls the observers of one request. Another thread may run ``notify_finish`` while
    ``notify_submit`` still runs, for example if the engine dies during ``stream()``. The method
    that ends last then calls ``on_finish``. A first token that arrives during ``on_submit`` is
    reported just before ``on_finish``."""

    _request: Request
    _observers: tuple[Observer, ...]
    _is_submitted: bool = False
    _has_ended: bool = False
    # Popping is atomic, so two threads never make the same call of an observer.
    _pending_calls: deque[tuple[Any, ...]] = field(default_factory=deque)

    def notify_submit(self, submission: RequestInfo) -> None:
        for observer in self._observers:
            _call_method(observer, "on_submit", self._request, submission)
        self._is_submitted = True
        if self._has_ended:
            self._call_observers()

    def notify_first_token(self) -> None:
        self._queue_calls("on_first_token")

    def notify_finish(self, usage: Usage, error: BaseException | None) -> None:
        self._has_ended = True
        self._queue_calls("on_finish", usage, error)

    def _queue_calls(self, method: str, *args: Any) -> None:
        self._pending_calls.extend(
            (observer, method, self._request, *args) for observer in self._observers
        )
        if self._is_submitted:
            self._call_observers()

    def _call_observers(self) -> None:
        with suppress(IndexError):
            while True:
                _call_method(*self._pending_calls.popleft())


class Observers:
    """Observers of one engine; any thread may add and remove them.

    Attributes:
        registered: the current observers, an immutable tuple.
        engine: the engine's number in its EngineGroup; None outside of one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.registered: tuple[Observer, ...] = ()
        self.engine: int | None = None

    def add(self, observer: Observer) -> None:
        """Add an observer, which is called for requests from now on. Adding it twice has no effect.

        Raises:
            InvalidRequestError: for an object without the methods of an Observer.
        """
        if not (hasattr(observer, "on_submit") and hasattr(observer, "on_finish")):
            accepted = "an object with the methods on_submit and on_finish"
            raise value_error("observer", observer, accepted)
        with self._lock:
            if not any(other is observer for other in self.registered):
                self.registered = (*self.registered, observer)

    def remove(self, observer: Observer) -> None:
        """Remove an observer. It still gets the end of each request whose submission it saw."""
        with self._lock:
            self.registered = tuple(other for other in self.registered if other is not observer)

    def report_death(self, error: BaseException) -> None:
        """Tell the observers that the engine has died."""
        for observer in self.registered:
            _call_method(observer, "on_engine_dead", self.engine, error)


def _call_method(observer: Observer, method: str, *args: Any) -> None:
    try:
        if method not in _OPTIONAL_METHODS or getattr(observer, method, None) is not None:
            getattr(observer, method)(*args)
    except BaseException as error:
        # Ctrl-C may interrupt only ``on_submit``, which runs in the application's call: the end of
        # a request has to reach all observers.
        if method == "on_submit" and is_interrupt(error):
            raise
        logger.exception("an observer failed in %s.%s", type(observer).__name__, method)
