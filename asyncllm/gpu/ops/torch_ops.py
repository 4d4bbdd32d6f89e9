"""TorchOps: the op set in plain torch, base class and reference of all op sets.

Tiny models are bound by the overhead of torch calls, not by arithmetic. So each op is written
with as few torch calls as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.checkpoint.experts_config import ActivationConfig, RoutingConfig
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.batch.sampling_inputs import RowsToSample
from asyncllm.gpu.batch.sampling_table import SAMPLE_OP_PARAMS
from asyncllm.gpu.batch.state_rows import StateRows
from asyncllm.gpu.batch.step_inputs import KVGroupInputs, StepInputs
from asyncllm.gpu.ops.base import AttentionShape, Embedding, Linear, RMSNorm, Rope, RopeAndCache
from asyncllm.gpu.ops.causal_conv import CausalConv, TorchCausalConv
from asyncllm.gpu.ops.experts import Experts, ExpertsWeights, GroupedExperts
from asyncllm.gpu.ops.gated_delta import GatedDelta, TorchGatedDelta
from asyncllm.gpu.ops.gated_norm import GatedNorm, TorchGatedNorm
from asyncllm.gpu.ops.gumbel import gumbel_sample
from asyncllm.gpu.ops.linear_weights import LinearWeights, QuantScheme, WeightSpec
from asyncllm.gpu.ops.logits import process_logits, top_logprobs
from asyncllm.gpu.ops.quantise import WeightQuantisers
from asyncllm.gpu.ops.recorder import Recorder
from asyncllm.gpu.ops.routing import RouterWeights, Routing, TorchRouting
from asyncllm.gpu.ops.torch_norms import TorchResidualAdd, make_torch_norm
from asyncllm.gpu.ops.torch_rope import TorchRope, TorchRopeAndCache


class TorchLinear:
    """Linear layer with unquantised weights ``[out, in]``."""

    def __init__(self, weights: LinearWeights) -> None:
        self.weight = weights.values
        self.bias = weights.bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class TorchEmbedding:
    """Embedding that multiplies rows of an unquantised table by ``multiplier``."""

    def __init__(self, values: Tensor, multiplier: float) -> None:
        self.values, self.multiplier = values, multiplier
        self.dtype, self.device, self.shape = values.dtype, values.device, values.shape

    def __call__(self, token_ids: Tensor) -> Tensor:
        rows = F.embedding(token_ids, self.values)
        return rows if self.multiplier == 1.0 else rows.mul_(self.multiplier)


class TorchOps:
    """The op set of the decoder in plain torch, on any device.

    A subclass replaces the ops for which it has faster ones. Attention is no part of an op set: an
    attention backend makes it.
    """

    name = "torch"
    schemes: ClassVar[frozenset[QuantScheme]] = frozenset({"plain"})
    """Quantisation schemes that the linear layers accept, at least for some weights."""
    quantisers: Mapping[str, WeightQuantisers] = MappingProxyType({})
    """Functions that quantise plain weights, by the value of ``EngineConfig.quantization``."""
    accepted_weights_text: ClassVar[str] = "'plain' only"
    """Phrase for error messages: the weights that ``accepts_weights`` accepts."""
    packs_linear = False
    """Whether linear layers copy their weights and keep no reference to the originals."""
    linear_bytes = 0
    """Weight bytes that a step of one token reads in the linear layers made so far."""

    def prepare_current_thread(self) -> None:
        """Prepares the calling thread to run steps."""

    def recorder(self) -> Recorder | None:
        """Makes a Recorder of steps; None if the op set's ops cannot be recorded."""
        return None

    def linear(self, weights: LinearWeights) -> Linear:
        """Makes a linear layer.

        The caller then drops its references to weights that are not shared, so that a packed copy
        replaces them in memory.

        Raises:
            ModelLoadError: the op set cannot compute with weights of this form.
        """
        self._check_and_count_weights(weights)
        return self.make_linear(weights)

    def _check_and_count_weights(self, weights: LinearWeights) -> None:
        """Checks the weights' specs, and adds their bytes to ``linear_bytes``.

        Raises:
            ModelLoadError: the op set cannot compute with weights of this form.
        """
        for part in weights.single_scheme_parts:
            if not self.accepts_weights(part.spec):
                raise ModelLoadError(
                    f"weights of scheme {part.scheme!r} with scale_block={part.scale_block}: the "
                    f"op set {self.name!r} takes {self.accepted_weights_text}"
                )
        self.linear_bytes += weights.num_bytes

    def accepts_weights(self, spec: WeightSpec) -> bool:
        """Whether ``linear`` accepts weights of this spec."""
        return spec.scheme == "plain"

    def make_linear(self, weights: LinearWeights) -> Linear:
        """Makes a linear layer from weights that ``accepts_weights`` accepts."""
        return TorchLinear(weights)

    def routing(self, config: RoutingConfig, weights: RouterWeights) -> Routing:
        """Makes the op that chooses each token's experts; the router's weights are unquantised."""
        return TorchRouting(config, weights)

    def experts(self, weights: ExpertsWeights, config: ActivationConfig, top_k: int) -> Experts:
        """Makes the experts of a layer; the caller drops its references to ``weights``.

        Args:
            top_k: number of experts per token.

        Raises:
            ModelLoadError: the op set cannot compute with weights of this form.
        """
        before = self.linear_bytes
        for layer in (weights.gate_up, weights.down):
            self._check_and_count_weights(layer)
        # A step of one token reads the weights of its top_k experts only.
        self.linear_bytes = before + (self.linear_bytes - before) * top_k // weights.num_experts
        return self.make_experts(weights, config)

    def make_experts(self, weights: ExpertsWeights, config: ActivationConfig) -> Experts:
        """Makes the experts from weights that ``accepts_weights`` accepts."""
        return GroupedExperts(weights, config, self.gelu_mul if config.gelu else self.silu_mul)

    def expert_kernel_switch_points(self, num_experts: int, top_k: int) -> tuple[int, ...]:
        """Numbers of tokens per step at which the experts switch to other kernels.

        Warm-up runs a step of each number, because a kernel is compiled at its first launch.
        """
        return ()

    def embedding(self, values: Tensor, multiplier: float = 1.0) -> Embedding:
        """Makes an embedding that multiplies rows of ``values`` by ``multiplier``.

        Args:
            values: ``[vocab_size, H]``.
        """
        return TorchEmbedding(values, multiplier)

    def packed_embedding(
        self, weights: LinearWeights, dtype: torch.dtype, multiplier: float = 1.0
    ) -> Embedding:
        """Makes an embedding from quantised weights that ``accepts_weights`` accepts.

        Args:
            dtype: dtype of the embedding.
            multiplier: factor on the embedding.

        Raises:
            ModelLoadError: the op set gathers no rows of quantised weights.
        """
        raise ModelLoadError(
            f"an embedding of scheme {weights.scheme!r}: the op set {self.name!r} takes 'plain'"
        )

    def tied_embedding(
        self, weights: LinearWeights, dtype: torch.dtype, multiplier: float = 1.0
    ) -> tuple[Embedding, Linear]:
        """Makes an embedding and an output head on the same ``weights``.

        Args:
            dtype: dtype of the embedding.
            multiplier: factor on the embedding only.
        """
        shared = replace(weights, is_tied=True)
        return self.embedding(weights.values, multiplier), self.linear(shared)

    def sum_int64(self, memory: Tensor) -> int:
        """Sums ``memory [n]`` int64 modulo 2**64; used to measure the rate at which ops read
        memory."""
        return int(memory.sum())

    # Functions that make a layer's ops. The class of an op documents the arguments.
    rms_norm: Callable[..., RMSNorm] = staticmethod(make_torch_norm)
    residual_add: Callable[..., RMSNorm] = staticmethod(TorchResidualAdd)
    rope: Callable[[AttentionShape, Tensor | None, float], Rope] = staticmethod(TorchRope)
    rope_and_cache: Callable[..., RopeAndCache] = staticmethod(TorchRopeAndCache)
    causal_conv: Callable[[Tensor], CausalConv] = staticmethod(TorchCausalConv)
    gated_delta: Callable[..., GatedDelta] = staticmethod(TorchGatedDelta)
    gated_norm: Callable[[Tensor, float], GatedNorm] = staticmethod(TorchGatedNorm)

    def rotary(self, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Makes the argument ``rotary`` of ``Rope``, once per step for all layers with this table.

        Args:
            table: ``[max_positions, D]``, the cosines and then the sines of D / 2 angles; or
                ``[max_positions, 2, D]``, with separate rows for queries and keys.
            positions: ``[T]`` int64.
        """
        rows = table[positions]
        cos, sin = (rows.unsqueeze(1) if rows.dim() == 2 else rows).chunk(2, -1)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    @staticmethod
    def state_rows(step: StepInputs) -> Any:
        """Returns the state slots and token ranges that are the ``rows`` of all recurrent ops."""
        return StateRows.of(step)

    @staticmethod
    def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
        """Multiplies ``x [T, N]`` by ``sigmoid(gate)``, in the dtype of ``gate``."""
        return gate.sigmoid().mul_(x)

    @staticmethod
    def silu_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
        """``silu(gate) * up``, ``[T, I]``.

        Args:
            gate: ``[T, I]``; ``[T, 2 * I]`` if its second half is ``up``.
            up: ``[T, I]``; None for the second half of ``gate``.
        """
        gate, up = gate.chunk(2, -1) if up is None else (gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def gelu_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
        """``silu_mul`` with GELU (tanh approximation) in place of SiLU."""
        gate, up = gate.chunk(2, -1) if up is None else (gate, up)
        return F.gelu(gate, approximate="tanh").mul_(up)

    @staticmethod
    def softcap(x: Tensor, cap: float) -> Tensor:
        """``cap * tanh(x / cap)`` of ``x [S, N]``, in float32 and in place."""
        return x.copy_(torch.tanh(x.float() / cap).mul_(cap))

    @staticmethod
    def fill_decode_inputs(step: StepInputs, group: KVGroupInputs) -> None:
        """Computes the inputs of decode rows on the device.

        It applies ``group.table_changes`` to the group's block table, then fills ``token_ids``,
        ``seq_lens`` and the group's ``slot_mapping``. If a step has no rows, it only changes the
        block table.
        """
        assert group.table_changes is not None
        changed, new_blocks = group.table_changes
        group.block_table.view(-1)[changed] = new_blocks
        if not step.num_rows:
            return
        assert step.previous_tokens is not None
        assert step.last_sampled_tokens is not None
        padded, size = step.req_indices < 0, group.block_size
        table_rows = step.nonnegative_req_indices()
        sampled = step.last_sampled_tokens[table_rows]
        tokens = torch.where(step.previous_tokens < 0, sampled, step.previous_tokens)
        blocks = group.block_table[table_rows, step.positions // size].long()
        slots = blocks * size + step.positions % size
        step.token_ids.copy_(tokens.masked_fill(padded, 0))
        step.seq_lens.copy_((step.positions + 1).masked_fill(padded, 0))
        group.slot_mapping.copy_(slots.masked_fill(padded, 0))

    process_logits = staticmethod(process_logits)
    top_logprobs = staticmethod(top_logprobs)

    @staticmethod
    def sample(
        logits: Tensor, sampling_tensors: Mapping[str, Tensor], rows: RowsToSample, out: Tensor
    ) -> None:
        """Samples one token per row, as ``gumbel.gumbel_sample`` does.

        Args:
            logits: ``[S, vocab_size]``, not changed.
            sampling_tensors: tensors named in SAMPLE_OP_PARAMS, ``[N + 1]`` each.
            out: ``[S]`` int64, written: the sampled token; -1 for a padded row or one with NaN or
                infinity; NO_TOKEN_LEFT for a row whose logits are all minus infinity.
        """
        req_indices, positions, last_sampled_tokens = rows
        padded = req_indices < 0
        table_rows = torch.where(padded, len(last_sampled_tokens) - 1, req_indices)
        row_sampling = {name: sampling_tensors[name][table_rows] for name in SAMPLE_OP_PARAMS}
        tokens = gumbel_sample(logits, positions=positions + 1, **row_sampling)
        last_sampled_tokens.index_copy_(0, table_rows, tokens.masked_fill(padded, 0).clamp_(min=0))
        out.copy_(tokens.masked_fill(padded, -1))
