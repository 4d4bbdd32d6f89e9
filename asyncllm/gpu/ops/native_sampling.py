"""sample, process_logits, top_logprobs: sampling in C++."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from asyncllm.gpu.batch.grammar_masks import num_mask_words
from asyncllm.gpu.batch.sampling_inputs import (
    LogitsTables,
    RowsToSample,
    SamplingRows,
    SamplingStages,
    TopLogprobs,
)
from asyncllm.gpu.batch.sampling_table import LOGITS_PROCESSING_PARAMS, SAMPLE_OP_PARAMS
from asyncllm.gpu.ops.program import DTYPE_CODES
from asyncllm.native.context import NativeContext
from asyncllm.native.interface import STRUCTS


def checked_address(name: str, tensor: Tensor, dtype: torch.dtype, count: int, *width: int) -> int:
    """Returns the address of a tensor ``[count or more, *width]``, after checks.

    Raises:
        ValueError: the tensor has another shape, dtype or device, or is not contiguous.
    """
    properties = tensor.dtype, tensor.device.type, tensor.is_contiguous(), tensor.shape[1:]
    if properties != (dtype, "cpu", True, width) or len(tensor) < count:
        raise ValueError(
            f"native sampling: {name} is {tuple(tensor.shape)} of {tensor.dtype} on "
            f"{tensor.device}, expected {(count, *width)} or more adjacent {dtype} on cpu"
        )
    return tensor.data_ptr()


def contiguous_logits(logits: Tensor) -> Tensor:
    """Returns ``logits [S, vocab_size]``, or a copy if its rows are not contiguous.

    Raises:
        ValueError: the logits are not a floating point matrix on the CPU.
    """
    if logits.dtype not in DTYPE_CODES or logits.device.type != "cpu" or logits.dim() != 2:
        raise ValueError(
            f"native sampling: logits are {tuple(logits.shape)} of {logits.dtype} on "
            f"{logits.device}, expected [rows, vocab_size] of a floating point type on cpu"
        )
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


def sample_args(
    logits: Tensor, sampling_tensors: Mapping[str, Tensor], rows: RowsToSample, out: Tensor
) -> Any:
    """Converts the arguments of ``TorchOps.sample`` to the native library's ``SampleArgs``.

    The result holds addresses: the caller has to keep the tensors alive.
    """
    max_requests = min(len(sampling_tensors["states"]), len(rows.last_sampled_tokens))
    return STRUCTS["SampleArgs"](
        **_row_args(logits, rows, max_requests),
        **{
            name: checked_address(name, sampling_tensors[name], param.dtype, max_requests)
            for name, param in SAMPLE_OP_PARAMS.items()
        },
        out=checked_address("out", out, torch.int64, len(logits)),
    )


def _row_args(
    logits: Tensor, rows: RowsToSample | SamplingRows, max_requests: int
) -> dict[str, Any]:
    """Arguments that ``SampleArgs`` and ``LogitsArgs`` have in common.

    Args:
        max_requests: number of requests that the parameters' arrays have room for.
    """
    count, last = len(logits), rows.last_sampled_tokens
    return {
        "logits": logits.data_ptr(),
        "row_stride": logits.stride(0),
        "rows": count,
        "vocab_size": logits.shape[1],
        "req_indices": checked_address("req_indices", rows.req_indices, torch.int64, count),
        "positions": checked_address("positions", rows.positions, torch.int64, count),
        "last_sampled": checked_address("last_sampled_tokens", last, torch.int64, max_requests),
        "lines": max_requests,
        "dtype": DTYPE_CODES[logits.dtype],
    }


def sample(
    context: NativeContext,
    logits: Tensor,
    sampling_tensors: Mapping[str, Tensor],
    rows: RowsToSample,
    out: Tensor,
) -> None:
    """Samples one token per row, see ``TorchOps.sample``.

    The random bits are those of ``gumbel``. Logarithms and sums of exponentials differ from torch's
    in their last bits, so that another token may be sampled where two tokens almost tie.
    """
    logits = contiguous_logits(logits)
    context.call("sample", sample_args(logits, sampling_tensors, rows, out))


def process_logits(
    context: NativeContext, logits: Tensor, rows: SamplingRows, stages: SamplingStages
) -> Tensor:
    """Computes ``logits.process_logits`` in C++, with bit-identical results."""
    logits = contiguous_logits(logits)
    out = torch.empty(logits.shape, dtype=torch.float32, device="cpu")
    context.call("process_logits", process_logits_args(logits, rows, stages, out))
    return out


def process_logits_args(
    logits: Tensor, rows: SamplingRows, stages: SamplingStages, out: Tensor
) -> Any:
    """Converts arguments of ``process_logits`` to the native library's ``LogitsArgs``.

    The result holds addresses: the caller has to keep the tensors alive.

    Args:
        out: ``[S, vocab_size]`` float32, output.
    """
    count, vocab_size = logits.shape
    num_scalars = min(len(rows.last_sampled_tokens), len(rows.params["restricted"]))
    args = STRUCTS["LogitsArgs"](
        **_row_args(logits, rows, min(num_scalars, rows.tables.table_rows)),
        out=out.data_ptr(),
        host_token_ids=checked_address("host_token_ids", rows.host_token_ids, torch.int64, count),
        words=num_mask_words(vocab_size),
    )
    if stages & SamplingStages.MASKS:
        _set_grammar_mask_args(args, rows)
    if stages & SamplingStages.TOKEN_CONSTRAINTS:
        _set_token_constraint_args(args, rows)
    if stages & SamplingStages.PENALTIES:
        _set_penalty_args(args, rows)
    return args


def _set_grammar_mask_args(args: Any, rows: SamplingRows) -> None:
    assert rows.mask_slots is not None
    assert rows.mask_words is not None
    args.mask_slots = checked_address("mask_slots", rows.mask_slots, torch.int64, args.rows)
    args.num_masks = len(rows.mask_words)
    args.mask_words = checked_address("mask_words", rows.mask_words, torch.int32, 0, args.words)


def _set_token_constraint_args(args: Any, rows: SamplingRows) -> None:
    tables = rows.tables
    args.rules = 1
    _set_param_args(args, rows, "restricted", "num_bias", "num_stop_ids", "min_end")
    args.max_bias, args.max_stop_ids = tables.bias_ids.shape[1], tables.stop_ids.shape[1]
    widths = {"allowed": args.words, "bias_ids": args.max_bias, "stop_ids": args.max_stop_ids}
    _set_table_args(args, tables, widths, torch.int32)
    _set_table_args(args, tables, {"bias_values": args.max_bias}, torch.float32)


def _set_penalty_args(args: Any, rows: SamplingRows) -> None:
    args.penalties = 1
    _set_param_args(args, rows, "counted_from", "repetition", "frequency", "presence")
    widths = {"counts": args.vocab_size, "in_prompt": args.words}
    _set_table_args(args, rows.tables, widths, torch.int32)


def _set_param_args(args: Any, rows: SamplingRows, *param_names: str) -> None:
    for name in param_names:
        dtype = LOGITS_PROCESSING_PARAMS[name].dtype
        setattr(args, name, checked_address(name, rows.params[name], dtype, args.lines))


def _set_table_args(
    args: Any, tables: LogitsTables, widths: Mapping[str, int], dtype: torch.dtype
) -> None:
    for name, width in widths.items():
        table = getattr(tables, name)
        setattr(args, name, checked_address(name, table, dtype, args.lines, width))


def top_logprobs(context: NativeContext, logits: Tensor, tokens: Tensor, out: TopLogprobs) -> None:
    """Computes ``logits.top_logprobs`` in C++; tokens with equal logits are in the order of their
    ids."""
    logits = contiguous_logits(logits)
    count, width = len(tokens), out.values.shape[1]
    if len(logits) < count:
        raise ValueError(f"native sampling: {len(logits)} rows of logits, {count} tokens")
    context.call(
        "top_logprobs", logits.data_ptr(), logits.stride(0), count, logits.shape[1],
        DTYPE_CODES[logits.dtype], checked_address("tokens", tokens, torch.int64, count), width - 1,
        checked_address("values", out.values, torch.float32, count, width),
        checked_address("ids", out.ids, torch.int64, count, width),
    )  # fmt: skip
