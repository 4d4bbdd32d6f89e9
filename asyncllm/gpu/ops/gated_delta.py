"""GatedDelta: the gated delta rule, a recurrence over a matrix of each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.gpu.batch.state_rows import StateRows, span_state

CHUNK_TOKENS = 64
"""Tokens that one set of matrix products computes."""

NORM_EPS = 1e-6
"""Epsilon of the normalisation of queries and keys."""


@dataclass(frozen=True, slots=True, eq=False)
class DeltaBiases:
    """Parameters of the decay, ``[num_value_heads]`` float32 each.

    Attributes:
        dt_bias: added to the logit.
        log_rate: logarithm of the factor (``A_log``).
    """

    dt_bias: Tensor
    log_rate: Tensor


class GatedDelta(Protocol):
    """The gated delta rule (Yang et al., 2025), in float32.

    For each token and value head the state becomes ``S = exp(g) S + k (v - exp(g) S^T k)^T beta``
    and the output is ``S^T q``, with q and k of length 1, q divided by ``sqrt(key_dim)``,
    ``beta = sigmoid(b)`` and ``g = -exp(log_rate) softplus(a + dt_bias)``.
    """

    def __call__(self, qkv: Tensor, gates: Tensor, state: Tensor, rows: Any) -> Tensor:
        """Returns ``[T, num_value_heads * value_dim]``.

        Args:
            qkv: ``[T, conv_size]``, all heads of q, of k, then of v.
            gates: ``[T, 2 * num_value_heads]``: b, then a.
            state: S, ``[num_slots, num_value_heads, key_dim, value_dim]`` float32; written. A row
                at position 0 starts from zeros.
            rows: result of ``TorchOps.state_rows``, shared by all layers of a step.
        """
        ...


class _Inputs:
    """Inputs of the rule for T tokens, in float32.

    Attributes:
        q, k: ``[T, num_value_heads, key_dim]``.
        v: ``[T, num_value_heads, value_dim]``.
        beta, decay: ``[T, num_value_heads]``; ``decay`` is the logarithm g.
    """

    def __init__(
        self, shape: LinearAttentionConfig, biases: DeltaBiases, qkv: Tensor, gates: Tensor
    ) -> None:
        group = shape.num_value_heads // shape.num_key_heads
        wide, keys = qkv.float(), shape.key_size
        self.q, self.k = (
            _normalised(part.unflatten(1, (-1, shape.key_dim))).repeat_interleave(group, 1)
            for part in (wide[:, :keys], wide[:, keys : 2 * keys])
        )
        self.q = self.q * shape.key_dim**-0.5
        self.v = wide[:, 2 * keys :].unflatten(1, (-1, shape.value_dim))
        b, a = gates.float().chunk(2, 1)
        self.beta = b.sigmoid()
        self.decay = -biases.log_rate.exp() * F.softplus(a + biases.dt_bias)

    def tokens(self, start: int, end: int) -> tuple[Tensor, ...]:
        """q, k, v, beta and decay of tokens ``start`` to ``end - 1``."""
        parts = self.q, self.k, self.v, self.beta, self.decay
        return tuple(part[start:end] for part in parts)


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


class TorchGatedDelta:
    """The rule in plain torch: token by token in decode rows, elsewhere in chunks.

    On a CPU each row changes its state in place, and that state fits the cache. A batch of states,
    gathered and copied back, would pass through memory a dozen times at 16 rows.
    """

    def __init__(self, shape: LinearAttentionConfig, biases: DeltaBiases) -> None:
        self.shape, self.biases = shape, biases

    def __call__(self, qkv: Tensor, gates: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        shape, inputs = self.shape, _Inputs(self.shape, self.biases, qkv, gates)
        out = inputs.v.new_empty((len(qkv), shape.num_value_heads, shape.value_dim))
        if rows.slots is not None and not rows.batch_spans:
            count, held = len(rows.slots), rows.gather(state)
            out[:count] = _one_token(held, *inputs.tokens(0, count))
            state.index_copy_(0, rows.slots, held)
        for span in (*rows.batch_spans, *rows.spans):
            held = span_state(state, span)
            for start in range(span.start, span.end, CHUNK_TOKENS):
                end = min(start + CHUNK_TOKENS, span.end)
                step = _one_token if end - start == 1 else _chunk
                out[start:end] = step(held, *inputs.tokens(start, end))
        return out.flatten(1).to(qkv.dtype)


def _one_token(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor
) -> Tensor:
    """Computes one token of each of D sequences, and updates their states.

    ``state`` is ``[D, heads, key_dim, value_dim]``, the others are ``[D, heads, ...]``.
    """
    past = decay.exp().unsqueeze(-1)
    # S^T k and S^T q of the old state, in one pass over it. The change adds (q . k) times itself
    # to the latter.
    found_k, found_q = (torch.stack((k, q), -2) @ state).unbind(-2)
    change = (v - found_k * past) * beta.unsqueeze(-1)
    state.mul_(past.unsqueeze(-1)).addcmul_(k.unsqueeze(-1), change.unsqueeze(-2))
    return found_q * past + (q * k).sum(-1, keepdim=True) * change


def _chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """Computes n tokens of one sequence, and updates its state.

    ``state`` is ``[1, heads, key_dim, value_dim]``, the others are ``[n, heads, ...]``. The change
    that each token makes to the state depends on those before it in the chunk: a triangular system
    (the WY form of Yang et al., 2025, section 3.3).
    """
    held = state[0]
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))
    beta, total = beta.T.unsqueeze(-1), decay.T.cumsum(1)
    between = total.unsqueeze(2) - total.unsqueeze(1)
    later = torch.ones_like(between[0], dtype=torch.bool).triu_(1)
    # Masked before the exponential, which would overflow there.
    between = between.masked_fill(later, -torch.inf).exp()
    past = total.exp().unsqueeze(-1)
    wanted = (v - (k * past) @ held) * beta
    system = (beta * k) @ k.mT * between
    changes = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = (q * past) @ held + (q @ k.mT * between) @ changes
    rest = (total[:, -1:] - total).exp().unsqueeze(-1)
    held.mul_(past[:, -1:]).add_((k * rest).mT @ changes)
    return out.transpose(0, 1)
