"""Progress: callback that reports the progress of loading."""

from __future__ import annotations

from typing import Literal, Protocol

LoadStage = Literal["weights", "kernels", "graphs"]


class Progress(Protocol):
    """Callback of loading, also called on downloading threads. If it raises, loading stops."""

    def __call__(self, done: int, total: int, stage: LoadStage = "weights") -> None:
        """Report ``done`` of ``total``: bytes of weights downloaded or read, steps that compile
        kernels, or CUDA graphs captured. ``total`` grows while files are still being looked up."""
