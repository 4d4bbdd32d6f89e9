"""The decode step on static buffers, with traces for graphs and a late stream."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from dataclasses import replace
from itertools import chain, cycle, repeat
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncllm.core.batch import SlotAssignment, StepBatch
from asyncllm.core.executor import StepOutOfMemoryError
from asyncllm.gpu import model_runner, step_runner
from asyncllm.gpu.batch.block_table import BlockTable
from asyncllm.gpu.batch.grammar_masks import GrammarMasks
from asyncllm.gpu.batch.host_buffer import HostBuffer
from asyncllm.gpu.batch.sampling_inputs import LOGITS_PROCESSING_STAGES, SamplingStages, TopLogprobs
from asyncllm.gpu.batch.sampling_table import SCALAR_PARAMS
from asyncllm.gpu.batch.step_buffer import StepBuffer, StepLimits, StepSizes
from asyncllm.gpu.graph.cuda_graphs import (
    GraphCapturer,
    GraphKey,
    StepGraphs,
    StepPart,
    default_batch_sizes,
)
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.models.language_model import StepOutput
from asyncllm.gpu.ops.torch_attention import CapturablePlan, TorchAttention
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.sample.sampling_state import SamplingState
from asyncllm.gpu.step_runner import StepRunner
from asyncllm.sampling_params import SamplingParams
from tests.driver import UNCHECKED, Driver, Sequence, outputs_of, packed, unchecked
from tests.dummy_runner import MODEL
from tests.fakes import engine_on
from tests.slow import slow_but
from tests.static_runner import (
    CPU,
    LateStream,
    TraceRecorder,
    make_decoder,
    make_runner,
    replay_of,
    steps_of,
    storages,
)
from tests.triton.checks import check_step_state

SHAPES = {
    "llama": MODEL,
    "qwen3": replace(MODEL, architecture="Qwen3ForCausalLM", qk_norm=True),
    "window": replace(MODEL, sliding_window=7, sliding_layers=(True, False)),
}
GREEDY = SamplingParams(temperature=0.0, seed=0)
KINDS = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=7),
    SamplingParams(temperature=1.3, top_k=20, seed=8),
    SamplingParams(temperature=0.8, top_p=0.8, min_p=0.02, seed=9),
]
"""What the device draws without the host."""

STAGED_KINDS = [
    SamplingParams(temperature=0.9, seed=7, logprobs=2),
    SamplingParams(temperature=0.0, seed=0, repetition_penalty=1.4),
    SamplingParams(temperature=0.7, seed=3, logit_bias={5: 2.0}, presence_penalty=0.5),
    SamplingParams(temperature=1.1, seed=4, allowed_token_ids=range(0, 128, 3), logprobs=0),
    SamplingParams(temperature=0.8, seed=5, min_tokens=4, stop_token_ids=range(64), top_k=9),
    SamplingParams(temperature=1.0, seed=6, frequency_penalty=0.7, top_p=0.9),
]
"""What takes more stages than the draw, and not the host."""


def shift(output: list[int], logits: Tensor) -> Tensor:
    return logits.roll(len(output))


HOST_KINDS = [
    SamplingParams(temperature=0.9, seed=7, logits_processors=[shift]),
    SamplingParams(temperature=0.0, seed=0, repetition_penalty=1.4, logits_processors=[shift]),
    SamplingParams(temperature=0.7, seed=3, logit_bias={5: 2.0}, presence_penalty=0.5),
]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=slow_but(SHAPES, "window"))
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return make_decoder(SHAPES[request.param])


@pytest.fixture(scope="module")
def llama() -> Decoder:
    return make_decoder(MODEL)


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(128) for _ in range(draw.randint(1, 30))] for _ in range(count)]


def outputs(
    runner: ModelRunner,
    asked: list[list[int]],
    kinds: list[SamplingParams] = KINDS,
    *,
    depth: int = 1,
    chunk: int = 0,
) -> list[list[int]]:
    driver = Driver(runner)
    seqs = [driver.add(p, 9 + i % 4, kinds[i % len(kinds)]) for i, p in enumerate(asked)]
    driver.run(seqs, chunk=chunk, depth=depth)
    assert not any(seq.error for seq in seqs)
    return [seq.outputs for seq in seqs]


def alone(
    decoder: Decoder, asked: list[list[int]], kinds: list[SamplingParams] = KINDS
) -> list[list[int]]:
    """Each on the plain path, by itself."""
    runner = make_runner(decoder, capturer=None, max_num_seqs=1)
    found = [
        outputs_of(runner, prompt, 9 + i % 4, kinds[i % len(kinds)])
        for i, prompt in enumerate(asked)
    ]
    assert len({token for tokens in found for token in tokens}) > 20
    return found


def one(decoder: Decoder, prompt: list[int], count: int, params: SamplingParams) -> list[int]:
    """By itself on the plain path."""
    return outputs_of(make_runner(decoder, capturer=None), prompt, count, params)


def poisoning(runner: ModelRunner) -> None:
    """From now on a replay finds rubbish in all that it has to compute or ignore."""
    steps, replay = steps_of(runner), replay_of(runner)
    capturer, memory = replay.graphs._capturer, steps.memory
    assert isinstance(capturer, TraceRecorder)
    derived = [f"slots_{group}" for group in range(len(memory.block_tables))]

    def poison() -> None:
        segments = replay.piecewise
        if segments is not None and segments._context is not None:
            # A mixed step, whose sections the host has derived: what its segments hand on.
            for (place, *_), tensor in segments._static_tensors.items():
                if place != "out":
                    tensor.fill_(1e4)
            return
        for name in ("token_ids", "seq_lens", *derived):
            memory.buffer.tensors[name].fill_(77)
        memory.sampled_tokens.fill_(77)
        memory.last_sampled_tokens[-1] = 127
        for table in memory.block_tables:
            table[-1] = 3
        # Finite, because plain attention weights what it does not see with zero.
        steps.cache.tensor[:, :, 0] = 1e4

    def poisoned_forward(*arguments: Any) -> StepOutput:
        # The second half of a step finds what the first has left there.
        if replay._logits is not None:
            replay._logits.fill_(torch.nan)
        return forward(*arguments)

    capturer.before = poison
    forward, replay.forward = replay.forward, poisoned_forward


def traced(decoder: Decoder, **settings: Any) -> ModelRunner:
    settings = {"token_counts": (8, 64)} | settings
    runner = make_runner(decoder, capturer=TraceRecorder(), stream=LateStream(), **settings)
    poisoning(runner)
    return runner


# --- the same tokens ---------------------------------------------------------------------


def test_tokens_equal_the_plain_path_in_every_bucket(decoder: Decoder) -> None:
    asked = prompts(20)
    expected = alone(decoder, asked)
    runner = traced(decoder, max_num_seqs=20, num_blocks=400)
    graphs = replay_of(runner).graphs
    assert graphs.buckets == (1, 2, 4, 8, 16, 20)
    for count in (1, 2, 3, 5, 8, 9, 17, 20):
        for depth in (1, 2):
            assert outputs(runner, asked[:count], depth=depth) == expected[:count]
    captured = {record.key for record in graphs.capture_stats}
    assert captured == {GraphKey(bucket) for bucket in graphs.buckets}


def test_host_steps_give_the_same_tokens(llama: Decoder) -> None:
    """Their graph ends at the logits; the rows beside them are drawn by another one."""
    asked, kinds = prompts(7, seed=2), KINDS[:2] + HOST_KINDS
    expected = alone(llama, asked, kinds)
    runner = traced(llama, sizes=(2, 8))
    for depth in (1, 2):
        assert outputs(runner, asked, kinds, depth=depth) == expected
        assert outputs(runner, asked[:2], kinds, depth=depth) == expected[:2]
    segments = replay_of(runner).piecewise
    assert segments is not None
    captured = replay_of(runner).graphs.capture_stats + segments.graphs.capture_stats
    assert {record.key.part for record in captured} == {*StepPart}


def test_stages_of_sampling_run_ahead(llama: Decoder) -> None:
    kinds = KINDS[1:3] + STAGED_KINDS
    asked = prompts(8, seed=12)
    expected = alone(llama, asked, kinds)
    stream = LateStream()
    runner = make_runner(llama, capturer=TraceRecorder(), stream=stream, sizes=(2, 8))
    poisoning(runner)
    for depth in (1, 2):
        assert outputs(runner, asked, kinds, depth=depth) == expected
        assert outputs(runner, asked[:2], kinds, depth=depth) == expected[:2]
    assert stream.most == 2
    graphs = replay_of(runner).graphs
    assert GraphKey(2) in {record.key for record in graphs.capture_stats}
    # Asking for log-probabilities does not change a draw.
    without = [replace(STAGED_KINDS[0], logprobs=None)]
    assert alone(llama, asked[:3], without) == alone(llama, asked[:3], STAGED_KINDS[:1])


def test_logprobs_of_a_static_step(llama: Decoder) -> None:
    found = []
    for runner in (make_runner(llama, capturer=None), traced(llama, sizes=(4,))):
        driver = Driver(runner)
        kinds = [STAGED_KINDS[0], STAGED_KINDS[3], KINDS[1]]
        seqs = [driver.add([i, 5, 9], 6, kind) for i, kind in enumerate(kinds)]
        driver.run(seqs, depth=2)
        found.append([seq.logprobs for seq in seqs])
    plain, static = found
    assert [[len(one.top) for one in seq] for seq in static] == [[2] * 6, [0] * 6, []]
    for one, other in zip(chain(*plain), chain(*static), strict=True):
        assert one.token_id == other.token_id
        assert one.sampled.rank == other.sampled.rank
        assert [c.token_id for c in one.top] == [c.token_id for c in other.top]
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


@pytest.mark.parametrize("depth", slow_but([0, 1, 2], 1))
def test_layers_in_two_kv_groups(llama: Decoder, depth: int) -> None:
    asked = prompts(7, seed=8)
    expected = alone(llama, asked)
    settings: dict[str, Any] = {"layers": ((1,), (0,)), "num_blocks": 200}
    runner = make_runner(llama, capturer=None, **settings)
    if depth:
        runner = traced(llama, sizes=(2, 8), depth=depth, **settings)
    assert [spec.layers for spec in runner.info.kv_groups] == [(1,), (0,)]
    for chunk in (0, 5):
        assert outputs(runner, asked, depth=max(depth, 1), chunk=chunk) == expected
    # With the same blocks the second layer would overwrite the first one's.
    same = make_runner(llama, capturer=None, **settings)
    steps_of(same).forward_pass.model = llama
    assert outputs(same, asked, depth=1) != expected


def test_prefill_in_chunks_beside_decodes(decoder: Decoder) -> None:
    asked = prompts(6, seed=3)
    runner, expected = traced(decoder, sizes=(8,)), alone(decoder, asked)
    for chunk in (1, 3, 8):
        assert outputs(runner, asked, depth=2, chunk=chunk) == expected


def test_batches_above_the_largest_bucket_run_without_a_graph(llama: Decoder) -> None:
    asked = prompts(6, seed=4)
    runner = traced(llama, sizes=(2, 4))
    assert outputs(runner, asked, depth=2) == alone(llama, asked)
    assert {record.key.bucket for record in replay_of(runner).graphs.capture_stats} <= {2, 4}


def test_captured_at_start(llama: Decoder) -> None:
    asked = prompts(6, seed=6)
    runner = traced(llama)
    said: list[tuple[int, int]] = []
    runner.capture_graphs(lambda done, total: said.append((done, total)))
    assert said == [(done, 6) for done in range(7)]
    graphs = replay_of(runner).graphs
    assert [record.key.bucket for record in graphs.capture_stats] == [8, 4, 2, 1]
    assert outputs(runner, asked, depth=2) == alone(llama, asked)
    assert len(graphs.capture_stats) == 4


def test_many_new_blocks_at_once(llama: Decoder) -> None:
    """More changes of the block table than a host block holds."""
    prompt = prompts(1, seed=7)[0] * 3
    runner = traced(llama, max_num_seqs=2, block_size=1)
    # All but the last token is a prefix hit: a decode step brings the whole table.
    driver = Driver(runner)
    first = driver.add(prompt, 9, GREEDY)
    driver.launch([(first, 0)])
    driver.collect()
    second = driver.add(prompt, 9, GREEDY)
    driver.share(first, second, len(prompt) - 1)
    while not second.done:
        driver.launch([(second, 0)])
        driver.collect()
    assert second.outputs == one(llama, prompt, 9, GREEDY)


def test_row_with_nan_logits_ends_alone(llama: Decoder) -> None:
    runner = traced(llama)
    driver = Driver(runner)
    good, bad = driver.add([1, 2, 3], 6, GREEDY), driver.add([4, 5, 6], 6, GREEDY)
    driver.launch([(good, 0), (bad, 0)])
    driver.collect()
    steps_of(runner).cache.tensor[:, :, bad.blocks[0][0]] = torch.nan
    driver.launch([(good, 0), (bad, 0)])
    driver.collect()
    assert str(bad.error) == "the model's logits are not finite numbers"
    driver.release(bad)
    while not good.done:
        driver.launch([(good, 0)])
        driver.collect()
    assert good.outputs == one(llama, [1, 2, 3], 6, GREEDY)


def untraced(decoder: Decoder, ahead: bool, **settings: Any) -> ModelRunner:
    if ahead:
        return make_runner(decoder, capturer=GraphCapturer(), stream=LateStream(), **settings)
    return make_runner(decoder, capturer=None, **settings)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("fields", UNCHECKED[::3], ids=lambda fields: next(iter(fields)))
@pytest.mark.parametrize("ahead", slow_but([False, True], True))
def test_unassignable_request_ends_alone(
    llama: Decoder, fields: dict[str, Any], ahead: bool
) -> None:
    """With a step in flight, the next one computes its row before the core was told."""
    asked = prompts(4, seed=8)
    kinds = [KINDS[1], unchecked(**fields), HOST_KINDS[1], KINDS[2]]
    expected = alone(llama, asked, [KINDS[1], GREEDY, *kinds[2:]])
    runner = untraced(llama, ahead)
    for chunk in (0, 3):
        driver = Driver(runner)
        seqs = [driver.add(p, 9 + i, kinds[i]) for i, p in enumerate(asked)]
        driver.run(seqs, chunk=chunk, depth=2)
        assert isinstance(seqs[1].error, (ArithmeticError, TypeError, ValueError))
        assert [seq.outputs for seq in seqs] == [expected[0], [], *expected[2:]]
    # Its slot is as good as any other afterwards.
    assert outputs(runner, asked[:1], KINDS[1:2], depth=2) == expected[:1]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), StepOutOfMemoryError),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), torch.AcceleratorError),
    ],
)
def test_device_error_in_assignment_is_not_one_requests(
    llama: Decoder, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(SamplingState, "add_request", fail)
    for ahead in (False, True):
        runner = untraced(llama, ahead)
        driver = Driver(runner)
        driver.launch([(driver.add([1, 2, 3], 6, HOST_KINDS[1]), 0)])
        with pytest.raises(kind):
            runner.collect()


# --- what a trace refers to --------------------------------------------------------------


def tensors_of(value: object, seen: set[int] | None = None) -> list[Tensor]:
    """Every tensor that an object of ours holds."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_of(item, seen)]
    if isinstance(value, (list, tuple, set)):
        return [t for item in value for t in tensors_of(item, seen)]
    if not type(value).__module__.startswith("asyncllm"):
        return []
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [*slots, *getattr(value, "__dict__", ())]
    return [t for name in names for t in tensors_of(getattr(value, name, None), seen)]


