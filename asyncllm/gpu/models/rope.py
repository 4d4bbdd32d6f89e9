"""Rotary position embedding (Su et al., 2021) as a table indexed by position.

The ops rotate whole heads, element i together with element i + head_dim / 2. RoPE on a part of a
head, or on neighbouring elements, is the same rotation once the elements are permuted by
``rotary_order``. q and k of a layer are permuted alike, so their dot products do not change.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.checkpoint.rope_config import RopeConfig


class RopeSpec(NamedTuple):
    """Content of a RoPE table.

    Attributes:
        rotary_dim: number of rotated elements of a head, which are the first ``rotary_dim / 2`` of
            each half; None for all elements.
    """

    rope: RopeConfig
    head_dim: int
    rotary_dim: int | None = None


def inverse_frequencies(rope: RopeConfig, rotary_dim: int, max_positions: int = 0) -> Tensor:
    """Rotation of each pair per position, in radians, ``[rotary_dim / 2]`` float32.

    Kinds of RoPE change the default frequencies:

    - "linear" divides all frequencies by ``factor``.
    - "llama3" (Llama 3.1) divides frequencies whose wavelength exceeds ``original_max_position /
      low_freq_factor``, keeps those below ``original_max_position / high_freq_factor``, and
      interpolates in between.
    - "yarn" keeps frequencies with many rotations in the original context, divides those with few
      by ``factor``, and interpolates in between (Peng et al., 2023, section 3.2).
    - "longrope" (Ding et al., 2024) divides each frequency by its own factor, from the long factors
      if ``max_positions`` exceeds ``original_max_position``, else from the short ones. The choice
      is the same for all sequences, so that no sequence depends on another's length.
    - "proportional" (Gemma 4) divides by ``factor`` too, and sets the frequencies after the first
      ``rotated_fraction`` of all pairs to 0.
    - "none" sets all to 0.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    freqs = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return freqs
    if rope.kind == "none":
        return torch.zeros_like(freqs)
    if rope.kind == "linear":
        return freqs / rope.factor
    if rope.kind == "proportional":
        freqs[int(rope.rotated_fraction * rotary_dim // 2) :] = 0.0
        return freqs / rope.factor
    if rope.kind == "longrope":
        long = max_positions > rope.original_max_position
        factors = torch.tensor(rope.long_factors if long else rope.short_factors, device="cpu")
        return 1.0 / (factors * rope.theta**exponents)
    if rope.kind == "llama3":
        extrapolation_factor = _llama3_smooth_factor(rope, freqs)
    else:
        extrapolation_factor = _yarn_extrapolation_factor(rope, freqs)
    return (1 - extrapolation_factor) * freqs / rope.factor + extrapolation_factor * freqs


def _llama3_smooth_factor(rope: RopeConfig, freqs: Tensor) -> Tensor:
    """Weight of each unscaled frequency in Llama 3's interpolation, from 0 to 1."""
    wavelengths = 2 * math.pi / freqs
    low, high = rope.low_freq_factor, rope.high_freq_factor
    return ((rope.original_max_position / wavelengths - low) / (high - low)).clamp(0.0, 1.0)


def _yarn_extrapolation_factor(rope: RopeConfig, freqs: Tensor) -> Tensor:
    """Weight of each unscaled frequency in YaRN's interpolation.

    It is a ramp from 1 at the pair with ``beta_fast`` rotations in the original context to 0 at the
    pair with ``beta_slow`` rotations.
    """
    dim = 2 * len(freqs)

    def pair_index_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    first, last = pair_index_of(rope.beta_fast), pair_index_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        # Avoid a division by 0 as transformers does: equal bounds make the ramp a step.
        last += 0.001
    ramp = (torch.arange(len(freqs), dtype=torch.float32, device="cpu") - first) / (last - first)
    return 1 - ramp.clamp(0.0, 1.0)


def rope_table(
    rope: RopeConfig,
    head_dim: int,
    rotary_dim: int | None,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Cosines and sines of positions below ``max_positions``; 1 and 0 for pairs not rotated.

    Returns:
        ``[max_positions, head_dim]``: cosines in the first half, sines in the second. If the model
            scales queries, ``[max_positions, 2, head_dim]``: for queries, then for keys.
    """
    positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
    frequencies = inverse_frequencies(rope, rotary_dim or head_dim, max_positions)
    angles = torch.outer(positions, frequencies)
    factor = rope.attention_factor
    unrotated = angles.new_zeros(max_positions, head_dim // 2 - angles.shape[1])
    table = torch.cat((angles.cos() * factor, unrotated + 1, angles.sin() * factor, unrotated), -1)
    if rope.query_scale_beta:
        table = torch.stack((table * _query_scale(rope, positions), table), 1)
    return table.to(device, dtype)


def _query_scale(rope: RopeConfig, positions: Tensor) -> Tensor:
    """Factor by which queries are scaled, ``[max_positions, 1]`` (Llama 4's temperature tuning)."""
    contexts = torch.floor(positions / rope.original_max_position)
    return (1 + rope.query_scale_beta * torch.log(1 + contexts)).unsqueeze(1)


def rotary_order(head_dim: int, rotary_dim: int, *, interleaved: bool) -> Tensor | None:
    """Order in which the ops expect a head's rows, ``[head_dim]`` int64; None for the checkpoint's
    order.

    Args:
        rotary_dim: number of rotated rows, which are the first of the head.
        interleaved: whether row 2i is rotated together with row 2i + 1, instead of row i with row
            i + rotary_dim / 2.
    """
    if rotary_dim == head_dim and not interleaved:
        return None
    rotated, others = torch.arange(rotary_dim), torch.arange(rotary_dim, head_dim)
    pairs = rotated.view(-1, 2).T if interleaved else rotated.view(2, -1)
    return torch.cat((pairs, others.view(2, -1)), 1).flatten()
