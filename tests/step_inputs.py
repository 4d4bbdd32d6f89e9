"""Inputs of steps for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.gpu.batch.sampling_table import SAMPLE_OP_PARAMS
from asyncllm.gpu.batch.step_inputs import KVGroupInputs, RowArrays, StepInputs


def planned(
    table: np.ndarray, lines: np.ndarray, starts: np.ndarray, counts: np.ndarray, block_size: int,
    device: str | torch.device = "cpu", *, tokens: Tensor | None = None,
    positions: Tensor | None = None, slots: Tensor | None = None,
    output_indices: Tensor | None = None,
) -> StepInputs:  # fmt: skip
    """A step whose lengths the host knows, in one KV group; decodes first.

    Args:
        table: by request index.
        lines: the rows' request indices.
        tokens, positions, slots: ``[T]``; zeros unless given.
        output_indices: None for all.
    """
    ends = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    decodes = int(np.argmax(counts > 1)) if (counts > 1).any() else len(counts)
    nothing = torch.zeros(int(ends[-1]), dtype=torch.int64, device=device)
    tokens = nothing if tokens is None else tokens
    lengths = (starts + counts).astype(np.int32)
    lines = np.ascontiguousarray(lines, dtype=np.int64)
    starts = np.ascontiguousarray(starts, dtype=np.int64)

    def there(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return StepInputs(
        num_decodes=decodes,
        token_ids=tokens,
        positions=nothing if positions is None else positions,
        req_indices=there(lines),
        seq_lens=there(lengths),
        query_start_loc=there(ends),
        prefill_start_loc=there((ends[decodes:] - decodes).astype(np.int32)),
        groups=[
            KVGroupInputs(nothing if slots is None else slots, there(table), table, block_size)
        ],
        max_num_seqs=len(table),
        max_len=int(lengths.max()),
        num_logits=len(tokens) if output_indices is None else len(output_indices),
        output_indices=output_indices,
        host=RowArrays(lines, starts, ends, lengths),
    )


def captured(
    table: Tensor, req_indices: Tensor, positions: Tensor, seq_lens: Tensor, block_size: int,
    **fields: Any,
) -> StepInputs:  # fmt: skip
    """Decode rows whose values only the device knows, in one KV group.

    Args:
        table: by request index, with the dummy line.
        fields: others of StepInputs, and of its KVGroupInputs; what is derived is zeros unless
            given.
    """
    count = len(req_indices)
    nothing = torch.zeros(count, dtype=torch.int64, device=req_indices.device)
    group = KVGroupInputs(
        fields.pop("slot_mapping", nothing.clone()), table, np.zeros((0, 0), np.int32), block_size,
        fields.pop("table_changes", (nothing[:0], nothing[:0].int())),
    )  # fmt: skip
    usual = {
        "num_decodes": count,
        "token_ids": nothing.clone(),
        "positions": positions,
        "req_indices": req_indices,
        "seq_lens": seq_lens,
        "query_start_loc": nothing[:0],
        "prefill_start_loc": nothing[:0].int(),
        "groups": [group],
        "max_num_seqs": len(table) - 1,
        "max_len": table.shape[1] * block_size,
        "num_logits": count,
        "previous_tokens": nothing,
        "last_sampled_tokens": torch.zeros(len(table), dtype=torch.int64, device=table.device),
    }
    return StepInputs(**(usual | fields))


def draw_scalars(*columns: Tensor) -> dict[str, Tensor]:
    """The scalars of SAMPLE_OP_PARAMS, in its order."""
    return dict(zip(SAMPLE_OP_PARAMS, columns, strict=True))
