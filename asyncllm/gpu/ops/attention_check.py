"""check_attention: compares an attention backend with plain torch on the engine's device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from asyncllm.errors import EngineError
from asyncllm.gpu.batch.step_inputs import GroupInputs, RowArrays, StepInputs
from asyncllm.gpu.ops.backend import AttentionRequest
from asyncllm.gpu.ops.base import Attention, AttentionShape
from asyncllm.gpu.ops.torch_attention import TorchAttention
from asyncllm.validation import explain

UNOWNED_VALUE = 64.0
"""Value in KV slots that no sequence owns. It is so large that a row that reads such a slot by
mistake gets a wrong output."""

NUM_PADDED_ROWS = 2
"""Number of padded rows in a decode step."""


def check_attention(attention: Attention, request: AttentionRequest) -> None:
    """Compares an attention backend with ``TorchAttention`` in float64 on the same device.

    It runs small steps of decode rows, of prefill rows and of both, on random tensors, with each
    window of the model's layers.

    Args:
        request: must have a shape without sinks, and a ``block_size``.

    Raises:
        EngineError: a row differs by more than the rounding of its dtype explains, or a step fails.
    """
    size = request.block_size
    assert size is not None
    which = f"attention_backend={attention.name!r}"
    remedy = 'install another build of its library, or choose attention_backend="auto"'
    bound = 2 * torch.finfo(request.dtype).eps
    # Shorten windows to less than the sequences' lengths, so that they hide some keys.
    windows = {None if one is None else min(one, size + 3) for one in request.windows}
    with torch.inference_mode():
        for step, window in ((step, one) for step in _make_steps(request, size) for one in windows):
            where = f"{step.name} rows, {'no window' if window is None else f'window {window}'}"
            try:
                error = step.max_error(attention, window)
            except Exception as failure:
                raise EngineError(
                    f"{which} fails its check at start ({where}): {explain(failure)}; {remedy}"
                ) from failure
            if not error <= bound:
                raise EngineError(
                    f"{which} does not compute what plain torch does ({where}): a row is off by "
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
        """Largest error of any row's head, relative to the norm of its exact output.

        It is infinite if any output is not finite. Outputs of padded rows count as well, because
        later layers write their keys and values to the null block.
        """
        found = self._run(attention, self.q, self.cache, window).double()
        if not bool(found.isfinite().all()):
            return float("inf")
        exact = TorchAttention(self.shape, torch.float64)
        wanted = self._run(exact, self.q.double(), self.cache.double(), window)
        found, wanted = (
            each.view(len(self.q), -1, self.q.shape[-1])[: len(self.slots)]
            for each in (found, wanted)
        )
        return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())

    def _run(self, attention: Attention, q: Tensor, cache: Tensor, window: int | None) -> Tensor:
        plan = attention.plan(self.inputs, window, 0)
        k, v = cache.flatten(1, 2)[:, self.slots]
        return attention(q, k, v, cache, plan)


def _make_steps(request: AttentionRequest, size: int) -> Iterator[_Step]:
    decodes = [(2 * size + 5, 1), (0, 1), (size - 1, 1), (size, 1)]
    prefills = [(0, size + 3), (size + 7, 20), (3, 2), (2 * size, 7)]
    for name, rows in (
        ("decode", decodes), ("prefill", prefills), ("decode and prefill", decodes + prefills),
    ):  # fmt: skip
        yield _make_step(name, _RandomRows(rows, size), request)


def _make_step(name: str, rows: _RandomRows, request: AttentionRequest) -> _Step:
    shape, device, random = request.shape, request.device, torch.Generator().manual_seed(len(name))
    pair = (shape.num_kv_heads, shape.head_dim)
    cache = torch.full((2, rows.blocks.size + 1, rows.size, *pair), UNOWNED_VALUE)
    for row in range(len(rows.starts)):
        own = rows.slots(row, 0)
        cache.flatten(1, 2)[:, own] = torch.randn(2, len(own), *pair, generator=random)
    slots = np.concatenate([rows.slots(row, int(at)) for row, at in enumerate(rows.starts)])
    inputs = rows.captured_inputs(device) if name == "decode" else rows.planned_inputs(device)
    # Make queries a strided slice, as in the model, where they are part of the projection of q, k
    # and v.
    heads = shape.num_heads + 2 * shape.num_kv_heads
    count = len(slots) + (NUM_PADDED_ROWS if name == "decode" else 0)
    merged = torch.randn(count, heads, shape.head_dim, generator=random)
    q = merged.to(device, request.dtype)[:, : shape.num_heads]
    cache = cache.to(device, request.dtype)
    return _Step(name, shape, q, cache, torch.from_numpy(slots).to(device), inputs)


class _RandomRows:
    """Rows of a step, decode rows first, from pairs (cached tokens, tokens of the step).

    Each row has its own blocks, in random order, and a request index other than its row number.
    Block 0 is the null block.
    """

    def __init__(self, rows: list[tuple[int, int]], size: int) -> None:
        self.size = size
        self.starts, self.counts = np.array(rows, dtype=np.int64).T
        self.lengths = self.starts + self.counts
        width = int(-(-self.lengths.max() // size)) + 1
        order = np.random.default_rng(len(rows)).permutation(len(rows) * width) + 1
        self.blocks = order.reshape(-1, width)
        self.req_indices = np.arange(len(rows))[::-1].copy()
        self.table = np.zeros((len(rows) + 1, width), dtype=np.int32)
        self.table[self.req_indices] = self.blocks

    def slots(self, row: int, first: int) -> np.ndarray:
        """KV slots of a row's tokens from position ``first`` on."""
        positions = np.arange(first, int(self.lengths[row]))
        return self.blocks[row, positions // self.size] * self.size + positions % self.size

    def planned_inputs(self, device: torch.device) -> StepInputs:
        """Inputs of an eager step, whose lengths the host knows."""
        return self._make_inputs(device, 0)

    def captured_inputs(self, device: torch.device) -> StepInputs:
        """Inputs of a captured step: the same rows, then padded rows; no lengths on the host."""
        return replace(
            self._make_inputs(device, NUM_PADDED_ROWS),
            max_len=self.table.shape[1] * self.size,
            host=None,
        )

    def _make_inputs(self, device: torch.device, padded: int) -> StepInputs:
        def padded_on_device(array: np.ndarray, dtype: torch.dtype, padding: int = 0) -> Tensor:
            padded_rows = np.concatenate((array, np.full(padded, padding)))
            return torch.from_numpy(padded_rows).to(device, dtype)

        starts = np.concatenate(([0], np.cumsum(self.counts)))
        decodes = int((self.counts == 1).sum())
        tokens = torch.zeros(int(starts[-1]) + padded, dtype=torch.int64, device=device)
        table = torch.from_numpy(self.table).to(device)
        return StepInputs(
            num_decodes=decodes + padded,
            token_ids=tokens,
            positions=tokens,
            req_indices=padded_on_device(self.req_indices, torch.int64, -1),
            seq_lens=padded_on_device(self.lengths, torch.int32),
            query_start_loc=torch.from_numpy(starts).to(device),
            prefill_start_loc=torch.from_numpy(starts[decodes:] - decodes).int().to(device),
            groups=[GroupInputs(tokens, table, self.table, self.size)],
            max_num_seqs=len(self.req_indices),
            max_len=int(self.lengths.max()),
            num_logits=0,
            host=RowArrays(self.req_indices, self.starts, starts, self.lengths.astype(np.int32)),
        )
