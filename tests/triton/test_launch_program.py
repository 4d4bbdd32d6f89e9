"""What a program of launches is made of, and when it gives way to the ops one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from triton import knobs

from asyncllm.core.batch import PromptSpan, StepBatch
from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.batch.step_inputs import ModelInputs
from asyncllm.gpu.graph import mixed_steps
from asyncllm.gpu.graph.cuda_graphs import EagerCapturer
from asyncllm.gpu.graph.decode_runner import DecodeRunner
from asyncllm.gpu.graph.mixed_steps import program_bytes
from asyncllm.gpu.kv_cache import KVGroup
from asyncllm.gpu.models.attention_kinds import kv_groups
from asyncllm.gpu.ops.buffer_layout import Lifetime, lay_out
from asyncllm.gpu.ops.recorder import Unrecordable
from asyncllm.gpu.ops.triton.activation import silu_mul
from asyncllm.gpu.ops.triton.expert_pairs import sort_kernel, sort_pairs
from asyncllm.gpu.ops.triton.experts import ExpertTiles
from asyncllm.gpu.ops.triton.launch_recorder import record
from asyncllm.gpu.ops.triton.launcher import Form, derived_rows, usual_rows
from asyncllm.gpu.ops.triton.norm import TritonRMSNorm, norm_kernel
from asyncllm.gpu.ops.triton.op_set import TritonOps
from asyncllm.gpu.ops.triton.recording import RecordedCall, RecordedLaunch
from tests.hypothesis_settings import examples
from tests.triton.test_launcher import STREAM, Driver, driving, mixed_step
from tests.triton.test_warm_up import CPU, MODELS, MOE, make_step

LIFETIMES = st.builds(
    lambda num_bytes, first, length: Lifetime(num_bytes, first, first + length),
    st.integers(1, 300), st.integers(0, 12), st.integers(0, 5),
)  # fmt: skip


@pytest.fixture
def driver() -> Iterator[Driver]:
    with driving() as made:
        yield made


@given(st.lists(LIFETIMES, max_size=14), st.sampled_from([1, 64]))
@examples(100)
def test_buffers_in_use_at_once_do_not_overlap(buffers: list[Lifetime], alignment: int) -> None:
    starts, total = lay_out(buffers, alignment)
    assert all(start % alignment == 0 for start in starts)
    ends = [start + each.num_bytes for start, each in zip(starts, buffers, strict=True)]
    assert max(ends, default=0) <= total
    for i, one in enumerate(buffers):
        for j, other in enumerate(buffers[:i]):
            if one.first <= other.last and other.first <= one.last:
                assert starts[i] >= ends[j] or starts[j] >= ends[i]
    # No room is kept for what is over: never more than all that is in use at some op.
    assert total <= sum(-(-each.num_bytes // alignment) * alignment for each in buffers)


# --- what can be recorded --------------------------------------------------------------


WEIGHT, TABLE, SQUARE = torch.ones(8), torch.ones(5, 8), torch.ones(8, 8)
Run = Callable[[Sequence[ModelInputs]], Tensor]


def hidden(inputs: Sequence[ModelInputs]) -> Tensor:
    return torch.nn.functional.embedding(inputs[0].token_ids, TABLE)


def test_ops_of_a_step_are_taken_down() -> None:
    def run(inputs: Sequence[ModelInputs]) -> Tensor:
        x = hidden(inputs)
        normed = TritonRMSNorm(WEIGHT, 1e-6)(x)
        x = torch.nn.functional.linear(normed, SQUARE, WEIGHT)
        rows = x[inputs[0].logits_indices]
        return rows.mul_(2.0)

    recording = record(run, [16], 64)
    assert recording.num_inputs == 4
    ops: list[Any] = recording.ops
    kinds = [getattr(op, "function", None) or op.bound for op in ops]
    assert kinds[0] == kinds[3] == torch.index_select
    assert kinds[1].launcher is norm_kernel
    assert kinds[2] is torch.addmm
    assert kinds[4] is torch.mul
    assert [op.size for op in recording.ops] == [0, 0, 0, 1, 1]
    # Two buffers are in use at once, of 8 floats a token.
    assert recording.num_bytes(64) == 2 * 64 * 32


def test_sizes_that_follow_from_those_of_a_step() -> None:
    """Of all tokens, and of those that are wanted, for which launch shapes of few are chosen."""

    def run(inputs: Sequence[ModelInputs]) -> Tensor:
        part = hidden(inputs)
        for wanted in (None, inputs[0].logits_indices):
            part = part if wanted is None else part[wanted]
            usual.append(usual_rows(part))
            sort_pairs(part.new_empty((len(part), 2), dtype=torch.int32), 7, 16)
            silu_mul(part.new_empty((len(part), 2)))
            norm_kernel.bind(WIDTH=8, BLOCK=8, ADD=False, SCALED=False, SUM_SCALED=False)(
                (derived_rows(part, ExpertTiles(2, 16, 7)), 3), part, part, part, WEIGHT, 1e-6,
                1.0, 1.0, 8, 8, 8,
            )  # fmt: skip
        return part.to(torch.bfloat16)

    usual: list[int] = []
    recording = record(run, [16], 40)
    assert usual == [40, 1] * 2
    launches: list[Any] = [op for op in recording.ops if isinstance(op, RecordedLaunch)]
    sizes = recording.sizes((100, 5, 0, 0))
    grids = [(sizes[op.size], *op.grid) for op in launches]
    assert grids == [
        (7, 1, 1), (1, 1, 1), (100, 1, 1), (19, 3, 1),
        (7, 1, 1), (1, 1, 1), (5, 1, 1), (7, 3, 1),
    ]  # fmt: skip
    sorts = [sizes[op.numbers[0].size] for op in launches if op.bound.launcher is sort_kernel]
    assert sorts == [100, 5]
    # An embedding, four launches, and the choice of rows is on wanted ones already.
    assert recording.num_token_ops == 5
    assert isinstance(recording.ops[-1], RecordedCall)
    assert recording.result is not None
    assert recording.result.dtype == torch.bfloat16


def of_tokens(inputs: Sequence[ModelInputs]) -> Tensor:
    """A number among a kernel's that is the step's tokens."""
    x = hidden(inputs)
    norm_kernel.bind(WIDTH=8, BLOCK=8, ADD=False, SCALED=False, SUM_SCALED=False)(
        (len(x), 1, 1), x, x, x, WEIGHT, 1e-6, 1.0, 1.0, len(x), 8, 8
    )
    return x


def of_blocks(inputs: Sequence[ModelInputs]) -> Tensor:
    x = hidden(inputs)
    norm_kernel.bind(WIDTH=8, BLOCK=8, ADD=False, SCALED=False, SUM_SCALED=False)(
        (len(x) // 16, 1, 1), x, x, x, WEIGHT, 1e-6, 1.0, 1.0, 8, 8, 8
    )
    return x


def back_to_all(inputs: Sequence[ModelInputs]) -> Tensor:
    x = hidden(inputs)
    rows = x[inputs[0].logits_indices]
    silu_mul(x)
    return rows


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (of_tokens, "depends on the number of tokens"),
        (of_blocks, "depends on the number of tokens"),
        (back_to_all, "an op on all tokens behind"),
        (lambda inputs: hidden(inputs).softmax(1), "softmax"),
        (lambda inputs: hidden(inputs) + 1, "add"),
        (lambda inputs: hidden(inputs).mul_(WEIGHT), "by a tensor in place"),
        (lambda inputs: hidden(inputs).new_empty(3, 8), "does not have the step's tokens"),
        (lambda inputs: TABLE, "that no recorded op made"),
        (lambda inputs: hidden(inputs)[None].to(torch.float16), "copy of other than"),
    ],
)
def test_what_cannot_be_recorded(run: Run, message: str) -> None:
    with pytest.raises(Unrecordable, match=message):
        record(run, [16], 64)


def test_meta_tensors_are_launched_by_a_recorder_alone() -> None:
    with pytest.raises(TypeError, match="expected a recorder to be active"):
        silu_mul(torch.empty((3, 8), device="meta"))


# --- a launch as Triton hands it on ----------------------------------------------------


class Nested:
    """Triton's launcher, with the arguments of a kernel in one tuple."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self) -> None:
        self.handed: list[tuple[Any, ...]] = []
        self.launch: Callable[..., None] = lambda *args: self.handed.append(args)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        metadata, _, enter, leave, *args = rest
        self.launch(
            x, y, z, stream, function, True, metadata, enter, leave, None, b"i", tuple(args)
        )


