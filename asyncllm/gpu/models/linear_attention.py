"""GatedDeltaMixer: Gated DeltaNet in place of attention, its construction and states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.gpu.models.layers import StepContext
from asyncllm.gpu.models.weight_scope import WeightScope
from asyncllm.gpu.ops.base import Linear
from asyncllm.gpu.ops.causal_conv import CausalConv
from asyncllm.gpu.ops.gated_delta import DecayParameters, GatedDelta
from asyncllm.gpu.ops.gated_norm import GatedNorm
from asyncllm.gpu.state_cache import StateSpec


@dataclass(slots=True)
class GatedDeltaMixer:
    """Gated DeltaNet mixer (Yang et al., 2025).

    It consists of projections, a short convolution over q, k and v, the gated delta rule, and a
    norm gated by z.

    Attributes:
        qkvz: projection to q, k and v, ``conv_channels`` columns together, then z.
        gates: projection to the logits of beta, then those of the decay, one each per value head.
        first_state_index: index in ``StepContext.states`` of the convolution's state; the delta
            rule's state is at the next index.
    """

    qkvz: Linear
    gates: Linear
    conv: CausalConv
    delta: GatedDelta
    norm: GatedNorm
    out: Linear
    conv_channels: int
    first_state_index: int

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        qkvz, rows = self.qkvz(x), step.output_tokens
        z = qkvz[:, self.conv_channels :]
        mixed = step.run_eager_op(
            self.run_recurrence, z.shape[1], qkvz[:, : self.conv_channels], self.gates(x)
        )
        if rows is not None:
            if not len(rows):
                return x[:0]
            mixed, z = mixed[rows], z[rows]
        return self.out(self.norm(mixed, z))

    def run_recurrence(self, step: StepContext, qkv: Tensor, gates: Tensor) -> Tensor:
        inputs, state = step.states[self.first_state_index : self.first_state_index + 2]
        qkv = self.conv(qkv, inputs, step.state_rows)
        return self.delta(qkv, gates, state, step.state_rows)


def linear_attention_state_specs(config: LinearAttentionConfig) -> list[StateSpec]:
    """Specs of a layer's recurrent states: the convolution's, then the delta rule's."""
    matrix = (config.num_value_heads, config.key_dim, config.value_dim)
    return [
        StateSpec((config.conv_width - 1, config.conv_channels)),
        StateSpec(matrix, torch.float32),
    ]


def build_linear_attention(
    scope: WeightScope, config: LinearAttentionConfig, first_state_index: int
) -> GatedDeltaMixer:
    """Build a layer's mixer, whose recurrent states begin at index ``first_state_index``."""
    ops, hidden, eps = scope.ops, scope.model.hidden_size, scope.model.rms_norm_eps
    heads, values, channels = config.num_value_heads, config.total_value_dim, config.conv_channels
    if config.grouped_by_key_head:
        qkvz, gates = {"in_proj_qkvz": channels + values}, {"in_proj_ba": 2 * heads}
    else:
        qkvz = {"in_proj_qkv": channels, "in_proj_z": values}
        gates = {"in_proj_b": heads, "in_proj_a": heads}
    order, gates_order = projection_row_order(config) or (None, None)
    return GatedDeltaMixer(
        qkvz=scope.linear("qkvz", qkvz.items(), hidden, row_order=order),
        # Gates are never quantised, because the decay is exponential in them.
        gates=scope.linear(
            "gates", gates.items(), hidden, row_order=gates_order, keep_unquantised=True
        ),
        conv=ops.causal_conv(
            scope.tensor("conv", "conv1d", channels, 1, config.conv_width).squeeze(1)
        ),
        delta=ops.gated_delta(
            config,
            DecayParameters(
                scope.float32_vector("dt_bias", heads), scope.float32_vector("A_log", heads)
            ),
        ),
        norm=ops.gated_norm(scope.tensor("gated_norm", "norm", config.value_dim), eps),
        out=scope.linear("out", (("out_proj", hidden),), values),
        conv_channels=channels,
        first_state_index=first_state_index,
    )


def projection_row_order(config: LinearAttentionConfig) -> tuple[Tensor, Tensor] | None:
    """Row indices, int64, that bring a checkpoint's ``qkvz`` and ``gates`` into the mixer's order.

    None if the checkpoint is in that order already.
    """
    if not config.grouped_by_key_head:
        return None
    group = config.num_value_heads // config.num_key_heads
    wide = group * config.value_dim
    return (
        _deinterleaved_row_order(
            config.num_key_heads, (config.key_dim, config.key_dim, wide, wide)
        ),
        _deinterleaved_row_order(config.num_key_heads, (group, group)),
    )


def _deinterleaved_row_order(num_groups: int, part_sizes: tuple[int, ...]) -> Tensor:
    """Row order that puts the first parts of all groups first, then all second parts, and so on."""
    rows = torch.arange(num_groups * sum(part_sizes), device="cpu").view(num_groups, -1)
    return torch.cat([part.flatten() for part in rows.split(part_sizes, 1)])
