"""Loggers for code that runs on the engine thread."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from typing import Any


class GuardedLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose calls do not raise: the application's filters and handlers run in them, and
    an error in one of those must not end the engine. It is reported as
    ``logging.Handler.handleError`` reports it."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        try:
            # This frame is not the caller.
            super().log(level, msg, *args, stacklevel=2, **kwargs)
        except (Exception, SystemExit):
            with contextlib.suppress(Exception):
                if logging.raiseExceptions and sys.stderr is not None:
                    traceback.print_exc()


def get_logger(name: str) -> GuardedLogger:
    return GuardedLogger(logging.getLogger(name))
