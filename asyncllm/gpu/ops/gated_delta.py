"""GatedDelta: the gated delta rule of linear attention, a recurrence on a matrix per head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.gpu.batch.state_rows import StateRows, span_state

CHUNK_TOKENS = 64
"""Tokens per chunk. A chunk of any size takes the same number of matrix products."""

NORM_EPS = 1e-6
"""Epsilon in the normalisation of queries and keys to length 1."""


@dataclass(frozen=True, slots=True, eq=False)
class DecayParameters:
    """Parameters of the decay ``g = -exp(log_rate) * softplus(a + dt_bias)``.

    Attributes:
        dt_bias: ``[num_value_heads]`` float32, added to the logit a.
        log_rate: ``[num_value_heads]`` float32, logarithm of the rate (``A_log`` in checkpoints).
    """

    dt_bias: Tensor
    log_rate: Tensor


class GatedDelta(Protocol):
    """The gated delta rule (Yang et al., 2025), in float32.

    For each token and value head the state becomes ``S = exp(g) S + k (v - exp(g) S^T k)^T beta``
    and the output is ``S^T q``. Here q and k are normalised to length 1, and q is then divided by
    ``sqrt(key_dim)``; ``beta = sigmoid(b)``; the decay g is that of ``DecayParameters``.
    """

    def __call__(self, qkv: Tensor, gates: Tensor, state: Tensor, rows: Any) -> Tensor:
        """Returns ``[T, num_value_heads * value_dim]``.

        Args:
            qkv: ``[T, conv_channels]``, all heads of q, of k, then of v.
            gates: ``[T, 2 * num_value_heads]``: b, then a.
            state: S, ``[num_slots, num_value_heads, key_dim, value_dim]`` float32, updated in
                place. A row at position 0 starts from zeros.
            rows: result of ``TorchOps.state_rows``, shared by all layers of a step.
        """
        ...


def _compute_recurrence_inputs(
    shape: LinearAttentionConfig, decay_parameters: DecayParameters, qkv: Tensor, gates: Tensor
) -> tuple[Tensor, ...]:
    """Computes the inputs of the gated delta rule for T tokens, in float32.

    Returns:
        q and k ``[T, num_value_heads, key_dim]``, v ``[T, num_value_heads, value_dim]``, beta and
        the decay g ``[T, num_value_heads]``.
    """
    group = shape.num_value_heads // shape.num_key_heads
    wide, keys = qkv.float(), shape.total_key_dim
    q, k = (
        _normalise_rows(part.unflatten(1, (-1, shape.key_dim))).repeat_interleave(group, 1)
        for part in (wide[:, :keys], wide[:, keys : 2 * keys])
    )
    v = wide[:, 2 * keys :].unflatten(1, (-1, shape.value_dim))
    b, a = gates.float().chunk(2, 1)
    decay = -decay_parameters.log_rate.exp() * F.softplus(a + decay_parameters.dt_bias)
    return q * shape.key_dim**-0.5, k, v, b.sigmoid(), decay


def _normalise_rows(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


class TorchGatedDelta:
    """``GatedDelta`` in plain torch: token by token for decode rows, in chunks for longer rows.

    On a CPU decode rows are computed one at a time (``StateRows.batch_spans``): a single state fits
    the CPU's cache and is updated in place. Every op on a batch of gathered states would read and
    write main memory.
    """

    def __init__(self, shape: LinearAttentionConfig, decay_parameters: DecayParameters) -> None:
        self.shape, self.decay_parameters = shape, decay_parameters

    def __call__(self, qkv: Tensor, gates: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        inputs = _compute_recurrence_inputs(self.shape, self.decay_parameters, qkv, gates)
        out = torch.empty_like(inputs[2], memory_format=torch.contiguous_format)
        if rows.slots is not None and not rows.batch_spans:
            count, states = len(rows.slots), rows.gather(state)
            out[:count] = _compute_token(states, *(part[:count] for part in inputs))
            state.index_copy_(0, rows.slots, states)
        for span in (*rows.batch_spans, *rows.spans):
            states = span_state(state, span)
            for start in range(span.start, span.end, CHUNK_TOKENS):
                end = min(start + CHUNK_TOKENS, span.end)
                step = _compute_token if end - start == 1 else _compute_chunk
                out[start:end] = step(states, *(part[start:end] for part in inputs))
        return out.flatten(1).to(qkv.dtype)


def _compute_token(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor
) -> Tensor:
    """Computes one token of each of D sequences, and updates their states.

    ``state`` is ``[D, heads, key_dim, value_dim]``, the other arguments are ``[D, heads, ...]``.
    """
    past = decay.exp().unsqueeze(-1)
    # One pass over the old state S gives S^T k and S^T q. The new state need not be read for the
    # output, which is exp(g) S^T q + (q . k) change.
    found_k, found_q = (torch.stack((k, q), -2) @ state).unbind(-2)
    change = (v - found_k * past) * beta.unsqueeze(-1)
    state.mul_(past.unsqueeze(-1)).addcmul_(k.unsqueeze(-1), change.unsqueeze(-2))
    return found_q * past + (q * k).sum(-1, keepdim=True) * change


def _compute_chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor
) -> Tensor:
    """Computes n tokens of one sequence, and updates its state.

    ``state`` is ``[1, heads, key_dim, value_dim]``, the other arguments are ``[n, heads, ...]``. A
    token's change of the state depends on the changes of the tokens before it in the chunk, so that
    the changes solve a triangular system (the WY form of Yang et al., 2025, section 3.3).
    """
    matrices = state[0]
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))
    beta, total = beta.T.unsqueeze(-1), decay.T.cumsum(1)
    between = total.unsqueeze(2) - total.unsqueeze(1)
    later = torch.ones_like(between[0], dtype=torch.bool).triu_(1)
    # Mask later tokens before the exponential, which would overflow for them.
    between = between.masked_fill(later, -torch.inf).exp()
    past = total.exp().unsqueeze(-1)
    targets = (v - (k * past) @ matrices) * beta
    system = (beta * k) @ k.mT * between
    changes = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
    out = (q * past) @ matrices + (q @ k.mT * between) @ changes
    later_decay = (total[:, -1:] - total).exp().unsqueeze(-1)
    matrices.mul_(past[:, -1:]).add_((k * later_decay).mT @ changes)
    return out.transpose(0, 1)
