"""The inputs of a decode step, gathered on the device from the state of its requests."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# A type checker takes a kernel for the function that it is written as.

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.gpu.ops.triton.tuning import cdiv

BLOCK = 128


@triton.jit(do_not_specialize=["num_rows"])
def decode_inputs_kernel(
    token_ids,
    positions,
    seq_lens,
    slot_mapping,
    slots,
    last_tokens,
    lengths,
    block_table,
    num_rows,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADVANCE: tl.constexpr,
):
    """Grid ``(rows / BLOCK,)``."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = rows < num_rows
    slot = tl.load(slots + rows, mask=real, other=-1).to(tl.int64)
    live = slot >= 0
    position = tl.load(lengths + slot, mask=live, other=0).to(tl.int64)
    token = tl.load(last_tokens + slot, mask=live, other=0).to(tl.int64)
    at = block_table + slot * stride_table + position // BLOCK_SIZE
    block = tl.load(at, mask=live, other=0).to(tl.int64)
    cache_slot = tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, 0)
    seq_len = tl.where(live, position + 1, 0)
    # A request whose last step failed has no token; what it computes from is void.
    tl.store(token_ids + rows, tl.maximum(token, 0), mask=real)
    tl.store(positions + rows, position, mask=real)
    tl.store(seq_lens + rows, seq_len.to(seq_lens.dtype.element_ty), mask=real)
    tl.store(slot_mapping + rows, cache_slot, mask=real)
    if ADVANCE:
        tl.store(lengths + slot, seq_len.to(lengths.dtype.element_ty), mask=live)


def decode_inputs(
    slots: Tensor,
    last_tokens: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    token_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    advance: bool = False,
) -> None:
    """Fills the inputs of a decode step from the state of the requests in ``slots``.

    Args:
        slots: ``[B]`` int32 or int64, each request's slot; -1 for a padded row, which gets
            token 0 at position 0, sequence length 0 and slot 0 of the null block.
        last_tokens: ``[max_num_seqs]``, the token each request goes on from.
        lengths: ``[max_num_seqs]``, tokens of each request in the KV cache before the step.
        block_table: ``[max_num_seqs, W]`` int32.
        token_ids, positions, slot_mapping: ``[B]`` int64, written.
        seq_lens: ``[B]`` int32 or int64, written: tokens after the step.
        advance: also adds the step's token to ``lengths``.
    """
    rows = slots.shape[0]
    if rows:
        decode_inputs_kernel[(cdiv(rows, BLOCK),)](
            token_ids,
            positions,
            seq_lens,
            slot_mapping,
            slots,
            last_tokens,
            lengths,
            block_table,
            rows,
            block_table.stride(0),
            BLOCK_SIZE=block_size,
            BLOCK=BLOCK,
            ADVANCE=advance,
            num_warps=4,
        )
