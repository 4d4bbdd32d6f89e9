"""NativeTable, NativeEmbedding: embeddings from a plain table, or from a tied head's weights."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.gpu.ops.native_linear import NativeLinear
from asyncllm.gpu.ops.program import DTYPES, rows_of
from asyncllm.native.context import Context, fail
from asyncllm.native.interface import ARGS


class NativeTable:
    """An embedding with a table of plain values ``[vocab_size, H]``."""

    def __init__(self, context: Context, values: Tensor, multiplier: float = 1.0) -> None:
        self.context, self.values = context, rows_of(values, values.dtype)
        self.multiplier = multiplier
        self.dtype, self.device, self.shape = values.dtype, values.device, values.shape

    def __call__(self, token_ids: Tensor) -> Tensor:
        ids, values, context = token_ids.contiguous(), self.values, self.context
        if ids.dtype != torch.int64 or ids.device.type != "cpu" or ids.dim() != 1:
            raise ValueError(f"native select: ids are {tuple(ids.shape)} of {ids.dtype}")
        (rows, width), stride, dtype = values.shape, values.stride(0), DTYPES[values.dtype]
        if (recorder := context.recorder) is not None:
            out = recorder.empty(ids, width, values.dtype)
            args = ARGS["select"](
                x=values.data_ptr(), x_stride=stride, x_rows=rows, width=width,
                scale=self.multiplier, dtype=dtype,
            )  # fmt: skip
            recorder.add("select", ids, args, {"ids": ids, "out": out}, [values])
            return out
        out = values.new_empty((len(ids), width))
        status = context.functions.select(
            context.handle, values.data_ptr(), stride, rows, ids.data_ptr(), len(ids),
            out.data_ptr(), width, self.multiplier, dtype,
        )  # fmt: skip
        if status:
            fail("select", status)
        return out


class NativeEmbedding:
    """An embedding tied to the head: it gathers rows from the head's packed weights.

    So the weights are held once.

    Attributes:
        dtype, device, shape: those that a plain table ``[vocab_size, H]`` would have.
    """

    def __init__(self, head: NativeLinear, dtype: torch.dtype, multiplier: float = 1.0) -> None:
        self.head, self.dtype, self.shape = head, dtype, (head.n, head.k)
        self.device, self.multiplier = torch.device("cpu"), multiplier

    def __call__(self, token_ids: Tensor) -> Tensor:
        ids, head, context = token_ids.contiguous(), self.head, self.head.context
        if ids.dtype != torch.int64 or ids.device.type != "cpu" or ids.dim() != 1:
            raise ValueError(f"native gather: ids are {tuple(ids.shape)} of {ids.dtype}")
        if (recorder := context.recorder) is not None:
            out = recorder.empty(ids, head.k, self.dtype)
            args = ARGS["gather"](
                weights=head.weights.handle, scale=self.multiplier, dtype=DTYPES[self.dtype]
            )
            recorder.add("gather", ids, args, {"ids": ids, "out": out}, [head.weights])
            return out
        out = torch.empty((len(ids), head.k), dtype=self.dtype, device="cpu")
        library = context.functions
        status = library.gather(
            context.handle, head.weights.handle, ids.data_ptr(), len(ids), out.data_ptr(),
            self.multiplier, DTYPES[self.dtype],
        )  # fmt: skip
        if status:
            fail("gather", status)
        return out
