"""Layers of a decoder, composed of the op set's ops and called with one StepContext."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from asyncllm.gpu.ops.base import Attention, AttentionShape, Linear, RMSNorm


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Attention parameters of the layers that share one Attention and one plan per step.

    Attributes:
        window: number of keys that a query sees, its own included; None is all.
        kv_group: index of the KV group that the layers belong to.
    """

    shape: AttentionShape
    window: int | None = None
    kv_group: int = 0


@dataclass(slots=True)
class StepContext:
    """Inputs that all layers read in a step, besides the hidden states; made once per step.

    Attributes:
        positions: ``[T]`` int64, position of each token in its sequence.
        slot_mappings: per attention kind ``[T]`` int64, KV slot of each token.
        plans: per attention kind, the step's plan, made by its Attention.
        rotary: per RoPE table, the result of ``TorchOps.rotary``.
        kv_caches: KV cache of each layer that has one.
        states: tensors of the StateCache; () for a model without recurrent layers.
        state_rows: result of ``TorchOps.state_rows``; None without recurrent layers.
        output_tokens: ``[S]`` int64, indices of the tokens that a layer still computes after its
            mixer: ``StepInputs.output_indices`` in the last layer; None, for all tokens, in others.
        per_layer_embeddings: ``[T, layers, P]``, see PerLayerEmbeddings; None for a model without
            them.
        shared_kv: k and v of this step's tokens, by ``AttentionMixer.kv_index``, for later layers
            that reuse them.
    """

    positions: Tensor
    slot_mappings: Sequence[Tensor]
    plans: Sequence[Any]
    rotary: Sequence[Any]
    kv_caches: Sequence[Tensor]
    states: Sequence[Tensor] = ()
    state_rows: Any = None
    output_tokens: Tensor | None = None
    per_layer_embeddings: Tensor | None = None
    shared_kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def run_eager_op(self, op: EagerOp, out_width: int, *tensors: Tensor) -> Tensor:
        """Run attention or a recurrence on tensors ``[T, ...]``, and return ``[T, out_width]``.

        Piecewise CUDA graphs are split here and nowhere else.
        """
        return op(self, *tensors)


EagerOp = Callable[..., Tensor]
"""The part of a mixer in which tokens of a sequence see one another; piecewise graphs leave it out.

It is called with the StepContext and tensors ``[T, ...]``, and returns ``[T, N]``. Only such an op
reads the step's plans, states and state rows."""

Mixer = Callable[[Tensor, StepContext], Tensor]
"""The sublayer in which tokens of a sequence see one another: attention or a recurrence.

It maps ``[T, H]`` to ``[T, H]``, or to ``[S, H]`` if ``step.output_tokens`` is set. It writes the
KV or state of all T tokens."""


class Layer(Protocol):
    """One decoder layer.

    The norm after a layer also adds the layer's output to the residual, in one fused op. Layers
    therefore take and return output and residual separately.

    Attributes:
        kind: key that is equal for layers whose ops have the same shapes.
    """

    @property
    def kind(self) -> Hashable: ...

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        """Return output and residual, ``[T, H]`` each; ``[S, H]`` if ``step.output_tokens`` is set.

        Args:
            x: ``[T, H]``, the output of the previous layer.
            residual: ``[T, H]``, may be overwritten; None before the first layer.
        """
        ...


@dataclass(frozen=True, slots=True)
class OutputGate:
    """Sigmoid gate on each element of attention's output (Qiu et al., 2025).

    Attributes:
        first_column: first column of the gates in the output of ``qkv``, after k and v.
        multiply: ``sigmoid_mul`` of the op set.
    """

    first_column: int
    multiply: Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True, kw_only=True)
class AttentionMixer:
    """Attention with its projections.

    Attributes:
        qkv: projection to q, k and v; to q alone with ``reads_shared_kv``.
        rope_and_cache: a RopeAndCache; with ``reads_shared_kv`` a Rope.
        attention_index: index of the mixer's attention kind in StepContext.
        rope_index: index of the mixer's RoPE table in StepContext.
        kv_index: index in StepContext of the KV cache that the mixer reads.
        sinks: ``(sinks,)`` with ``[Hq]`` float32, passed as attention's last argument; () without
            sinks.
        gate: gate on attention's output; None for no gate.
        shares_kv: whether later layers attend to this layer's keys and values.
        reads_shared_kv: whether this layer attends to the keys and values of an earlier layer, and
            writes no KV.
    """

    qkv: Linear
    rope_and_cache: Callable[..., Any]
    attention: Attention
    o: Linear
    attention_index: int
    rope_index: int
    kv_index: int
    sinks: tuple[Tensor, ...] = ()
    gate: OutputGate | None = None
    shares_kv: bool = False
    reads_shared_kv: bool = False

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        kv, index, rows = step.kv_caches[self.kv_index], self.attention_index, step.output_tokens
        if self.reads_shared_kv and rows is not None and not len(rows):
            return x[:0]
        rotary, qkv, gate = step.rotary[self.rope_index], self.qkv(x), self.gate
        if self.reads_shared_kv:
            q, (k, v) = self.rope_and_cache(qkv, rotary), step.shared_kv[self.kv_index]
        else:
            own = qkv if gate is None else qkv[:, : gate.first_column]
            q, k, v = self.rope_and_cache(own, rotary, kv, step.slot_mappings[index])
            if self.shares_kv:
                step.shared_kv[self.kv_index] = k, v
            if rows is not None and not len(rows):
                return x[:0]
        mixed = step.run_eager_op(self.attend, q.shape[1] * q.shape[2], q, k, v)
        if gate is not None:
            mixed = gate.multiply(mixed, qkv[:, gate.first_column :])
        return self.o(mixed if rows is None else mixed[rows])

    def attend(self, step: StepContext, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv, plan = step.kv_caches[self.kv_index], step.plans[self.attention_index]
        return self.attention(q, k, v, kv, plan, *self.sinks)


@dataclass(slots=True)
class GatedMLP:
    """Gated linear unit (Shazeer, 2020): ``down(activation(gate_up(x)))``."""

    gate_up: Linear
    activation: Callable[[Tensor], Tensor]
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate_up(x)))


@dataclass(slots=True)
class PostNormBlock:
    """A mixer or an MLP, followed by a norm."""

    block: Callable[..., Tensor]
    norm: RMSNorm

    def __call__(self, x: Tensor, *step: StepContext) -> Tensor:
        return self.norm(self.block(x, *step))


@dataclass(slots=True)
class DecoderLayer:
    """Mixer and MLP, each with a residual connection and norms before it, after it, or both.

    Attributes:
        experts_beside_mlp: an ExpertsBesideMLP, called with the MLP's output and the residual; None
            for a layer without experts beside the MLP.
    """

    kind: Hashable
    input_norm: RMSNorm
    mixer: Mixer
    post_norm: RMSNorm
    mlp: Callable[[Tensor], Tensor]
    experts_beside_mlp: Callable[[Tensor, Tensor], Tensor] | None = None

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            normed, residual = self.input_norm(x), x
        else:
            normed, residual = self.input_norm.add_and_norm(x, residual)
        x = self.mixer(normed, step)
        if step.output_tokens is not None:
            residual = residual[step.output_tokens]
            if not len(residual):
                return x, residual
        normed, residual = self.post_norm.add_and_norm(x, residual)
        x = self.mlp(normed)
        return (
            x if self.experts_beside_mlp is None else self.experts_beside_mlp(x, residual)
        ), residual
