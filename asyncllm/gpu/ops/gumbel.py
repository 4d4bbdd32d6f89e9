"""gumbel_sample: Gumbel-max sampling in plain torch, the reference of every op set's sampler.

Each token i of a row draws an exponential number ``E_i``. Of the tokens that survive truncation the
one with the least ``E_i / p_i`` is sampled: the Gumbel-max trick (Gumbel, 1954; Maddison et al.,
2014). In a row without truncation, a chunk of 256 tokens is sampled first, by its mass, then a
token in this chunk. The distribution is the same, for a hundredth of the random numbers.

``E_i`` depends only on the seed, the position and the token or chunk. So a row's token depends on
no other row, and a difference in the last bits of logits matters only where two tokens almost tie.
The random bits are Philox4x32-10 (Salmon et al., 2011). Its key is output number ``position`` of
SplitMix64 (Steele, Lea and Flood, 2014), whose state is the seed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_TEMPERATURE = 1e-5
"""Temperature below which a row is greedy, as in vLLM: division by a smaller number may
overflow."""

CHUNK_TOKENS = 256
"""Tokens per chunk. A token's chunk decides which of the four words of a Philox output is used."""

NO_TOKEN_LEFT = -2
"""Result for a row whose logits are all minus infinity, instead of a token."""

_MIN_FLOAT32 = -3.4028234663852886e38
_LOW_32_BITS = 0xFFFFFFFF


def gumbel_sample(
    logits: Tensor,
    states: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """Samples one token per row.

    Tokens are sorted by logit, descending, then by id. Truncation then keeps

    - by min_p, the tokens with at least ``min_p`` times the probability of the first;
    - by top_k, the first k of these;
    - by top_p, those of the remaining tokens whose predecessors have less than ``top_p`` of the
      remaining tokens' mass.

    Args:
        logits: ``[S, V]`` of any floating dtype.
        states: ``[S]`` int64, the bits of the seeds' 64-bit states.
        positions: ``[S]``, position of the sampled token in its sequence.
        temperature: ``[S]`` float32; below MIN_TEMPERATURE the first token wins.
        top_k: ``[S]``; 0 or less keeps all tokens.
        top_p, min_p: ``[S]`` float32; 1 and 0 keep all tokens.

    Returns:
        ``[S]`` int64; -1 for a row with NaN or infinity, NO_TOKEN_LEFT for a row whose logits are
        all minus infinity.
    """
    vocab_size = logits.shape[1]
    greedy = temperature < MIN_TEMPERATURE
    scaled_logits = logits.float() * inverse_temperatures(temperature).unsqueeze(1)
    keys = gumbel_keys(states, positions)
    order = scaled_logits.sort(dim=-1, descending=True, stable=True)
    values, ids = order.values, order.indices
    largest = values[:, :1]
    is_kept = truncation_mask(values, top_k, top_p, min_p)
    score = values - vocab_exponential_noise(keys, vocab_size).gather(1, ids).log()
    winner = torch.where(is_kept, score, -torch.inf).argmax(-1, keepdim=True)
    winner = torch.where(greedy.unsqueeze(1), 0, winner)
    tokens = ids.gather(1, winner).squeeze(1)
    is_untruncated = ~greedy & ~has_truncation(top_k, top_p, min_p, vocab_size)
    tokens = torch.where(is_untruncated, sample_without_truncation(scaled_logits, keys), tokens)
    # The total mass is NaN if a logit is NaN or infinity; a logit of minus infinity has mass 0.
    total = (scaled_logits.double() - largest).exp().sum(-1)
    none_left = torch.where(largest.squeeze(1) == -torch.inf, NO_TOKEN_LEFT, -1)
    return torch.where(total >= 0.5, tokens, none_left)


def inverse_temperatures(temperature: Tensor) -> Tensor:
    """Factors on the logits, ``[S]``: 1 / temperature, or 1 for greedy rows."""
    greedy = temperature < MIN_TEMPERATURE
    return torch.where(greedy, 1.0, 1.0 / torch.where(greedy, 1.0, temperature))


def has_truncation(top_k: Tensor, top_p: Tensor, min_p: Tensor, vocab_size: int) -> Tensor:
    """Returns ``[S]`` bool: rows whose top_k, top_p or min_p may exclude a token."""
    return ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0)


def truncation_mask(
    sorted_logits: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    total_mass: Tensor | None = None,
) -> Tensor:
    """Returns ``[S, C]`` bool: which of the C likeliest tokens survive truncation.

    Args:
        sorted_logits: ``[S, C]``, the largest logits divided by the temperature, descending.
        total_mass: ``[S]`` float64, the mass of which top_p keeps a fraction; the unit is the
            likeliest token's mass. Where it is infinite, and in all rows if it is None, the
            fraction is of the mass that min_p and top_k keep.
    """
    largest, count = sorted_logits[:, :1], sorted_logits.shape[1]
    is_kept = sorted_logits >= (largest + min_p.unsqueeze(1).log()).clamp(min=_MIN_FLOAT32)
    max_tokens = torch.where(top_k <= 0, 2**31 - 1, top_k).unsqueeze(1)
    is_kept &= torch.arange(count, device=sorted_logits.device) < max_tokens
    mass = torch.where(is_kept, (sorted_logits.double() - largest).exp(), 0.0)
    cumulative = mass.cumsum(-1)
    kept_mass = cumulative[:, -1]
    if total_mass is not None:
        kept_mass = torch.where(total_mass.isinf(), kept_mass, total_mass)
    allowed = torch.where(top_p >= 1.0, torch.inf, top_p.double() * kept_mass)
    return is_kept & (cumulative - mass < allowed.unsqueeze(1))


