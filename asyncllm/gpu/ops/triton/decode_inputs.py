"""fill_decode_inputs: updates block tables and derives a decode step's inputs in one launch."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright takes a Triton kernel for a plain function, and would reject ``kernel[grid]``.

import triton
import triton.language as tl

from asyncllm.gpu.batch.step_inputs import KVGroupInputs, StepInputs
from asyncllm.gpu.ops.triton.tuning import cdiv

ROWS_PER_PROGRAM = tl.constexpr(128)


@triton.jit(do_not_specialize=["num_rows", "num_changes"])
def decode_inputs_kernel(
    token_ids,
    seq_lens,
    slot_mapping,
    req_indices,
    host_token_ids,
    positions,
    last_sampled_tokens,
    block_table,
    changed_entries,
    new_block_ids,
    num_rows,
    num_changes,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
):
    """Updates a block table and computes the inputs of decode rows.

    Grid ``(rows / ROWS_PER_PROGRAM,)``. Every program makes all changes of the block table, because
    it needs the changed table and cannot wait for other programs. All programs write the same
    values.
    """
    for first in range(0, num_changes, ROWS_PER_PROGRAM):
        number = first + tl.arange(0, ROWS_PER_PROGRAM)
        exists = number < num_changes
        entry = tl.load(changed_entries + number, mask=exists, other=0)
        new = tl.load(new_block_ids + number, mask=exists, other=0)
        tl.store(block_table + entry, new, mask=exists)
    # Wait for the program's other threads: the code below reads table entries that they write.
    tl.debug_barrier()
    rows = tl.program_id(0) * ROWS_PER_PROGRAM + tl.arange(0, ROWS_PER_PROGRAM)
    real = rows < num_rows
    req_index = tl.load(req_indices + rows, mask=real, other=-1).to(tl.int64)
    live = req_index >= 0
    position = tl.load(positions + rows, mask=live, other=0).to(tl.int64)
    known = tl.load(host_token_ids + rows, mask=live, other=0).to(tl.int64)
    sampled = tl.load(last_sampled_tokens + req_index, mask=live, other=0).to(tl.int64)
    at = block_table + req_index * stride_table + position // BLOCK_SIZE
    block = tl.load(at, mask=live, other=0).to(tl.int64)
    slot = tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, 0)
    seq_len = tl.where(live, position + 1, 0)
    tl.store(token_ids + rows, tl.where(known < 0, sampled, known), mask=real)
    tl.store(seq_lens + rows, seq_len.to(seq_lens.dtype.element_ty), mask=real)
    tl.store(slot_mapping + rows, slot, mask=real)


def fill_decode_inputs(step: StepInputs, group: KVGroupInputs) -> None:
    """Changes a block table and computes decode inputs, see ``TorchOps.fill_decode_inputs``."""
    assert group.table_changes is not None
    count, (changed_entries, new_block_ids) = step.num_rows, group.table_changes
    if not count and not len(changed_entries):
        return
    decode_inputs_kernel[(max(1, cdiv(count, ROWS_PER_PROGRAM.value)),)](
        step.token_ids,
        step.seq_lens,
        group.slot_mapping,
        step.req_indices,
        step.previous_tokens,
        step.positions,
        step.last_sampled_tokens,
        group.block_table,
        changed_entries,
        new_block_ids,
        count,
        len(changed_entries),
        group.block_table.stride(0),
        BLOCK_SIZE=group.block_size,
        num_warps=4,
    )
