"""Memory of logits processing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from asyncllm.gpu.batch.grammar_masks import num_mask_words
from asyncllm.gpu.batch.sampling_inputs import (
    LOGITS_PROCESSING_STAGES,
    LogitsTables,
    SamplingRows,
    SamplingStages,
    TopLogprobs,
)
from asyncllm.gpu.batch.sampling_table import LOGITS_PROCESSING_PARAMS
from asyncllm.gpu.execution_mode import ESTIMATED_GRAPH_BYTES, graph_reserve_bytes
from asyncllm.gpu.ops import logits as logits_ops
from asyncllm.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_IDS

CPU = torch.device("cpu")
ROWS, VOCAB = 48, 8192
STAGES = [
    SamplingStages.PENALTIES,
    SamplingStages.TOKEN_CONSTRAINTS,
    SamplingStages.MASKS,
    LOGITS_PROCESSING_STAGES,
]


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that torch holds at once of what ``work`` allocates, inside of its ops too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        work()
    results: Any = trace.profiler.kineto_results  # pyright: ignore[reportOptionalMemberAccess]
    sizes = [event for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(sizes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def make_rows() -> SamplingRows:
    """Every row with a mask, rules and penalties of its own."""
    random = torch.Generator().manual_seed(1)
    tables = LogitsTables(ROWS, VOCAB, CPU)
    tables.allocate(LOGITS_PROCESSING_STAGES)
    for table in (tables.allowed, tables.in_prompt):
        table.random_(generator=random)
    tables.bias_ids.random_(0, VOCAB, generator=random)
    tables.bias_values.normal_(generator=random)
    tables.stop_ids.random_(0, VOCAB, generator=random)
    tables.counts.random_(0, 3, generator=random)
    lines = torch.arange(ROWS + 1)

    def draw(low: float, high: float) -> Tensor:
        return torch.empty(ROWS + 1).uniform_(low, high, generator=random)

    values = (
        (lines % 2).int(), (lines % MAX_LOGIT_BIASES).int(), (lines % MAX_STOP_IDS).int(),
        lines, lines,
        draw(0.5, 2), draw(-1, 1), draw(-1, 1),
    )  # fmt: skip
    return SamplingRows(
        req_indices=lines[:-1].flip(0),
        positions=lines[:-1] % 20,
        host_token_ids=lines[:-1] - 3,
        last_sampled_tokens=lines,
        params=dict(zip(LOGITS_PROCESSING_PARAMS, values, strict=True)),
        tables=tables,
        mask_slots=lines[:-1] % 5 - 1,
        mask_words=torch.randint(0, 2**31, (4, num_mask_words(VOCAB)), generator=random).int(),
    )


def make_logits(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("stages", STAGES, ids=str)
def test_processing_takes_declared_fields(monkeypatch, stages, dtype):
    """The result, and temporaries of a sixth of the batch."""
    monkeypatch.setattr(logits_ops, "CHUNK_ELEMENTS", 8 * VOCAB)
    logits, rows = make_logits(dtype), make_rows()
    found = peak_bytes(lambda: logits_ops.process_logits(logits, rows, stages))
    result = 4 * ROWS * VOCAB
    assert result < found <= logits_ops.logits_processing_bytes(ROWS, VOCAB) < 2.2 * result


def test_log_probabilities_take_no_more(monkeypatch):
    monkeypatch.setattr(logits_ops, "CHUNK_ELEMENTS", 8 * VOCAB)
    logits, out = make_logits(), TopLogprobs(ROWS, 20, CPU)
    tokens = torch.arange(ROWS)
    found = peak_bytes(lambda: logits_ops.top_logprobs(logits, tokens, out))
    assert 0 < found <= logits_ops.logits_processing_bytes(8, VOCAB)


@pytest.mark.parametrize("elements", [1, 7 * VOCAB + 1], ids=["row by row", "seven rows"])
@pytest.mark.parametrize("stages", STAGES, ids=str)
def test_chunks_change_nothing(monkeypatch, stages, elements):
    logits, whole, cut = make_logits(), make_rows(), make_rows()
    expected = logits_ops.process_logits(logits, whole, stages)
    tokens = torch.arange(ROWS)
    tops = [TopLogprobs(ROWS, 5, CPU) for _ in range(2)]
    logits_ops.top_logprobs(logits, tokens, tops[0])
    monkeypatch.setattr(logits_ops, "CHUNK_ELEMENTS", elements)
    found = logits_ops.process_logits(logits, cut, stages)
    assert torch.equal(found, expected)
    assert not torch.equal(found, logits.float())
    assert torch.equal(cut.tables.counts, whole.tables.counts)
    logits_ops.top_logprobs(logits, tokens, tops[1])
    assert torch.equal(tops[0].values, tops[1].values)
    assert torch.equal(tops[0].ids, tops[1].ids)


def test_memory_beside_the_largest_step():
    """For all stages at once: what a graph of the sampling holds, and a mixed step beside it."""
    tables = LogitsTables(ROWS, VOCAB, CPU)
    tables.allocate(LOGITS_PROCESSING_STAGES)
    made = [value for value in vars(tables).values() if isinstance(value, Tensor)]
    num_bytes = sum(value.nbytes for value in made)
    assert LogitsTables.num_bytes(ROWS, VOCAB) == num_bytes
    masks = 4 * ROWS * num_mask_words(VOCAB)
    sampling = 2 * logits_ops.logits_processing_bytes(ROWS, VOCAB) + num_bytes + masks
    assert graph_reserve_bytes((), ROWS, VOCAB, 2) == sampling + 2 * ROWS * VOCAB
    assert (
        graph_reserve_bytes((1, 2), ROWS, VOCAB, 4)
        == sampling + 4 * ROWS * VOCAB + 2 * ESTIMATED_GRAPH_BYTES
    )
