"""check_attention_outputs: compares an attention backend with plain torch on its device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.errors import EngineError
from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.batch.step_buffer import make_dummy_batch, step_inputs
from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.ops.backend import AttentionRequest
from asyncllm.gpu.ops.base import Attention, AttentionShape
from asyncllm.gpu.ops.torch_attention import TorchAttention
from asyncllm.validation import describe_error

UNOWNED_SLOT_FILL = 64.0
"""Value in KV slots that no sequence owns: large, so that a row that reads one by mistake gets a
wrong output."""

NUM_PADDED_ROWS = 2
"""Number of padded rows in a decode step."""


def check_attention_outputs(attention: Attention, request: AttentionRequest) -> None:
    """Compares an attention backend with ``TorchAttention`` in float64 on the same device.

    Small steps of decode rows, of prefill rows and of both are run on random tensors, with each
    window of the model's layers.

    Args:
        request: request for which the backend was made. Its shape has no sinks, and its
            ``block_size`` is set.

    Raises:
        EngineError: a row differs by more than the rounding of its dtype explains, or a step fails.
    """
    block_size = request.block_size
    assert block_size is not None
    setting = f"attention_backend={attention.name!r}"
    remedy = 'install another build of its library, or choose attention_backend="auto"'
    bound = 2 * torch.finfo(request.dtype).eps
    # Shorten windows to less than the sequences' lengths, so that they hide some keys.
    windows = {
        None if window is None else min(window, block_size + 3) for window in request.windows
    }
    with torch.inference_mode():
        for step, window in itertools.product(_make_steps(request, block_size), windows):
            where = f"{step.name} rows, {'no window' if window is None else f'window {window}'}"
            try:
                error = step.max_error(attention, window)
            except Exception as failure:
                raise EngineError(
                    f"{setting} fails its check at start ({where}): {describe_error(failure)}; "
                    f"{remedy}"
                ) from failure
            if not error <= bound:
                raise EngineError(
                    f"{setting} does not compute what plain torch does ({where}): a row is off by "
                    f"{error:.3g} of its norm, expected at most {bound:.3g}; {remedy}"
                )


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of T tokens, whose keys and values are in the cache already.

    Attributes:
        q: ``[T + padding, Hq, D]``.
        cache: ``[2, num_blocks, block_size, Hk, D]``.
        slots: ``[T]`` int64.
        inputs: the inputs of the attention's plan.
    """

    name: str
    shape: AttentionShape
    q: Tensor
    cache: Tensor
    slots: Tensor
    inputs: StepInputs

    def max_error(self, attention: Attention, window: int | None) -> float:
        """Largest error of a head's output in any row, relative to the norm of the exact output.

        Infinity if any output is not finite, even in a padded row: later layers compute keys and
        values from that row, and write them to the null block.
        """
        output = self._run(attention, self.q, self.cache, window).double()
        if not bool(output.isfinite().all()):
            return float("inf")
        exact = TorchAttention(self.shape, torch.float64)
        exact_output = self._run(exact, self.q.double(), self.cache.double(), window)
        output, exact_output = (
            each.view(len(self.q), -1, self.q.shape[-1])[: len(self.slots)]
            for each in (output, exact_output)
        )
        return float(((output - exact_output).norm(dim=-1) / exact_output.norm(dim=-1)).max())

    def _run(self, attention: Attention, q: Tensor, cache: Tensor, window: int | None) -> Tensor:
        plan = attention.plan(self.inputs, window, 0)
        k, v = cache.flatten(1, 2)[:, self.slots]
        return attention(q, k, v, cache, plan)


def _make_steps(request: AttentionRequest, block_size: int) -> Iterator[_Step]:
    decodes = [(2 * block_size + 5, 1), (0, 1), (block_size - 1, 1), (block_size, 1)]
    prefills = [(0, block_size + 3), (block_size + 7, 20), (3, 2), (2 * block_size, 7)]
    for name, rows in (
        ("decode", decodes), ("prefill", prefills), ("decode and prefill", decodes + prefills),
    ):  # fmt: skip
        yield _make_step(name, rows, request, block_size)


def _make_step(
    name: str, rows: list[tuple[int, int]], request: AttentionRequest, block_size: int
) -> _Step:
    """Makes a step of random tensors for rows of (cached tokens, tokens of the step).

    Decode rows have to come first. Each row has its own blocks, in random order, and a request
    index other than its row number. Block 0 is the null block. Steps of decode rows alone have
    the inputs of a captured graph.
    """
    shape, device, random = request.shape, request.device, torch.Generator().manual_seed(len(name))
    head_shape = (shape.num_kv_heads, shape.head_dim)
    starts, counts = zip(*rows, strict=True)
    lengths = [start + count for start, count in rows]
    width = -(-max(lengths) // block_size) + 1
    blocks = np.random.default_rng(len(rows)).permutation(len(rows) * width) + 1
    batch = make_dummy_batch(starts, counts, num_decodes=counts.count(1))
    batch.req_indices.reverse()
    # The last row of the block table is for padded rows.
    persistent = InputBatch(len(rows) + 1, width * block_size, [KVCacheSpec((0,), block_size)])
    (table,) = persistent.tables
    cache = torch.full((2, len(blocks) + 1, block_size, *head_shape), UNOWNED_SLOT_FILL)
    for row, (req_index, length) in enumerate(zip(batch.req_indices, lengths, strict=True)):
        table.append(req_index, blocks[row * width : (row + 1) * width].tolist())
        row_slots = table.slot_mapping(req_index, np.arange(length))
        cache.flatten(1, 2)[:, row_slots] = torch.randn(2, length, *head_shape, generator=random)
    inputs = step_inputs(batch, persistent, device)
    slots = inputs.groups[0].slot_mapping
    if name == "decode":
        inputs = _add_padded_rows(inputs, width * block_size)
    # Make queries a strided slice, as in the model, where they are part of the projection of q, k
    # and v.
    heads = shape.num_heads + 2 * shape.num_kv_heads
    merged = torch.randn(inputs.num_tokens, heads, shape.head_dim, generator=random)
    q = merged.to(device, request.dtype)[:, : shape.num_heads]
    return _Step(name, shape, q, cache.to(device, request.dtype), slots, inputs)


def _add_padded_rows(step: StepInputs, max_len: int) -> StepInputs:
    """Converts inputs to those of a captured step: appends padded rows, and drops the host's
    lengths."""
    padding = (0, NUM_PADDED_ROWS)
    return replace(
        step,
        num_decodes=step.num_decodes + NUM_PADDED_ROWS,
        token_ids=F.pad(step.token_ids, padding),
        positions=F.pad(step.positions, padding),
        req_indices=F.pad(step.req_indices, padding, value=-1),
        seq_lens=F.pad(step.seq_lens, padding),
        max_len=max_len,
        host=None,
    )
