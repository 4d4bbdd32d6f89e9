"""Random blocks of GGUF's types."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from asyncllm.gpu.ops.linear_weights import GGUF_BLOCK_SIZES, LinearWeights, QuantScheme

SCALE_PLACES = {"q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
"""Places of float16 numbers in a block; other types have one at its beginning."""


def random_blocks(scheme: QuantScheme, rows: int, columns: int, seed: int) -> np.ndarray:
    """Rows of any bytes but infinite scales: these are from 2^-7 to 2^-4, of either sign."""
    elements, size = GGUF_BLOCK_SIZES[scheme]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, columns // elements, size), np.uint8)
    for place in SCALE_PLACES.get(scheme, (0,)):
        raw[:, :, place + 1] = raw[:, :, place + 1] & 0x8F | 0x20
    return raw.reshape(rows, -1)


def set_floats(scheme: QuantScheme, blocks: np.ndarray, scale: float, minimum: float) -> None:
    """Sets the float16 scale of all blocks, and the minimum of types that have one."""
    whole = blocks.reshape(len(blocks), -1, GGUF_BLOCK_SIZES[scheme][1])
    places = SCALE_PLACES.get(scheme, (0,))
    for place, value in zip(places, (scale, minimum), strict=False):
        whole[:, :, place : place + 2] = np.array([value], np.float16).view(np.uint8)


def block_weights(
    scheme: QuantScheme, rows: int, columns: int, seed: int, *, bias: bool = False
) -> LinearWeights:
    values = torch.from_numpy(random_blocks(scheme, rows, columns, seed))
    generator = torch.Generator().manual_seed(seed)
    return LinearWeights(
        values, torch.randn(rows, generator=generator) if bias else None, scheme=scheme
    )


def dequantised_blocks(weights: LinearWeights) -> torch.Tensor:
    """What gguf-py makes of them, in float32."""
    kind = gguf.GGMLQuantizationType[weights.scheme.upper()]
    return torch.from_numpy(gguf.dequantize(weights.values.numpy(), kind))
