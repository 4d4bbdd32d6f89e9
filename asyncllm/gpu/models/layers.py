"""Layers of a decoder, composed of the op set's ops and called with one StepContext."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from asyncllm.gpu.ops.base import Attention, AttentionShape, Linear, RMSNorm, Rope, RopeAndCache


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """Attention that layers have in common: they share one Attention and its plan of a step.

    Attributes:
        window: keys that a query sees, itself included; None is all.
        kv_group: index of the KV group that the layers belong to.
    """

    shape: AttentionShape
    window: int | None = None
    kv_group: int = 0


@dataclass(slots=True)
class StepContext:
    """Inputs of a step to its layers beside the hidden states; made once per step.

    Attributes:
        positions: ``[T]`` int64, of each token in its sequence.
        slot_mappings: per attention kind ``[T]`` int64, where each token's K and V go.
        plans: per attention kind, from its Attention.
        rotary: per RoPE table, from the op set.
        kv: per layer the tensor of its K and V.
        states: of a model with recurrent layers, the tensors of their StateCache.
        state_rows: whose states they are, from the op set.
        rows: ``[S]`` int64, the tokens that are wanted past the mixer of the layer that runs:
            in the last one those that are sampled; None is all.
        inputs: ``[T, layers, P]``, what each layer takes of a token beside the hidden states, in
            models where it does.
        lent: by the index of their KV the step's own k and v of layers that lend them to later
            ones.
    """

    positions: Tensor
    slot_mappings: Sequence[Tensor]
    plans: Sequence[Any]
    rotary: Sequence[Any]
    kv: Sequence[Tensor]
    states: Sequence[Tensor] = ()
    state_rows: Any = None
    rows: Tensor | None = None
    inputs: Tensor | None = None
    lent: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def mix(self, core: Core, width: int, *tensors: Tensor) -> Tensor:
        """Runs a mixer's core on tensors ``[T, ...]``, to ``[T, width]``. A capture in segments is
        broken here and nowhere else."""
        return core(self, *tensors)


Core = Callable[..., Tensor]
"""The part of a mixer in which tokens of a sequence see one another: the StepContext and tensors
``[T, ...]`` to ``[T, N]``. It alone reads the step's rows, plans and states."""

Mixer = Callable[[Tensor, StepContext], Tensor]
"""The sublayer in which tokens of a sequence see one another, attention or a recurrence:
``[T, H] -> [T, H]``, or ``[S, H]`` at ``step.rows``. It keeps the state of all T tokens."""


class Layer(Protocol):
    """One layer. The residual is added by the norm that follows, fused into it, so a layer
    takes and returns its input and the residual apart.

    Attributes:
        kind: equal for layers whose ops have the same shapes.
    """

    @property
    def kind(self) -> Hashable: ...

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        """Returns output and residual, ``[T, H]`` each, or ``[S, H]`` at ``step.rows``.

        Args:
            x: ``[T, H]``, the output of the layer before.
            residual: ``[T, H]``, may be overwritten; None before the first layer.
        """
        ...


@dataclass(frozen=True, slots=True)
class OutputGate:
    """A gate for each element of attention's output (Qiu et al., 2025), by whose sigmoid it is
    multiplied.

    Attributes:
        start: of the gates in the outputs of ``qkv``, behind k and v.
        multiply: ``sigmoid_mul`` of the op set.
    """

    start: int
    multiply: Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True)
class AttentionMixer:
    """Attention with its projections.

    Attributes:
        attention_index: of its kind in StepContext.
        rope_index: of its RoPE table in StepContext.
        kv_index: of its KV in StepContext.
        sinks: a last argument of attention, ``[Hq]`` float32, where its shape has sinks.
        gate: of the output; None without.
        lends: later layers attend to its keys and values.
    """

    qkv: Linear
    rope_and_cache: RopeAndCache
    attention: Attention
    o: Linear
    attention_index: int
    rope_index: int
    kv_index: int
    sinks: tuple[Tensor, ...] = ()
    gate: OutputGate | None = None
    lends: bool = False

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        kv, index, rows = step.kv[self.kv_index], self.attention_index, step.rows
        rotary, qkv, gate = step.rotary[self.rope_index], self.qkv(x), self.gate
        own = qkv if gate is None else qkv[:, : gate.start]
        q, k, v = self.rope_and_cache(own, rotary, kv, step.slot_mappings[index])
        if self.lends:
            step.lent[self.kv_index] = k, v
        if rows is not None and not len(rows):
            return x[:0]
        mixed = step.mix(self.attend, q.shape[1] * q.shape[2], q, k, v)
        if gate is not None:
            mixed = gate.multiply(mixed, qkv[:, gate.start :])
        return self.o(mixed if rows is None else mixed[rows])

    def attend(self, step: StepContext, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv, plan = step.kv[self.kv_index], step.plans[self.attention_index]
        return self.attention(q, k, v, kv, plan, *self.sinks)


@dataclass(slots=True)
class SharedAttentionMixer:
    """Attention to the keys and values of an earlier layer, which lends them: it has queries alone,
    and writes nothing.

    Attributes:
        kv_index: of the KV of that layer; the rest as in AttentionMixer.
    """

    q: Linear
    rope: Rope
    attention: Attention
    o: Linear
    attention_index: int
    rope_index: int
    kv_index: int
    sinks: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        rows, (k, v) = step.rows, step.lent[self.kv_index]
        if rows is not None and not len(rows):
            return x[:0]
        q = self.rope(self.q(x), step.rotary[self.rope_index])
        mixed = step.mix(self.attend, q.shape[1] * q.shape[2], q, k, v)
        return self.o(mixed if rows is None else mixed[rows])

    def attend(self, step: StepContext, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv, plan = step.kv[self.kv_index], step.plans[self.attention_index]
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
class NormedMixer:
    """A mixer with a norm behind it."""

    mixer: Mixer
    norm: RMSNorm

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        return self.norm(self.mixer(x, step))


@dataclass(slots=True)
class NormedMLP:
    """An MLP with a norm behind it."""

    mlp: Callable[[Tensor], Tensor]
    norm: RMSNorm

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(self.mlp(x))


@dataclass(slots=True)
class DecoderLayer:
    """Mixer and MLP, each around a residual: norms before them, behind them, or both.

    Attributes:
        beside: what is beside the MLP, from the MLP's output and the residual.
    """

    kind: Hashable
    input_norm: RMSNorm
    mixer: Mixer
    post_norm: RMSNorm
    mlp: Callable[[Tensor], Tensor]
    beside: Callable[[Tensor, Tensor], Tensor] | None = None

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            normed, residual = self.input_norm(x), x
        else:
            normed, residual = self.input_norm.add(x, residual)
        x = self.mixer(normed, step)
        if step.rows is not None:
            residual = residual[step.rows]
            if not len(residual):
                return x, residual
        normed, residual = self.post_norm.add(x, residual)
        x = self.mlp(normed)
        return (x if self.beside is None else self.beside(x, residual)), residual
