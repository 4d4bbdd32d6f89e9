"""Op sets by name, their tolerances, and quantised weights for them."""

from __future__ import annotations

import torch

from asyncllm.gpu.ops.native_ops import NativeOps
from asyncllm.gpu.ops.onednn_ops import OneDNNOps, onednn_works
from asyncllm.gpu.ops.torch_ops import TorchOps
from tests.native_library import context, op_sets

BACKENDS = op_sets("torch", *(["onednn"] if onednn_works() else []))
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


def make(name: str) -> TorchOps:
    """The op set of that name, a native one on two threads and one instruction set."""
    if name.startswith("native"):
        return NativeOps(context(2, name.removeprefix("native-")))
    return OneDNNOps() if name == "onednn" else TorchOps()


def quantised(scheme: str, rows: int, columns: int, block: tuple[int, int]) -> dict:
    """Fields of a bundle with scales and zeros of the right shape."""
    dtype = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}.get(scheme, torch.uint8)
    width = columns // 2 if dtype == torch.uint8 else columns
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    return {
        "values": torch.zeros(rows, width, dtype=dtype),
        "scheme": scheme,
        "scales": torch.ones(grid),
        "scale_block": block,
        "zeros": torch.zeros(grid),
        "column_order": torch.arange(columns),
        "bias": torch.zeros(rows),
    }