class Flat(Nested):
    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, True, None, *rest)


class Scratch(Nested):
    global_scratch_size = 64


class Other(Nested):
    """Of an order that is not known."""

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        self.launch(stream, function, x, y, z, *rest)


@pytest.mark.parametrize(
    ("kind", "is_direct"), [(Nested, True), (Flat, True), (Scratch, False), (Other, False)]
)
def test_a_form_hands_on_what_the_launcher_does(kind: type[Nested], is_direct: bool) -> None:
    run, arguments = kind(), (10**9, 7, 0.5, None)
    compiled: Any = SimpleNamespace(run=run, function=5, packed_metadata=(4, 1, 0))
    form = Form.of(compiled, arguments)
    assert not run.handed, "it was launched"
    assert (form.launch is run.launch) == is_direct
    others = (10**9 + 16, 8, 0.25, None)
    form.launch(9, 8, 1, 17, *form.rest(others))
    run(9, 8, 1, 17, 5, (4, 1, 0), None, None, None, *others)
    assert run.handed[0] == run.handed[1]


# --- when it runs ----------------------------------------------------------------------


def make(layers: int = 2, **fields: Any) -> DecodeRunner:
    fields = {"sliding_layers": ()} | fields
    return make_step(4096, (), torch.bfloat16, num_layers=layers, **fields)


