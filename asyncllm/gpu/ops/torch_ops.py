"""TorchOps: the op set in plain torch, the base of the others and their reference.

Tiny models are bound by the number of ops, not by arithmetic, so each op here is written
with as few torch calls as it takes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.errors import ModelLoadError
from asyncllm.gpu.batch.decode_inputs import DecodeInputs, SamplingTensors
from asyncllm.gpu.ops.base import AttentionShape, Embedding, Linear, RMSNorm, RopeAndCache
from asyncllm.gpu.ops.gumbel import gumbel_sample
from asyncllm.gpu.ops.linear_weights import LinearWeights, QuantScheme
from asyncllm.gpu.ops.logits import process_logits, top_logprobs
from asyncllm.gpu.ops.recorder import Recorder


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


class TorchRMSNorm:
    """Norm in float32, rounded to the model's dtype before the weight, as in Llama."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.share = 1.0 / weight.shape[-1]
        self.eps = torch.full((1,), eps, dtype=torch.float32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps, norm, norm, value=self.share).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(self.weight)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual.add_(x)
        return self(residual), residual


class TorchRopeAndCache:
    """Rotates the halves of each head (GPT-NeoX order) in place in ``qkv``.

    ``rotate_half(x) * sin`` is a roll by half a head times a sine whose first half is
    negated, so that q and k are rotated together in three ops.
    """

    def __init__(
        self, shape: AttentionShape, q_norm: Tensor | None, k_norm: Tensor | None, eps: float
    ) -> None:
        self.shape = shape
        self.norm: TorchRMSNorm | None = None
        if q_norm is not None and k_norm is not None:
            weight = torch.cat(
                (q_norm.expand(shape.num_heads, -1), k_norm.expand(shape.num_kv_heads, -1))
            )
            self.norm = TorchRMSNorm(weight, eps)

    def __call__(
        self, qkv: Tensor, rotary: tuple[Tensor, Tensor], cache: Tensor, slot_mapping: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``RopeAndCache``; ``rotary`` is the cosine and the sine of each token's angles,
        ``[T, 1, D]``, the sine negated in its first half."""
        shape, (cos, sin) = self.shape, rotary
        num_q, num_k = shape.num_heads, shape.num_kv_heads
        heads = qkv.view(qkv.shape[0], num_q + 2 * num_k, shape.head_dim)
        qk = heads[:, : num_q + num_k]
        source = qk if self.norm is None else self.norm(qk)
        rolled = source.roll(shape.head_dim // 2, -1)
        torch.mul(source, cos, out=qk)
        qk.addcmul_(rolled, sin)
        write_kv(cache, slot_mapping, heads[:, num_q:])
        return heads[:, :num_q], heads[:, num_q : num_q + num_k], heads[:, num_q + num_k :]


def write_kv(cache: Tensor, slot_mapping: Tensor, kv: Tensor) -> None:
    """Writes ``kv [T, 2 * Hk, D]``, keys before values, to its slots in ``cache``."""
    num_kv_heads, head_dim = cache.shape[-2:]
    pair = kv.view(kv.shape[0], 2, num_kv_heads, head_dim).transpose(0, 1)
    cache.view(2, -1, num_kv_heads, head_dim).index_copy_(1, slot_mapping, pair)


class TorchOps:
    """Ops of the decoder in plain torch, on any device. A subclass replaces those that its
    device has better ones for; attention comes from a backend of its own."""

    name = "torch"
    schemes: ClassVar[frozenset[QuantScheme]] = frozenset({"plain"})
    """Of the weights that its linear layers take."""
    packs_linear = False
    """Whether linear layers copy all of their weights, so that these can be lent to it."""
    linear_bytes = 0
    """Of the weights of all linear layers that were made, which a step reads."""

    def recorder(self) -> Recorder | None:
        """What takes a step down as a program of the op set's own; None where it has none."""
        return None

    def linear(self, weights: LinearWeights) -> Linear:
        """A linear layer that takes over ``weights``: unless they are shared, the caller drops
        its references, so that a packed copy replaces them.

        Raises:
            ModelLoadError: a scheme that the op set cannot compute with.
        """
        if weights.scheme not in self.schemes:
            raise ModelLoadError(
                f"weights of scheme {weights.scheme!r}: the op set {self.name!r} takes "
                f"{' and '.join(map(repr, sorted(self.schemes)))} only"
            )
        scales = 0 if weights.scales is None else weights.scales.nbytes
        self.linear_bytes += weights.values.nbytes + scales
        return self.make_linear(weights)

    def make_linear(self, weights: LinearWeights) -> Linear:
        """The layer of weights that are of one of ``schemes``."""
        return TorchLinear(weights)

    def embedding(self, values: Tensor) -> Embedding:
        """The rows of ``values [vocab_size, H]`` by token id."""
        return TorchEmbedding(values)

    def tied_embedding(
        self, weights: LinearWeights, dtype: torch.dtype
    ) -> tuple[Embedding, Linear]:
        """The embedding and the output head that share ``weights``, held once.

        Args:
            dtype: of the embedding.
        """
        shared = replace(weights, shared=True)
        return self.embedding(weights.values), self.linear(shared)

    def read(self, memory: Tensor) -> int:
        """The sum of ``memory [n]`` int64 modulo 2**64, at the rate at which linear layers can read
        their weights."""
        return int(memory.sum())

    def rms_norm(self, weight: Tensor, eps: float) -> RMSNorm:
        return TorchRMSNorm(weight, eps)

    def rope_and_cache(
        self, shape: AttentionShape, q_norm: Tensor | None, k_norm: Tensor | None, eps: float
    ) -> RopeAndCache:
        return TorchRopeAndCache(shape, q_norm, k_norm, eps)

    def rotary(self, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rotation of a step's positions for ``rope_and_cache``, shared by all layers of one
        RoPE table.

        Args:
            table: ``[max_positions, D]``: cosines, then sines, of half a head each.
            positions: ``[T]`` int64.
        """
        cos, sin = table[positions].unsqueeze(1).chunk(2, -1)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    @staticmethod
    def silu_mul(gate_up: Tensor) -> Tensor:
        """``[T, 2 * I] -> [T, I]``: SiLU of the first half times the second."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def decode_inputs(rows: DecodeInputs) -> None:
        """Changes the table, and fills ``token_ids``, ``seq_lens`` and ``slot_mapping`` from the
        rest of ``rows``."""
        changed, new_blocks = rows.table_changes
        rows.block_table.view(-1)[changed] = new_blocks
        lines, padded = rows.state_indices(), rows.req_indices < 0
        tokens = torch.where(
            rows.host_token_ids < 0, rows.last_sampled_tokens[lines], rows.host_token_ids
        )
        columns = rows.positions // rows.block_size
        blocks = rows.block_table[lines, columns].long()
        slots = blocks * rows.block_size + rows.positions % rows.block_size
        rows.token_ids.copy_(tokens.masked_fill(padded, 0))
        rows.seq_lens.copy_((rows.positions + 1).masked_fill(padded, 0))
        rows.slot_mapping.copy_(slots.masked_fill(padded, 0))

    process_logits = staticmethod(process_logits)
    top_logprobs = staticmethod(top_logprobs)

    @staticmethod
    def sample(
        logits: Tensor,
        sampling: SamplingTensors,
        req_indices: Tensor,
        positions: Tensor,
        last_sampled_tokens: Tensor,
        out: Tensor,
    ) -> None:
        """Samples one token per row: the function of ``gumbel.gumbel_sample``.

        Args:
            logits: ``[S, vocab_size]``, not changed.
            req_indices: ``[S]`` int64, each row's line in ``sampling``; -1 for a padded row.
            positions: ``[S]`` int64, of the token before the one that is sampled.
            last_sampled_tokens: ``[N + 1]`` int64; the token is written to the row's line, as 0
                where it is -1.
            out: ``[S]`` int64, written: -1 for a padded row, and for one that has NaN or
                infinity; NO_TOKEN_LEFT for one whose logits are all minus infinity.
        """
        padded = req_indices < 0
        lines = torch.where(padded, len(last_sampled_tokens) - 1, req_indices)
        tokens = gumbel_sample(
            logits,
            sampling.states[lines],
            positions + 1,
            sampling.temperature[lines],
            sampling.top_k[lines],
            sampling.top_p[lines],
            sampling.min_p[lines],
        )
        last_sampled_tokens.index_copy_(0, lines, tokens.masked_fill(padded, 0).clamp_(min=0))
        out.copy_(tokens.masked_fill(padded, -1))