def test_traced_tensors_are_persistent(decoder: Decoder) -> None:
    capturer = TraceRecorder()
    runner = make_runner(
        decoder, capturer=capturer, stream=LateStream(), sizes=(2, 10), max_num_seqs=10,
        num_blocks=120,
    )  # fmt: skip
    outputs(runner, prompts(10), KINDS + STAGED_KINDS, depth=2)
    steps, logits = steps_of(runner), replay_of(runner)._logits
    memory = steps.memory
    allowed = storages(
        [
            memory.buffer.memory,
            *memory.block_tables,
            memory.last_sampled_tokens,
            memory.sampled_tokens,
            *([] if logits is None else [logits]),
            *(table for table in vars(memory.tables).values() if isinstance(table, Tensor)),
            *([] if memory.logprobs is None else [memory.logprobs.values, memory.logprobs.ids]),
            steps.cache.tensor,
            *tensors_of(decoder),
        ]
    )
    parts = {record.key.part for record in replay_of(runner).graphs.capture_stats}
    assert parts >= {StepPart.FORWARD, StepPart.SAMPLE}
    for trace in capturer.traces:
        assert len(trace.constants) > 8
        assert storages(trace.constants) <= allowed
        reads = ("aten._local_scalar_dense", "aten.nonzero", "aten.item")
        assert not {op for op in trace.ops if op.startswith(reads)}


