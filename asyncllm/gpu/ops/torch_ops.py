"""TorchOps: the op set in plain torch, the base of the others and their reference.

Tiny models are bound by the number of ops, not by arithmetic, so each op here is written
with as few torch calls as it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.checkpoint.experts_config import ActivationConfig, RoutingConfig
from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.batch.sampling_table import DRAW
from asyncllm.gpu.batch.state_rows import StateRows
from asyncllm.gpu.batch.step_inputs import GroupInputs, StepInputs
from asyncllm.gpu.ops.base import (
    AttentionShape,
    Embedding,
    Linear,
    RMSNorm,
    Rope,
    RopeAndCache,
)
from asyncllm.gpu.ops.causal_conv import CausalConv, TorchCausalConv
from asyncllm.gpu.ops.experts import Experts, ExpertsWeights, GroupedExperts
from asyncllm.gpu.ops.gated_delta import DeltaBiases, GatedDelta, TorchGatedDelta
from asyncllm.gpu.ops.gated_norm import GatedNorm, TorchGatedNorm
from asyncllm.gpu.ops.gumbel import gumbel_sample
from asyncllm.gpu.ops.linear_weights import LinearWeights, QuantScheme, WeightForm
from asyncllm.gpu.ops.logits import process_logits, top_logprobs
from asyncllm.gpu.ops.quantise import Conversion
from asyncllm.gpu.ops.recorder import Recorder
from asyncllm.gpu.ops.routing import RouterWeights, Routing, TorchRouting
from asyncllm.gpu.ops.torch_norms import TorchResidualAdd, torch_norm
from asyncllm.gpu.ops.torch_rope import TorchRope, TorchRopeAndCache


class TorchLinear:
    """A linear layer on plain values ``[out, in]``."""

    def __init__(self, weights: LinearWeights) -> None:
        self.weight = weights.values
        self.bias = weights.bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class TorchEmbedding:
    """A table of plain values ``[vocab_size, H]``."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.dtype, self.device, self.shape = values.dtype, values.device, values.shape

    def __call__(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.values)


class TorchScaledEmbedding(TorchEmbedding):
    """Rows times ``multiplier``."""

    def __init__(self, values: Tensor, multiplier: float) -> None:
        super().__init__(values)
        self.multiplier = multiplier

    def __call__(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.values).mul_(self.multiplier)


