"""Linear, RMSNorm, Rope, RopeAndCache, Attention: the protocols of the decoder's ops.

An op set (``TorchOps`` and its subclasses) and an attention backend make the ops once, when the
model is built; a step only calls them. In shapes, T is the number of tokens of a step, Hq that of
query heads, Hk that of key/value heads, and D the size of a head.
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
        scale: factor on ``q @ k``, usually ``head_dim ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``; None leaves them.
        sinks: whether the softmax has an extra logit per query head, without a value. Each call
            gets these logits as an argument.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    sinks: bool = False

    @property
    def group_size(self) -> int:
        """Number of query heads per key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Layout of one layer's part of a KV block; the layer's attention chooses it.

    Attributes:
        shape: shape of the layer's part of one block. The layer's cache is
            ``[shape[0], num_blocks, *shape[1:]]``.
        order: dimensions of the cache in the order of memory, outermost first. () is the order of
            the shape.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def view(self, memory: Tensor, num_blocks: int) -> Tensor:
        """Views ``memory [layers, num_blocks * num_elements]`` as one cache per layer."""
        shape = (self.shape[0], num_blocks, *self.shape[1:])
        order = self.order or tuple(range(len(shape)))
        stored = memory.view(len(memory), *(shape[dim] for dim in order))
        return stored.permute(0, *(1 + order.index(dim) for dim in range(len(shape))))


class Linear(Protocol):
    """Linear layer, ``x [T, in] -> [T, out]``, with its weight in the op set's own layout."""

    def __call__(self, x: Tensor) -> Tensor: ...


@runtime_checkable
class ArgmaxLinear(Linear, Protocol):
    """Output head that can find the index of the largest logit without writing the logits."""

    def argmax(self, x: Tensor) -> Tensor:
        """Index of each row's largest output, ``x [T, in] -> [T]`` int64.

        Of equal outputs the first counts. The index is -1 for a row whose outputs include NaN or
        infinity, and NO_TOKEN_LEFT for a row whose outputs are all minus infinity.
        """
        ...


class Embedding(Protocol):
    """Embedding, token ids ``[T] -> [T, H]``.

    It owns its table, or shares it with the output head.

    Attributes:
        dtype, device: dtype and device of the result.
        shape: ``(vocab_size, H)``.
    """

    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __call__(self, token_ids: Tensor) -> Tensor: ...


class RMSNorm(Protocol):
    """Root mean square norm over the last dimension (Zhang and Sennrich, 2019).

    A decoder block without a norm has a substitute instead, see ``TorchOps.residual_add``.
    """

    def __call__(self, x: Tensor) -> Tensor: ...

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ``norm(sum)`` and ``sum = (multiplier * x + residual) * scale``.

        ``multiplier`` and ``scale`` are constants of the norm. ``residual`` may be overwritten.
        """
        ...


class Rope(Protocol):
    """Per-head norm, if the model has one, and RoPE of the queries alone."""

    def __call__(self, q: Tensor, rotary: Any) -> Tensor:
        """Maps q ``[T, Hq * D]`` to ``[T, Hq, D]``; q may be overwritten.

        Args:
            rotary: as in RopeAndCache.
        """
        ...


class RopeAndCache(Protocol):
    """QK-norm and norm of values, if the model has them, RoPE, and the KV cache write."""

    def __call__(
        self, qkv: Tensor, rotary: Any, cache: Tensor, slot_mapping: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q ``[T, Hq, D]``, k and v ``[T, Hk, D]``.

        Args:
            qkv: ``[T, (Hq + 2 * Hk) * D]``; may be overwritten.
            rotary: result of ``TorchOps.rotary`` for the step's positions.
            cache: ``[2, num_blocks, block_size, Hk, D]`` with any strides.
            slot_mapping: ``[T]`` int64, ``block * block_size + offset``.
        """
        ...


@runtime_checkable
class Attention(Protocol):
    """Paged attention of one step's rows over the KV cache.

    An attention may have these members as well:

    - ``block_layout(block_size) -> BlockLayout`` chooses a layout of KV blocks other than ``[2,
      num_blocks, block_size, Hk, D]`` in that order. Plain torch ops write K and V only in the
      default order; the Triton ops write to any layout.
    - ``is_recordable``: if true, a Recorder can record the attention's calls. Its plan then holds
      only the addresses of the step's arrays, whose contents are read when the program runs.

    Attributes:
        needs_zeroed_blocks: whether blocks have to be zeroed before another sequence uses them,
            because the attention reads a sequence's last block whole and only masks its unused
            slots.
    """

    name: str
    needs_zeroed_blocks: bool

    def plan(self, step: StepInputs, window: int | None, group: int) -> Any:
        """Makes the plan of a step for the layers of a KV group with this window.

        It is called once per step. While a CUDA graph is captured it is called once per graph, and
        then

        - ``step.host`` is None, all rows are decode rows, and no tensor may be read on the host;
        - work on the device becomes part of the graph;
        - a choice that depends on lengths has to be made for ``step.max_len``.

        Args:
            window: number of keys that a query sees, its own included; None is all.
            group: index of the KV group in ``step.groups``.
        """
        ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, plan: Any) -> Tensor:
        """Returns attention's output ``[T, Hq * D]``. The step's own k and v are in ``cache``
        already.

        If ``AttentionShape.sinks`` is set, the layer's sinks ``[Hq]`` are a last argument.
        """
        ...


@runtime_checkable
class LoadBalancingAttention(Protocol):
    """Attention with a second plan that balances work, for captured decode rows of very different
    lengths.

    ``plan`` makes the balanced plan where ``StepInputs.has_balanced_splits`` is set.
    """

    def may_have_skewed_lengths(self, max_len: int, window: int | None) -> bool:
        """Whether sequences of at most ``max_len`` tokens may need the balanced plan."""
        ...

    def has_skewed_lengths(
        self, batch: int, lengths: np.ndarray, max_len: int, window: int | None
    ) -> bool:
        """Whether decode rows need the balanced plan; called before every decode step.

        Args:
            batch: number of rows of the launch, padding included.
            lengths: ``[B]``, tokens of each sequence.
            max_len: sequence length for which the captured plan is made.
        """
        ...


def block_layout(attention: Attention, shape: AttentionShape, block_size: int) -> BlockLayout:
    """Layout of the attention's KV blocks."""
    choose = getattr(attention, "block_layout", None)
    if choose is not None:
        return choose(block_size)
    return BlockLayout((2, block_size, shape.num_kv_heads, shape.head_dim))
