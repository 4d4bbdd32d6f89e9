"""Linear, RMSNorm, Rope, RopeAndCache, Attention: the protocols of the decoder's ops.

Ops are made once, when the model is built, by an op set (``TorchOps`` and its subclasses) and
an attention backend; a step only calls them. The shapes below use T tokens of a step, Hq query
heads, Hk key/value heads and D, the size of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from asyncllm.gpu.batch.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Attention geometry, score scale and soft cap.

    Attributes:
        scale: factor on ``q @ k`` (``head_dim ** -0.5``).
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them.
        sinks: a logit per query head takes part in the softmax, and has no value: it is given
            with each call.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    sinks: bool = False

    @property
    def group_size(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The part of a KV block that belongs to one layer, as its attention lays it out.

    Attributes:
        shape: the cache of a layer has it with the blocks in second place: ``[shape[0],
            num_blocks, *shape[1:]]``.
        order: its dimensions as they lie in memory, the outermost first; () for their own.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def view(self, memory: Tensor, num_blocks: int) -> Tensor:
        """``memory [layers, num_blocks * num_elements]`` as the caches of layers."""
        shape = (self.shape[0], num_blocks, *self.shape[1:])
        order = self.order or tuple(range(len(shape)))
        stored = memory.view(len(memory), *(shape[dim] for dim in order))
        return stored.permute(0, *(1 + order.index(dim) for dim in range(len(shape))))


class Linear(Protocol):
    """``x [T, in] -> [T, out]``; owns its weight, in the backend's own layout."""

    def __call__(self, x: Tensor) -> Tensor: ...


@runtime_checkable
class ArgmaxLinear(Linear, Protocol):
    """An output head that finds its largest output without writing the others."""

    def argmax(self, x: Tensor) -> Tensor:
        """``x [T, in] -> [T]`` int64: the first of the largest outputs of a call; -1 where one is
        NaN or infinity, NO_TOKEN_LEFT where all are minus infinity."""
        ...


class Embedding(Protocol):
    """Token ids ``[T] -> [T, H]``; owns its table, or shares it with the head.

    Attributes:
        dtype, device: the model's.
        shape: ``(vocab_size, H)``.
    """

    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __call__(self, token_ids: Tensor) -> Tensor: ...


class RMSNorm(Protocol):
    """Root mean square norm over the last dimension (Zhang and Sennrich, 2019), or what stands in
    place of one."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of ``x + residual``, or of a multiple of x and the residual, times a number, and
        that sum. ``residual`` may be overwritten."""
        ...


class Rope(Protocol):
    """Norm where the model has one, and RoPE, of queries alone."""

    def __call__(self, q: Tensor, rotary: Any) -> Tensor:
        """``[T, Hq * D] -> [T, Hq, D]``; q may be overwritten. ``rotary`` as in RopeAndCache."""
        ...


class RopeAndCache(Protocol):
    """Norms of q, k and v where the model has them, RoPE, and the write of k and v to the cache."""

    def __call__(
        self, qkv: Tensor, rotary: Any, cache: Tensor, slot_mapping: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q ``[T, Hq, D]``, k and v ``[T, Hk, D]``.

        Args:
            qkv: ``[T, (Hq + 2 * Hk) * D]``; may be overwritten.
            rotary: from the op set, for the step's positions.
            cache: ``[2, num_blocks, block_size, Hk, D]``, strided.
            slot_mapping: ``[T]`` int64, ``block * block_size + offset``.
        """
        ...


@runtime_checkable
class Attention(Protocol):
    """Paged attention of one step's rows over the KV cache.

    A method ``block_layout(block_size) -> BlockLayout`` is optional: the layout of its KV
    blocks where it is not ``[2, num_blocks, block_size, Hk, D]`` in that order. Plain torch
    ops write K and V in that order only; the Triton ops take any.

    An attribute ``is_recordable`` is optional as well: its calls write themselves into a Recorder,
    and its plan only refers to the step's arrays, which are read when the program runs.

    Attributes:
        needs_zeroed_blocks: it reads past the end of a sequence in its last block and masks
            that part, so blocks have to be cleared for a new owner.
    """

    name: str
    needs_zeroed_blocks: bool

    def plan(self, step: StepInputs, window: int | None, group: int) -> Any:
        """The plan that all layers with this window in a KV group share in a step; made once per
        step.

        While a CUDA graph is captured ``step.host`` is None, and the plan is made once per graph:
        no tensor may be read on the host, what is computed on the device is part of the graph, and
        a choice that depends on lengths has to be made for ``step.max_len``. All rows of such a
        step are decodes.

        Args:
            window: keys that a query sees, itself included; None is all.
            group: index of the KV group in ``step.groups``.
        """
        ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, plan: Any) -> Tensor:
        """Returns ``[T, Hq * D]``. The step's own k and v are in ``cache`` already. A shape with
        sinks brings a last argument, ``[Hq]``: those of the layer."""
        ...


@runtime_checkable
class BalancedAttention(Protocol):
    """Attention that has a second form for captured decode rows of very different lengths, planned
    where ``StepInputs.balanced`` is set."""

    def balances(self, max_len: int, window: int | None) -> bool:
        """Whether there may be such rows, of sequences of at most ``max_len`` tokens."""
        ...

    def is_skewed(self, batch: int, lengths: np.ndarray, max_len: int, window: int | None) -> bool:
        """Whether decode rows take it; asked by the host before every decode step.

        Args:
            batch: rows of the launch, padding included.
            lengths: ``[B]``, tokens of each sequence.
            max_len: longest sequence that the captured plan is made for.
        """
        ...


def block_layout(attention: Attention, shape: AttentionShape, block_size: int) -> BlockLayout:
    """The layout of the attention's KV blocks."""
    choose = getattr(attention, "block_layout", None)
    if choose is not None:
        return choose(block_size)
    return BlockLayout((2, block_size, shape.num_kv_heads, shape.head_dim))