def groups_of(step: DecodeRunner) -> list[KVGroup]:
    return kv_groups(step.decoder.model, step.decoder.attention, 16)


def test_memory_of_the_program(driver: Driver) -> None:
    """It is told before the KV cache is sized, and is that of the largest step with a program."""
    step = make()
    told = {count: program_bytes(step.decoder, groups_of(step), count) for count in (64, 10**6)}
    step.decoder.set_max_positions(4096)
    mixed_step(step, 3, 9)
    assert step.mixed.programs[-1].capacity == mixed_steps.PROGRAM_TOKENS == 2048
    assert step.mixed.programs[-1].memory.numel() == told[10**6] == 32 * told[64]
    # In bfloat16, at attention: the residual, the norm behind which the rest lies, queries, keys
    # and values, and its output.
    model = step.decoder.model
    heads = 2 * model.num_heads + 2 * model.num_kv_heads
    assert told[64] == 64 * 2 * (2 * model.hidden_size + heads * model.head_dim)


def test_steps_beyond_the_program(driver: Driver) -> None:
    step, runs = make(), []
    decoder: Any = step.decoder
    mixed_step(step, 3, 9)
    program, forward = step.mixed.programs[-1], decoder.forward
    decoder.forward = lambda *args: runs.append(1) or forward(*args)
    for prompt in (program.capacity - 3, program.capacity - 2):
        mixed_step(step, 3, prompt)
    assert len(runs) == 1
    tokens = torch.zeros(program.capacity + 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="expected 2048 at most"):
        program.run([tokens, tokens, tokens[:1], tokens], [])


def test_a_runner_may_do_without(driver: Driver) -> None:
    found = make()
    args = found.decoder, found.cache, found.info, EagerCapturer(), ()
    step = DecodeRunner(*args, record_mixed=False)
    mixed_step(step, 3, 9)
    assert step.mixed.programs == ()


