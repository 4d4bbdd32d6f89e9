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
        sinks: the softmax has an extra logit per query head, without a value; each call gets it.
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
    """Layout of one layer's part of a KV block, which the layer's attention chooses.

    Attributes:
        shape: shape of the part; a layer's cache is ``[shape[0], num_blocks, *shape[1:]]``.
        order: the cache's dimensions in their order in memory, outermost first; () for the order
            of the shape.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def view(self, memory: Tensor, num_blocks: int) -> Tensor:
        """Views ``memory [layers, num_blocks * num_elements]`` as the caches of layers."""
        shape = (self.shape[0], num_blocks, *self.shape[1:])
        order = self.order or tuple(range(len(shape)))
        stored = memory.view(len(memory), *(shape[dim] for dim in order))
        return stored.permute(0, *(1 + order.index(dim) for dim in range(len(shape))))


class Linear(Protocol):
    """``x [T, in] -> [T, out]``; owns its weight, in the backend's own layout."""

    def __call__(self, x: Tensor) -> Tensor: ...


@runtime_checkable
class ArgmaxLinear(Linear, Protocol):
    """An output head that finds the index of its largest output without writing the outputs."""

    def argmax(self, x: Tensor) -> Tensor:
        """``x [T, in] -> [T]`` int64: index of each row's largest output, the first of equal ones.

        -1 for a row with NaN or infinity, NO_TOKEN_LEFT if all outputs are minus infinity.
        """
        ...


class Embedding(Protocol):
    """Token ids ``[T] -> [T, H]``; owns its table, or shares it with the head.

    Attributes:
        dtype, device: dtype and device of the model.
        shape: ``(vocab_size, H)``.
    """

    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __call__(self, token_ids: Tensor) -> Tensor: ...


class RMSNorm(Protocol):
    """Root mean square norm over the last dimension (Zhang and Sennrich, 2019), or its substitute.

    A substitute is for blocks without a norm, see ``TorchOps.residual_add``.
    """

    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the norm of ``(multiplier * x + residual) * scale``, and that sum.

        ``residual`` may be overwritten.
        """
        ...


class Rope(Protocol):
    """RoPE of queries alone, after their norm where the model has one."""

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
            rotary: result of ``TorchOps.rotary`` for the step's positions.
            cache: ``[2, num_blocks, block_size, Hk, D]``, strided.
            slot_mapping: ``[T]`` int64, ``block * block_size + offset``.
        """
        ...


@runtime_checkable
class Attention(Protocol):
    """Paged attention of one step's rows over the KV cache.

    An optional method ``block_layout(block_size) -> BlockLayout`` chooses a layout of KV blocks
    other than ``[2, num_blocks, block_size, Hk, D]`` in that order. Plain torch ops write K and V
    in that order only; the Triton ops take any.

    An optional attribute ``is_recordable`` says that a Recorder can record its calls, and that its
    plan only refers to the step's arrays, which are read when the program runs.

    Attributes:
        needs_zeroed_blocks: it reads beyond the end of a sequence in its last block and masks
            that part, so that blocks have to be cleared for a new owner.
    """

    name: str
    needs_zeroed_blocks: bool

    def plan(self, step: StepInputs, window: int | None, group: int) -> Any:
        """Makes the plan that all layers with this window in a KV group share in a step.

        It is made once per step, or once per graph while a CUDA graph is captured. In the latter
        case ``step.host`` is None, all rows are decodes, and no tensor may be read on the host;
        work on the device becomes part of the graph, and a choice that depends on lengths has to
        be made for ``step.max_len``.

        Args:
            window: keys that a query sees, itself included; None is all.
            group: index of the KV group in ``step.groups``.
        """
        ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, plan: Any) -> Tensor:
        """Returns ``[T, Hq * D]``. The step's own k and v are in ``cache`` already.

        A shape with sinks adds a last argument, the layer's sinks ``[Hq]``.
        """
        ...


@runtime_checkable
class BalancedAttention(Protocol):
    """Attention with a second, balanced form for captured decode rows of very different lengths.

    ``plan`` chooses that form where ``StepInputs.balanced`` is set.
    """

    def balances(self, max_len: int, window: int | None) -> bool:
        """Whether sequences of at most ``max_len`` tokens may need the balanced form."""
        ...

    def is_skewed(self, batch: int, lengths: np.ndarray, max_len: int, window: int | None) -> bool:
        """Whether decode rows take the balanced form; asked before every decode step.

        Args:
            batch: rows of the launch, padding included.
            lengths: ``[B]``, tokens of each sequence.
            max_len: longest sequence for which the captured plan is made.
        """
        ...


def block_layout(attention: Attention, shape: AttentionShape, block_size: int) -> BlockLayout:
    """The layout of the attention's KV blocks."""
    choose = getattr(attention, "block_layout", None)
    if choose is not None:
        return choose(block_size)
    return BlockLayout((2, block_size, shape.num_kv_heads, shape.head_dim))