# --- graphs ------------------------------------------------------------------------------


def test_a_bucket_is_the_smallest_that_fits() -> None:
    graphs = StepGraphs(lambda key: None, GraphCapturer(), (8, 2, 2, 4))
    assert graphs.buckets == (2, 4, 8)
    assert [graphs.bucket(rows) for rows in (1, 2, 3, 8, 9)] == [2, 2, 4, 8, None]
    assert default_batch_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert [size for size in default_batch_sizes(512) if 240 < size < 280] == [248, 256, 272]
    assert default_batch_sizes(600)[-2:] == (512, 600)


def test_a_graph_is_recorded_once_per_key() -> None:
    runs: list[GraphKey] = []
    graphs = StepGraphs(runs.append, GraphCapturer(), (2, 4))
    half, masked = StepPart.FORWARD, (StepPart.SAMPLE, SamplingStages.MASKS)
    for rows, key in ((1, ()), (2, ()), (2, (half,)), (3, ()), (5, ()), (2, masked), (1, ())):
        graphs.run(GraphKey(rows, *key))
    whole, small = GraphKey(4), GraphKey(2)
    # The first step of a kind is padded to the largest bucket.
    halves = [GraphKey(4, half), whole, GraphKey(5), GraphKey(4, *masked)]
    assert runs == [whole, small, *halves, small]
    assert [record.key for record in graphs.capture_stats] == [
        whole,
        small,
        GraphKey(4, half),
        GraphKey(4, *masked),
    ]