class TorchOps:
    """Ops of the decoder in plain torch, on any device. A subclass replaces those that its
    device has better ones for; attention comes from a backend of its own."""

    name = "torch"
    schemes: ClassVar[frozenset[QuantScheme]] = frozenset({"plain"})
    """Of the weights that its linear layers take, in some form."""
    conversions: Mapping[str, Conversion] = MappingProxyType({})
    """By ``EngineConfig.quantization``, what makes such weights of plain ones."""
    accepted_weights: ClassVar[str] = "'plain' only"
    """The forms that ``takes`` accepts, for an error."""
    packs_linear = False
    """Whether linear layers copy all of their weights, so that these can be lent to it."""
    linear_bytes = 0
    """Of the weights of all linear layers that were made, which a step reads."""

    def enter_thread(self) -> None:
        """Called on each thread that is going to run steps."""

    def recorder(self) -> Recorder | None:
        """Recorder of a step as a program of the op set's own; None where it has none."""
        return None

    def linear(self, weights: LinearWeights) -> Linear:
        """A linear layer that takes over ``weights``: unless they are shared, the caller drops
        its references, so that a packed copy replaces them.

        Raises:
            ModelLoadError: a scheme that the op set cannot compute with.
        """
        self._take(weights)
        return self.make_linear(weights)

    def _take(self, weights: LinearWeights) -> None:
        """Counts weights of a form that it can compute with."""
        if not self.takes(weights.form):
            raise ModelLoadError(
                f"weights of scheme {weights.scheme!r} with scale_block={weights.scale_block}: the "
                f"op set {self.name!r} takes {self.accepted_weights}"
            )
        self.linear_bytes += weights.num_bytes

    def takes(self, form: WeightForm) -> bool:
        """Whether ``linear`` computes with weights of that form."""
        return form.scheme == "plain"

    def make_linear(self, weights: LinearWeights) -> Linear:
        """The layer of weights that are of one of ``schemes``."""
        return TorchLinear(weights)

    def routing(self, config: RoutingConfig, weights: RouterWeights) -> Routing:
        """The choice of each token's experts, from weights of scheme "plain"."""
        return TorchRouting(config, weights)

    def experts(self, weights: ExpertsWeights, config: ActivationConfig, top_k: int) -> Experts:
        """The experts of a layer, which take over ``weights`` as linear layers do.

        Args:
            top_k: experts of a token.

        Raises:
            ModelLoadError: a scheme that the op set cannot compute with.
        """
        before = self.linear_bytes
        for layer in (weights.gate_up, weights.down):
            self._take(layer)
        # A step of one token reads those of its experts.
        self.linear_bytes = before + (self.linear_bytes - before) * top_k // weights.num_experts
        return self.make_experts(weights, config)

    def make_experts(self, weights: ExpertsWeights, config: ActivationConfig) -> Experts:
        """The experts of weights that are of one of ``schemes``."""
        return GroupedExperts(weights, config, self.gelu_mul if config.gelu else self.silu_mul)

    def expert_tokens(self, num_experts: int, top_k: int) -> tuple[int, ...]:
        """Numbers of tokens in a step from which on experts have kernels that smaller steps do
        not, and that are compiled at their first launch."""
        return ()

    def embedding(self, values: Tensor, multiplier: float = 1.0) -> Embedding:
        """The rows of ``values [vocab_size, H]`` by token id, times ``multiplier``."""
        return (
            TorchEmbedding(values)
            if multiplier == 1.0
            else TorchScaledEmbedding(values, multiplier)
        )

    def tied_embedding(
        self, weights: LinearWeights, dtype: torch.dtype, multiplier: float = 1.0
    ) -> tuple[Embedding, Linear]:
        """The embedding and the output head that share ``weights``, held once.

        Args:
            dtype: of the embedding.
            multiplier: of the embedding alone.
        """
        shared = replace(weights, shared=True)
        return self.embedding(weights.values, multiplier), self.linear(shared)

    def read(self, memory: Tensor) -> int:
        """The sum of ``memory [n]`` int64 modulo 2**64, at the rate at which linear layers can read
        their weights."""
        return int(memory.sum())

    def rms_norm(
        self, weight: Tensor, eps: float, multiplier: float = 1.0, scale: float = 1.0
    ) -> RMSNorm:
        """A norm whose weight is of the model's dtype, and multiplied in that; or in float32, and
        then rounded once, behind it. Called with ``[T, parts, H]`` it norms each part.

        Args:
            multiplier: of ``x`` in ``add``.
            scale: of the sum in ``add``, behind its rounding.
        """
        return torch_norm(weight, eps, multiplier, scale)

    def residual_add(self, multiplier: float = 1.0, scale: float = 1.0) -> RMSNorm:
        """In place of a norm where a block has none before it: in ``add`` the sum alone."""
        return TorchResidualAdd(multiplier, scale)

    def rope(self, shape: AttentionShape, norm: Tensor | None, eps: float) -> Rope:
        """See ``Rope``.

        Args:
            norm: ``[D]``, the weight of a norm by head.
        """
        return TorchRope(shape, norm, eps)

    def rope_and_cache(
        self,
        shape: AttentionShape,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        v_norm: Tensor | None = None,
    ) -> RopeAndCache:
        """See ``RopeAndCache``.

        Args:
            q_norm, k_norm: ``[D]``, weights of norms by head; or ``[Hq * D]`` and ``[Hk * D]``, of
                norms over all heads. They round as those of ``rms_norm``.
            v_norm: ``[D]``, the weight of a norm by head.
        """
        return TorchRopeAndCache(shape, q_norm, k_norm, eps, v_norm)

    def rotary(self, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rotation of a step's positions for ``rope_and_cache``, shared by all layers of one
        RoPE table.

        Args:
            table: ``[max_positions, D]``: cosines, then sines, of half a head each; or
                ``[max_positions, 2, D]``, those of queries before those of keys.
            positions: ``[T]`` int64.
        """
        rows = table[positions]
        cos, sin = (rows.unsqueeze(1) if rows.dim() == 2 else rows).chunk(2, -1)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def state_rows(self, step: StepInputs) -> Any:
        """A step's rows for ``causal_conv`` and ``gated_delta``, shared by all layers."""
        return StateRows.of(step)

    def causal_conv(self, weight: Tensor) -> CausalConv:
        """A depthwise convolution of weight ``[C, W]``, that of the oldest input first."""
        return TorchCausalConv(weight)

    def gated_delta(self, shape: LinearAttentionConfig, biases: DeltaBiases) -> GatedDelta:
        """The gated delta rule of a layer."""
        return TorchGatedDelta(shape, biases)

    def gated_norm(self, weight: Tensor, eps: float) -> GatedNorm:
        """The norm behind it, whose weight ``[D]`` is that of a head."""
        return TorchGatedNorm(torch_norm(weight, eps), len(weight))

    @staticmethod
    def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
        """``x [T, N]`` times the sigmoid of ``gate [T, N]``, which is rounded before."""
        return gate.sigmoid().mul_(x)

    @staticmethod
    def silu_mul(gate_up: Tensor, up: Tensor | None = None) -> Tensor:
        """``[T, 2 * I] -> [T, I]``: SiLU of the first half times the second; or ``[T, I]`` of the
        whole, times ``up [T, I]``."""
        gate, up = gate_up.chunk(2, -1) if up is None else (gate_up, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def gelu_mul(gate_up: Tensor, up: Tensor | None = None) -> Tensor:
        """As ``silu_mul``, with GELU by tanh."""
        gate, up = gate_up.chunk(2, -1) if up is None else (gate_up, up)
        return F.gelu(gate, approximate="tanh").mul_(up)

    @staticmethod
    def softcap(x: Tensor, cap: float) -> Tensor:
        """``cap * tanh(x / cap)`` of ``x [S, N]``, in float32 and in place."""
        return x.copy_(torch.tanh(x.float() / cap).mul_(cap))

    @staticmethod
    def decode_inputs(step: StepInputs, group: GroupInputs) -> None:
        """Derives the inputs of decode rows on the device: changes the group's table, and fills
        ``token_ids``, ``seq_lens`` and the group's ``slot_mapping``. Without rows it changes the
        table alone."""
        assert group.table_changes is not None
        changed, new_blocks = group.table_changes
        group.block_table.view(-1)[changed] = new_blocks
        if not step.num_rows:
            return
        assert step.previous_tokens is not None
        assert step.last_sampled_tokens is not None
        lines, padded, size = step.lines(), step.req_indices < 0, group.block_size
        sampled = step.last_sampled_tokens[lines]
        tokens = torch.where(step.previous_tokens < 0, sampled, step.previous_tokens)
        blocks = group.block_table[lines, step.positions // size].long()
        slots = blocks * size + step.positions % size
        step.token_ids.copy_(tokens.masked_fill(padded, 0))
        step.seq_lens.copy_((step.positions + 1).masked_fill(padded, 0))
        group.slot_mapping.copy_(slots.masked_fill(padded, 0))

    process_logits = staticmethod(process_logits)
    top_logprobs = staticmethod(top_logprobs)

    @staticmethod
    def sample(
        logits: Tensor,
        sampling: Mapping[str, Tensor],
        req_indices: Tensor,
        positions: Tensor,
        last_sampled_tokens: Tensor,
        out: Tensor,
    ) -> None:
        """Samples one token per row: the function of ``gumbel.gumbel_sample``.

        Args:
            logits: ``[S, vocab_size]``, not changed.
            sampling: the scalars of DRAW, ``[N + 1]`` each.
            req_indices: ``[S]`` int64, each row's line in ``sampling``; -1 for a padded row.
            positions: ``[S]`` int64, of the token before the one that is sampled.
            last_sampled_tokens: ``[N + 1]`` int64; the token is written to the row's line, as 0
                where it is -1.
            out: ``[S]`` int64, written: -1 for a padded row, and for one that has NaN or
                infinity; NO_TOKEN_LEFT for one whose logits are all minus infinity.
        """
        padded = req_indices < 0
        lines = torch.where(padded, len(last_sampled_tokens) - 1, req_indices)
        own = {name: sampling[name][lines] for name in DRAW}
        tokens = gumbel_sample(logits, positions=positions + 1, **own)
        last_sampled_tokens.index_copy_(0, lines, tokens.masked_fill(padded, 0).clamp_(min=0))
        out.copy_(tokens.masked_fill(padded, -1))