def test_programs_of_experts_share_their_memory(driver: Driver) -> None:
    """Small tiles for up to 64 tokens, and larger ones."""
    step, used = make(**MODELS["experts"]), []
    mixed_step(step, 3, 9)
    small, large = step.mixed.programs
    assert (small.capacity, large.capacity) == (64, 2048)
    assert small.memory is large.memory
    assert small.num_bytes < large.num_bytes == large.memory.numel()
    assert large.num_bytes == program_bytes(step.decoder, groups_of(step), 10**6)
    for program in (small, large):
        run = program.run
        program.run = lambda *args, own=program, run=run: used.append(own.capacity) or run(*args)
    for prompt in (61, 62):
        mixed_step(step, 3, prompt)
    assert used == [64, 2048]


def test_models_that_do_more_run_op_by_op(driver: Driver) -> None:
    routing = replace(MOE.routing, num_groups=2, top_groups=1)
    step = make(experts=replace(MOE, routing=routing))
    mixed_step(step, 3, 9)
    assert step.mixed.programs == ()
    assert program_bytes(step.decoder, groups_of(step), 64) == 0


def test_without_memory_for_it_steps_run_op_by_op(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TritonOps, "load_launches", refuse)
    step = make()
    for _ in range(2):
        mixed_step(step, 3, 9)
    assert step.mixed.programs == ()
    assert [each.getMessage() for each in caplog.records] == [
        "mixed steps are launched op by op: OutOfMemoryError: CUDA out of memory"
    ]


def test_a_profiler_sees_every_launch(driver: Driver) -> None:
    step = make()
    for _ in range(2):
        mixed_step(step, 3, 9)
    seen: list[Any] = []

    def hook(metadata: Any) -> None:
        seen.append(metadata)

    driver.wrapped = 0
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        mixed_step(step, 3, 9)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert len(seen) == driver.wrapped == 6 * 2 + 4
    mixed_step(step, 3, 9)
    assert driver.wrapped == 6 * 2 + 4


def test_inputs_that_are_not_aligned_take_the_path_of_the_jit(driver: Driver) -> None:
    step = make()
    for _ in range(2):
        mixed_step(step, 3, 9)
    run = step.mixed.programs[-1].run

    def shifted(inputs: Sequence[Tensor], *rest: Any) -> Tensor:
        return run([torch.cat((each[:1], each))[1:] for each in inputs], *rest)

    step.mixed.programs[-1].run = shifted
    driver.wrapped = 0
    driver.launches.clear()
    mixed_step(step, 3, 9)
    # Of the rotation, which alone reads them: forms of their own, compiled by the first.
    assert driver.wrapped == 2
    positions = [args[5] for name, *_, args in driver.launches if name == "rope_cache_kernel"]
    assert all(address % 16 == 8 for address in positions)


def test_another_stream(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make()
    for _ in range(2):
        mixed_step(step, 3, 9)
    active: Any = __import__("triton").runtime.driver._active
    for stream in (STREAM, 99, STREAM):
        monkeypatch.setattr(active, "get_current_stream", lambda device, found=stream: found)
        driver.launches.clear()
        mixed_step(step, 3, 9)
        assert {launch[3] for launch in driver.launches} == {stream}


def test_hidden_states_of_prompts_outlive_the_next_step(driver: Driver) -> None:
    step = make()
    batch = InputBatch(2, step.info.max_model_len, step.info.kv_groups)
    given = StepBatch(
        0, [0, 1], [100, 0], [1, 9], [True, True], num_decodes=1,
        prompt_logprobs={1: PromptSpan(2, 5, 1)},
    )  # fmt: skip
    host = next(step.host_buffers)
    step.run(host, 2, batch.prepare(given, CPU, step.block_tables))
    assert host.prompt_hidden is not None
    assert host.prompt_hidden.shape == (3, step.decoder.model.hidden_size)
    memory = step.mixed.programs[-1].memory
    memory.fill_(0)
    kept = host.prompt_hidden.clone()
    memory.fill_(255)
    assert torch.equal(host.prompt_hidden.nan_to_num(), kept.nan_to_num())
    at = host.prompt_hidden.data_ptr() - memory.data_ptr()
    assert not 0 <= at < memory.numel()
