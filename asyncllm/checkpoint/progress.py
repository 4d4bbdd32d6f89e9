"""Progress: how far loading is."""

from __future__ import annotations

from typing import Literal, Protocol

LoadStage = Literal["weights", "kernels", "graphs"]


class Progress(Protocol):
    """Callback that loading reports to, also from downloading threads. It may raise, which
    gives loading up."""

    def __call__(self, done: int, total: int, stage: LoadStage = "weights") -> None:
        """Bytes of weights downloaded or read, steps that compile kernels, or CUDA graphs captured
        at start, and all of them. ``total`` grows while files are still being looked up."""
