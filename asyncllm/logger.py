"""Loggers for code that runs on the engine thread."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import traceback
from typing import Any


class NonRaisingLogger(logging.LoggerAdapter[logging.Logger]):
    """Logger whose calls do not raise: an error in the application's handlers must not end the
    engine. The error is reported as ``logging.Handler.handleError`` does; a Ctrl-C is raised."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        try:
            # stacklevel=2: log the caller's line, not this one.
            super().log(level, msg, *args, stacklevel=2, **kwargs)
        except BaseException as error:
            if is_interrupt(error):
                raise
            with contextlib.suppress(BaseException):
                if logging.raiseExceptions and sys.stderr is not None:
                    traceback.print_exc()


def is_interrupt(error: BaseException) -> bool:
    """Whether an exception is the user's Ctrl-C, which Python raises on the main thread only."""
    main = threading.current_thread() is threading.main_thread()
    return main and issubclass(type(error), KeyboardInterrupt)


def get_logger(name: str) -> NonRaisingLogger:
    return NonRaisingLogger(logging.getLogger(name))