class TorchCalls(TorchDispatchMode):
    """Ops with the dtypes of their tensors, by which torch chooses kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtypes = [str(value.dtype) for value in args if isinstance(value, Tensor)]
        self.seen.add((str(func), *dtypes))
        return func(*args, **(kwargs or {}))


def test_the_start_calls_every_op_of_the_stages_of_sampling(llama: Decoder) -> None:
    runner = make_runner(llama, capturer=GraphCapturer())
    step = steps_of(runner).memory
    with TorchCalls() as warm:
        runner.warm_up()
    assert not step.tables.allocated_stages
    assert step.masks is None
    vocab = llama.model.vocab_size
    step.masks, out = GrammarMasks(8, vocab, CPU), TopLogprobs(8, 20, CPU)
    step.tables.allocate(LOGITS_PROCESSING_STAGES)
    logits, rows = torch.zeros(3, vocab), step.sampling_rows(3)
    with torch.inference_mode(), TorchCalls() as called:
        llama.ops.process_logits(logits, rows, LOGITS_PROCESSING_STAGES)
        llama.ops.top_logprobs(logits, step.sampled_tokens[:3], out)
    assert len(called.seen) > 20
    assert called.seen <= warm.seen


def test_closing_drops_every_tensor_before_memory_is_given_back(
    llama: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(llama, capturer=GraphCapturer(), stream=LateStream(), sizes=(2, 8))
    outputs(runner, prompts(5), KINDS + HOST_KINDS, depth=2)
    memory, cache = steps_of(runner).memory, steps_of(runner).cache
    kept = [
        weakref.ref(tensor)
        for tensor in (memory.block_tables[0], memory.sampled_tokens, cache.tensor)
    ]
    del memory, cache
    alive: list[list[object]] = []

    def release_cached_memory(device: torch.device) -> bool:
        alive.append([ref() for ref in kept])
        return True

    monkeypatch.setattr(model_runner, "release_cached_memory", release_cached_memory)
    gc.collect()
    gc.disable()
    try:
        runner.close()
    finally:
        gc.enable()
    assert alive == [[None] * 3]
    assert runner.graphs is None


@pytest.mark.parametrize("block_size", [1, 16])
def test_the_plain_step_state(block_size: int) -> None:
    check_step_state(TorchOps().fill_decode_inputs, "cpu", block_size)


def test_host_buffers_see_every_sampling_parameter_change() -> None:
    """Three buffers take turns, of which each change finds other ones behind."""
    state = SamplingState(2, 100, 4)
    limits = StepLimits(2, 2, 1, table_rows=3)
    buffers = cycle([HostBuffer(limits, 100, 4, [8]) for _ in range(3)])
    for number, uses in enumerate((1, 3, 1, 2, 4)):
        params = SamplingParams(temperature=0.5 + number, top_k=number, seed=number).resolve(
            {"presence_penalty": number / 9}, {}, lambda: 0
        )
        state.add_request(SlotAssignment(number % 2, "r", [1], 1, ([1],), params))
        for _ in range(uses):
            buffer = next(buffers)
            buffer.set_scalar_params(state)
            found = {name: buffer.arrays[name].tolist() for name in SCALAR_PARAMS}
            assert found == {name: state.sections.arrays[name].tolist() for name in SCALAR_PARAMS}
            assert found["temperature"][number % 2] == 0.5 + number
            assert found["top_k"][number % 2] == number


# --- one step ahead ----------------------------------------------------------------------


def test_a_step_behind_a_token_of_the_host_waits_for_it(llama: Decoder) -> None:
    """A scheduler makes no such step; one that does costs time and not the tokens."""
    stream = LateStream()
    runner = make_runner(llama, capturer=GraphCapturer(), stream=stream)
    asked = prompts(4)
    assert outputs(runner, asked, HOST_KINDS, depth=2) == alone(llama, asked, HOST_KINDS)
    assert stream.most == 1


def test_rows_that_need_the_host_wait_alone(llama: Decoder) -> None:
    kinds = [KINDS[1], *HOST_KINDS[:2], SamplingParams(temperature=1.2, seed=3, logprobs=-1)]
    asked = prompts(5, seed=5)
    stream = LateStream()
    driver = Driver(make_runner(llama, capturer=GraphCapturer(), stream=stream, sizes=(2, 8)))
    seqs = [driver.add(p, 12, kinds[i % 4], needs_host=i % 4 > 0) for i, p in enumerate(asked)]
    sizes: list[list[bool]] = []
    launch = driver.launch

    def recording(work: list[tuple[Sequence, int]]) -> StepBatch:
        sizes.append([seq in dict(work) for seq in seqs])
        return launch(work)

    driver.launch = recording
    driver.run(seqs, depth=2)
    assert stream.most == 2
    assert sizes == [[True, i % 2 == 0, i % 2 == 0, i % 2 == 0, True] for i in range(12)] + [
        [False, i % 2 == 0, i % 2 == 0, i % 2 == 0, False] for i in range(12, 23, 2)
    ]
    for seq, params in zip(seqs, [*kinds, kinds[0]], strict=True):
        assert seq.outputs == one(llama, seq.prompt, 12, params)
    assert [found.token_id for found in seqs[3].logprobs] == seqs[3].outputs
    assert {len(one.top) for one in seqs[3].logprobs} == {128}


def test_a_slot_changes_hands_before_the_host_draws_its_token(llama: Decoder) -> None:
    """A paused request leaves its slot with a token in flight, which is its own all the same."""
    params = [
        SamplingParams(temperature=0.9, seed=5, repetition_penalty=1.4, logits_processors=[shift]),
        SamplingParams(temperature=0.3, seed=6, logits_processors=[shift], presence_penalty=1.0),
    ]
    asked = prompts(2, seed=4)
    expected = [one(llama, asked[0], 4, params[0]), one(llama, asked[1], 1, params[1])]
    runner = untraced(llama, True, max_num_seqs=1)
    driver = Driver(runner)
    first, second = (driver.add(p, 9, one) for p, one in zip(asked, params, strict=True))
    for _ in range(3):
        driver.launch([(first, 0)])
        driver.collect()
    driver.launch([(first, 0)])
    driver.release(first)
    driver.launch([(second, 0)])
    assert second.req_index == 0
    # Both are queued, and neither has run: two times the work in two pieces and its event.
    assert len(steps_of(runner).stream._queue) == 6
    driver.collect()
    driver.collect()
    assert [first.outputs, second.outputs] == expected


def test_host_row_under_grammar_beside_failing_row(llama: Decoder) -> None:
    def refuse(output: list[int], logits: Tensor) -> Tensor:
        if len(output) == 2:
            raise KeyError("on purpose")
        return logits

    def even(tokens: list[int]) -> bytes:
        return packed(range(len(tokens) % 2, 128, 2), 128)

    scaled = replace(KINDS[1], logits_processors=[lambda tokens, row: row * (1 + len(tokens) % 2)])
    found = []
    for runner in (untraced(llama, False), untraced(llama, True)):
        driver = Driver(runner)
        seqs = [
            driver.add([1, 2, 3], 8, scaled, mask=even, needs_host=True),
            driver.add([4, 5], 8, replace(KINDS[1], logits_processors=[refuse]), needs_host=True),
            driver.add([6, 7, 8], 8, KINDS[2], mask=even),
            driver.add([9], 8, KINDS[3]),
        ]
        driver.run(seqs, depth=2)
        assert [len(seq.outputs) for seq in seqs] == [8, 2, 8, 8]
        assert isinstance(seqs[1].error, KeyError)
        assert all(t % 2 == (i + 3) % 2 for i, t in enumerate(seqs[0].outputs))
        found.append([seq.outputs for seq in seqs])
    assert found[0] == found[1]


def test_launch_error_is_raised_at_collect(llama: Decoder) -> None:
    runner = make_runner(llama, capturer=GraphCapturer(), stream=LateStream())
    driver = Driver(runner)
    seq = driver.add([1, 2, 3], 6, GREEDY)
    driver.launch([(seq, 0)])
    beyond = SlotAssignment(99, "beyond", [1], 1, ([1],), GREEDY)
    runner.launch(StepBatch(1, [99], [0], [1], [True], 1, 1, assignments=[beyond]))
    driver.collect()
    assert len(seq.outputs) == 1
    with pytest.raises(IndexError):
        runner.collect()


# --- under the scheduler -----------------------------------------------------------------


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize("depth", slow_but([1, 2], 2))
@pytest.mark.parametrize("seed", slow_but([12, 11], 12))
async def test_aborts_and_preemptions_under_the_scheduler(
    llama: Decoder, depth: int, seed: int
) -> None:
    print("seed", seed)
    draw = random.Random(seed)
    kinds = KINDS + STAGED_KINDS + HOST_KINDS[:1]
    asked = [
        ([draw.randrange(128) for _ in range(draw.randint(1, 40))], draw.choice(kinds))
        for _ in range(24)
    ]
    stream = LateStream()
    runner = make_runner(
        llama, capturer=TraceRecorder(), stream=stream, depth=depth, max_num_seqs=6,
        num_blocks=40, sizes=(2, 6),
    )  # fmt: skip
    poisoning(runner)
    async with engine_on(runner) as engine:

        async def ask(prompt: list[int], params: SamplingParams) -> list[int] | None:
            leave_after = draw.choice([None, None, 1, 5, 9])
            tokens: list[int] = []
            async with engine.stream(prompt, replace(params, max_tokens=30)) as running:
                async for delta in running:
                    tokens += delta.token_ids
                    if leave_after is not None and len(tokens) >= leave_after:
                        return None
            return tokens

        found = await asyncio.gather(*(ask(*request) for request in asked))
        stats = engine.stats()
        assert stats.num_preemptions > 0
        assert stats.num_free_blocks == stats.num_blocks
    assert stream.most == depth
    for (prompt, params), tokens in zip(asked, found, strict=True):
        if tokens is not None:
            plain = one(llama, prompt, 30, params)
            # The driver goes on behind a stop token.
            ends = (i for i, token in enumerate(plain) if token in params.stop_token_ids)
            assert tokens == plain[: next((i + 1 for i in ends if i >= params.min_tokens), 30)]


# --- the tests bite ----------------------------------------------------------------------


WRITE, PLAN, CHANGES = (
    StepBuffer.write,
    TorchAttention._make_capturable_plan,
    BlockTable.pop_changes,
)


def unpadded(self: StepBuffer, batch: StepBatch, *rows: Any) -> StepSizes:
    before = {name: array.copy() for name, array in self.arrays.items()}
    sizes = WRITE(self, batch, *rows)
    for name in ("req_indices", "starts", "sampled_req_indices", "sampled_positions"):
        self.arrays[name][sizes.rows :] = before[name][sizes.rows :]
    return sizes


def baked(self: TorchAttention, *step: Any) -> CapturablePlan:
    found = PLAN(self, *step)
    return replace(found, masked_keys=torch.tensor(found.masked_keys.tolist()))


MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "one host block": (step_runner, "cycle", lambda buffers: repeat(buffers[0])),
    "token 0 for one that is not known": (step_runner, "PLACEHOLDER_TOKEN", 0),
    "rows stay behind the batch": (StepBuffer, "write", unpadded),
    "lengths baked in": (TorchAttention, "_make_capturable_plan", baked),
    "blocks of the last tenant": (
        BlockTable, "pop_changes", lambda self: tuple(each[1:] for each in CHANGES(self)),
    ),
    "same seeds": (HostBuffer, "set_scalar_params", lambda self, state: None),
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(llama: Decoder) -> list[list[int]]:
    asked = prompts(13)
    return alone(llama, asked[:8]) + alone(llama, asked[8:])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_sees_mistakes(
    llama: Decoder, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    asked = prompts(13)
    monkeypatch.setattr(*MISTAKES[mistake])
    runner = traced(llama, sizes=(8,))
    try:
        found = outputs(runner, asked[:8], depth=2) + outputs(runner, asked[8:], depth=2)
    except (AssertionError, IndexError, RuntimeError):
        return
    assert found != expected


def test_a_late_token_of_a_slots_last_tenant_is_void(
    llama: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would overwrite the prompt of the next one, which is computed in chunks."""

    def tokens(runner: ModelRunner) -> list[int]:
        driver = Driver(runner)
        first = driver.add([1, 2, 3], 6, GREEDY)
        driver.launch([(first, 0)])
        driver.collect()
        driver.launch([(first, 0)])
        driver.release(first)
        second = driver.add([9, 8, 7, 6, 5, 4, 3, 2], 6, GREEDY)
        driver.launch([(second, 2)])
        assert second.req_index == 0
        driver.collect()
        driver.collect()
        driver.run([second], depth=2)
        return second.outputs

    expected = one(llama, [9, 8, 7, 6, 5, 4, 3, 2], 6, GREEDY)
    assert tokens(traced(llama, max_num_seqs=1)) == expected
    store_tokens = StepRunner.store_tokens

    def forgetful(self: StepRunner, step: Any, sampled: np.ndarray) -> None:
        step.epochs = self.input_batch.epochs[step.req_indices]
        store_tokens(self, step, sampled)

    monkeypatch.setattr(StepRunner, "store_tokens", forgetful)
    assert tokens(traced(llama, max_num_seqs=1)) != expected
