"""ProgressCallback: callback that reports the progress of loading."""

from __future__ import annotations

from typing import Literal, Protocol

LoadStage = Literal["download", "weights", "kernels", "graphs"]


class ProgressCallback(Protocol):
    """Callback that reports the progress of loading. Downloads call it on their own threads. If it
    raises, loading stops."""

    def __call__(self, done: int, total: int, stage: LoadStage = "weights") -> None:
        """Report that ``done`` of ``total`` units are complete.

        The unit depends on the stage: a downloaded byte of the model's files ("download"), a byte
        of weights that was read ("weights"), a step that compiles kernels ("kernels"), or a
        captured CUDA graph ("graphs"). ``total`` grows while files are still being looked up.
        """