def sample_without_truncation(scaled_logits: Tensor, keys: Tensor) -> Tensor:
    """Samples a chunk by its mass, then a token in it; returns tokens ``[S]`` int64.

    Args:
        scaled_logits: ``[S, V]`` float32, logits divided by the temperature.
    """
    count = -(-scaled_logits.shape[1] // CHUNK_TOKENS)
    chunks = F.pad(
        scaled_logits, (0, count * CHUNK_TOKENS - scaled_logits.shape[1]), value=-torch.inf
    )
    chunks = chunks.view(len(scaled_logits), count, CHUNK_TOKENS)
    score = chunks.logsumexp(-1) - chunk_exponential_noise(keys, count).log()
    return sample_in_chunk(chunks, score.argmax(-1), keys)


def sample_in_chunk(chunked_logits: Tensor, chunk_index: Tensor, keys: Tensor) -> Tensor:
    """Samples a token of each row's chunk ``chunk_index [S]``; returns tokens ``[S]`` int64.

    Args:
        chunked_logits: ``[S, C, CHUNK_TOKENS]`` float32, logits divided by the temperature.
    """
    rows = torch.arange(len(chunked_logits), device=chunked_logits.device)
    lanes = torch.arange(CHUNK_TOKENS, device=chunked_logits.device)
    noise = token_exponential_noise(keys, chunk_index.unsqueeze(1) * CHUNK_TOKENS + lanes)
    in_chunk = (chunked_logits[rows, chunk_index] - noise.log()).argmax(-1)
    return chunk_index * CHUNK_TOKENS + in_chunk


def gumbel_keys(states: Tensor, positions: Tensor) -> Tensor:
    """Returns ``[S]`` int64: output number ``position`` of SplitMix64, from each row's state."""
    z = states + (positions.long() + 1) * _as_signed(0x9E3779B97F4A7C15)
    z = (z ^ _logical_right_shift(z, 30)) * _as_signed(0xBF58476D1CE4E5B9)
    z = (z ^ _logical_right_shift(z, 27)) * _as_signed(0x94D049BB133111EB)
    return z ^ _logical_right_shift(z, 31)


def vocab_exponential_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Exponential noise of mean 1 for all tokens, ``[S, vocab_size]`` float32."""
    tokens = torch.arange(vocab_size, device=keys.device)
    return token_exponential_noise(keys, tokens.expand(len(keys), -1))


def token_exponential_noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """Exponential noise of mean 1 for ``tokens [S, T]``, ``[S, T]`` float32.

    Token ``lane`` of chunk c uses word ``c % 4`` of Philox's output for counter
    ``c // 4 * CHUNK_TOKENS + lane``: the four words of an output belong to four adjacent chunks.
    """
    counters = tokens // (4 * CHUNK_TOKENS) * CHUNK_TOKENS + tokens % CHUNK_TOKENS
    words = torch.stack(_philox(counters, keys.unsqueeze(1), 0))
    return _exponential_variate(
        words.gather(0, (tokens // CHUNK_TOKENS % 4).unsqueeze(0)).squeeze(0)
    )


def chunk_exponential_noise(keys: Tensor, num_chunks: int) -> Tensor:
    """Exponential noise of mean 1 for chunks, ``[S, num_chunks]`` float32.

    Chunk c uses word 0 of Philox's output for counter (c, 1).
    """
    chunks = torch.arange(num_chunks, device=keys.device).expand(len(keys), -1)
    return _exponential_variate(_philox(chunks, keys.unsqueeze(1), 1)[0])


def _exponential_variate(random_word: Tensor) -> Tensor:
    u = ((random_word.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    # Use a series for small u: sampled tokens have u near 0, and 1 - u would round away the bits of
    # u.
    series = 1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6)))))
    return torch.where(u < 0.0625, u * series, -(1.0 - u).log())


def _philox(counters: Tensor, keys: Tensor, domain: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of Philox4x32-10 for (counters, domain), as int64 in [0, 2**32)."""
    key0, key1 = torch.broadcast_tensors(keys & _LOW_32_BITS, _logical_right_shift(keys, 32))[:2]
    zero = torch.zeros_like(counters + keys)
    c0, c1, c2, c3 = counters + zero, zero + domain, zero, zero
    for _ in range(10):
        product0, product2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = _logical_right_shift(product2, 32) ^ c1 ^ key0
        c2 = _logical_right_shift(product0, 32) ^ c3 ^ key1
        c1, c3 = product2 & _LOW_32_BITS, product0 & _LOW_32_BITS
        key0, key1 = (key0 + 0x9E3779B9) & _LOW_32_BITS, (key1 + 0xBB67AE85) & _LOW_32_BITS
    return c0, c1, c2, c3


def _logical_right_shift(z: Tensor, count: int) -> Tensor:
    """Shifts the bits of int64 to the right, filling with zeros."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def _as_signed(value: int) -> int:
    return value - (1 << 64)
