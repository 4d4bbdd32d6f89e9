"""KVCacheSpec: a group of layers that share a request's block table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Layers whose KV lies in the same blocks, so that one table per request serves all.

    Attributes:
        layers: indices of the layers.
        block_size: tokens per block.
        kind: which tokens of a sequence keep their KV. "full_attention": all of them.
    """

    layers: tuple[int, ...]
    block_size: int
    kind: Literal["full_attention"] = "full_attention"
