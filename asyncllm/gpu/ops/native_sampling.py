"""NativeSample: the exponential race in compiled code, on the threads of a context."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from asyncllm.gpu.batch.decode_inputs import SamplingTensors
from asyncllm.native import Context, SampleArgs, fail

LOGITS_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def address(name: str, tensor: Tensor, dtype: torch.dtype, count: int) -> int:
    """The address of at least ``count`` elements.

    Raises:
        ValueError: another dtype or device, elements that are not adjacent, or too few.
    """
    found = tensor.dtype, tensor.device.type, tensor.is_contiguous()
    if found != (dtype, "cpu", True) or len(tensor) < count:
        raise ValueError(
            f"native sampling: {name} is {tuple(tensor.shape)} of {tensor.dtype} on "
            f"{tensor.device}, expected {count} or more adjacent {dtype} on cpu"
        )
    return tensor.data_ptr()


def logits_rows(logits: Tensor) -> Tensor:
    """``logits [S, vocab_size]`` with each row contiguous; rows may lie anywhere.

    Raises:
        ValueError: another device, dtype or shape.
    """
    if logits.dtype not in LOGITS_DTYPES or logits.device.type != "cpu" or logits.dim() != 2:
        raise ValueError(
            f"native sampling: logits are {tuple(logits.shape)} of {logits.dtype} on "
            f"{logits.device}, expected [rows, vocab_size] of a floating point type on cpu"
        )
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


class NativeSample:
    """One token per row, as ``TorchOps.sample`` says.

    The noise has the bits of ``gumbel``; logarithms and sums of exponentials differ from torch's
    in their last bits, so another token comes out where two were about to tie.
    """

    def __init__(self, context: Context) -> None:
        self.context = context

    def __call__(
        self,
        logits: Tensor,
        sampling: SamplingTensors,
        req_indices: Tensor,
        positions: Tensor,
        last_sampled_tokens: Tensor,
        out: Tensor,
    ) -> None:
        logits, context = logits_rows(logits), self.context
        rows = len(logits)
        lines = min(len(sampling.states), len(last_sampled_tokens))
        args = SampleArgs(
            logits=logits.data_ptr(),
            row_stride=logits.stride(0),
            rows=rows,
            vocab_size=logits.shape[1],
            req_indices=address("req_indices", req_indices, torch.int64, rows),
            positions=address("positions", positions, torch.int64, rows),
            states=address("states", sampling.states, torch.int64, lines),
            temperature=address("temperature", sampling.temperature, torch.float32, lines),
            top_k=address("top_k", sampling.top_k, torch.int32, lines),
            top_p=address("top_p", sampling.top_p, torch.float32, lines),
            min_p=address("min_p", sampling.min_p, torch.float32, lines),
            lines=lines,
            last_sampled=address("last_sampled_tokens", last_sampled_tokens, torch.int64, lines),
            out=address("out", out, torch.int64, rows),
            dtype=LOGITS_DTYPES[logits.dtype],
        )
        status = context.library.sample(context.handle, ctypes.byref(args))
        if status:
            fail("sample", status)
