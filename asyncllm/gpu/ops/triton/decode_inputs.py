"""The inputs of a decode step, gathered on the device from the state of its requests."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# A type checker takes a kernel for the function that it is written as.

import triton
import triton.language as tl

from asyncllm.gpu.batch.decode_inputs import DecodeInputs
from asyncllm.gpu.ops.triton.tuning import cdiv

BLOCK = 128


@triton.jit(do_not_specialize=["num_rows"])
def decode_inputs_kernel(
    token_ids,
    seq_lens,
    slot_mapping,
    req_indices,
    host_token_ids,
    positions,
    last_sampled_tokens,
    block_table,
    num_rows,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid ``(rows / BLOCK,)``."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = rows < num_rows
    line = tl.load(req_indices + rows, mask=real, other=-1).to(tl.int64)
    live = line >= 0
    position = tl.load(positions + rows, mask=live, other=0).to(tl.int64)
    known = tl.load(host_token_ids + rows, mask=live, other=0).to(tl.int64)
    sampled = tl.load(last_sampled_tokens + line, mask=live, other=0).to(tl.int64)
    at = block_table + line * stride_table + position // BLOCK_SIZE
    block = tl.load(at, mask=live, other=0).to(tl.int64)
    slot = tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, 0)
    seq_len = tl.where(live, position + 1, 0)
    tl.store(token_ids + rows, tl.where(known < 0, sampled, known), mask=real)
    tl.store(seq_lens + rows, seq_len.to(seq_lens.dtype.element_ty), mask=real)
    tl.store(slot_mapping + rows, slot, mask=real)


def decode_inputs(rows: DecodeInputs) -> None:
    """Fills ``token_ids``, ``seq_lens`` and ``slot_mapping`` of a decode step."""
    count = rows.num_rows
    if count:
        decode_inputs_kernel[(cdiv(count, BLOCK),)](
            rows.token_ids,
            rows.seq_lens,
            rows.slot_mapping,
            rows.req_indices,
            rows.host_token_ids,
            rows.positions,
            rows.last_sampled_tokens,
            rows.block_table,
            count,
            rows.block_table.stride(0),
            BLOCK_SIZE=rows.block_size,
            BLOCK=BLOCK,
            num_warps=4,
        )
