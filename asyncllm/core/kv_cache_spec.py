"""KVCacheSpec: a group of layers that share a request's block table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Group of layers whose KV lies in the same blocks, so that they share one table per request.

    Attributes:
        layers: indices of the layers.
        block_size: tokens per block.
        kind: which tokens of a sequence keep their KV. "full_attention": all of them;
            "sliding_window": those that a later query sees.
        window: number of keys that a query of a "sliding_window" group sees, its own included.

    Raises:
        ValueError: ``window`` below 1 or missing for a "sliding_window", or given for another kind.
    """

    layers: tuple[int, ...]
    block_size: int
    kind: Literal["full_attention", "sliding_window"] = "full_attention"
    window: int | None = None

    def __post_init__(self) -> None:
        slides = self.kind == "sliding_window"
        if slides != (self.window is not None) or (self.window is not None and self.window < 1):
            expected = "at least 1" if slides else "None"
            raise ValueError(f"window={self.window}: expected {expected} for kind={self.kind!r}")

    def max_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Maximum number of blocks that a sequence of ``num_tokens`` holds at once. With a window:
        blocks for the keys that the first of ``step_tokens`` queries sees and for the queries' own
        keys, at the worst alignment.

        Args:
            step_tokens: maximum number of tokens that a step computes of one sequence, drafts
                included.
        """
        whole = -(-num_tokens // self.block_size)
        if self.window is None:
            return whole
        span = self.window - 1 + step_tokens
        return min(whole, (span + self.block_size - 2) // self.block_size + 1)
