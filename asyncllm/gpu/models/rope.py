"""Rotary position embedding (Su et al., 2021) as a table indexed by position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncllm.checkpoint.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair, ``[head_dim / 2]`` float32.

    "linear" divides all of them by ``factor``. "llama3" divides those whose wavelength
    exceeds ``original_max_position / low_freq_factor``, leaves those below
    ``original_max_position / high_freq_factor``, and interpolates between (Llama 3.1).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    freqs = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return freqs / rope.factor
    if rope.kind == "default":
        return freqs
    wavelengths = 2 * math.pi / freqs
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (rope.original_max_position / wavelengths - low) / (high - low)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * freqs / rope.factor + smooth * freqs


def rope_table(
    rope: RopeConfig, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Cosines and sines of every position below ``max_positions``.

    Returns:
        ``[max_positions, head_dim]``: cosines in the first half, sines in the second.
    """
    positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return torch.cat((angles.cos(), angles.sin()), -1).to(device, dtype)
