"""KVCacheSpec: a group of layers that share a request's block table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Group of layers whose KV lies in the same blocks, so that they share one table per request.

    Attributes:
        layers: indices of the layers.
        block_size: tokens per block.
        window: number of keys that a query sees, its own included; tokens that no later query sees
            lose their KV. None with full attention, where all tokens keep their KV.

    Raises:
        ValueError: ``window`` is below 1.
    """

    layers: tuple[int, ...]
    block_size: int
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window}: expected at least 1, or None")

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
