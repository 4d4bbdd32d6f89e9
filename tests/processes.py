"""Child processes of tests."""

from __future__ import annotations

import signal


def hear_ctrl_c() -> None:
    """For ``preexec_fn``: where tests run in the background, children would inherit that
    SIGINT is ignored, and Python would not turn it into KeyboardInterrupt."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
