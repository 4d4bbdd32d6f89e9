"""Recorded steps: equal bits, refusals and memory."""

from __future__ import annotations

import logging
import subprocess
import sys
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncllm.core.batch import StepBatch
from asyncllm.errors import EngineError
from asyncllm.gpu import cache_sizing
from asyncllm.gpu.graph.forward_pass import ForwardPass
from asyncllm.gpu.huge_pages import warn_without_huge_pages
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.models.attention_kinds import kv_plan
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.ops.native_attention import NativeAttention
from asyncllm.gpu.ops.native_ops import NativeOps
from asyncllm.gpu.ops.quantise import QUANTISERS
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.profile import recorded_activation_bytes
from asyncllm.native.context import NativeContext
from asyncllm.sampling_params import SamplingParams
from tests.driver import GREEDY, Driver, outputs_of, state_of, watch_outputs
from tests.dummy_runner import MODEL as LLAMA
from tests.dummy_runner import make
from tests.native_library import check_forked_child, each_isa, needs_native
from tests.recorded_runner import (
    PROMPTS,
    QWEN3,
    make_decoder,
    make_runner,
    op_by_op,
    program_of,
    run_program,
)
from tests.static_runner import in_groups

pytestmark = needs_native

MODELS = {
    "tied": LLAMA,
    "norms of q and k": QWEN3,
    "biases": replace(LLAMA, architecture="Qwen2ForCausalLM", attention_bias=True, mlp_bias=True),
    "windows": replace(QWEN3, sliding_window=5, sliding_layers=(True, False, True)),
}


def context_of(decoder: Decoder) -> NativeContext:
    assert isinstance(decoder.ops, NativeOps)
    return decoder.ops.context


def run(runner: ModelRunner, chunk: int) -> tuple[list[Tensor], Tensor, list[list[int]]]:
    """Logits of every step, the KV cache and the tokens of sequences that come one by one."""
    state, logits = state_of(runner), watch_outputs(runner)
    driver = Driver(runner)
    asks = SamplingParams(temperature=0.9, seed=5, prompt_logprobs=1)
    seqs = [driver.add(p, 8, asks if i == 2 else GREEDY) for i, p in enumerate(PROMPTS)]
    for joined in range(1, len(seqs) + 1):
        work = [(seq, min(chunk or 99, seq.known - seq.computed)) for seq in seqs[:joined]]
        driver.launch([(seq, count) for seq, count in work if not seq.done])
        driver.collect()
    driver.run(seqs, chunk=chunk)
    return logits, state.cache.tensor, [seq.outputs for seq in seqs]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def check_equal(
    decoder: Decoder, chunks: tuple[int, ...], layers: tuple[tuple[int, ...], ...] = ()
) -> None:
    for chunk in chunks:
        recorded, plain = (make_runner(decoder, layers=layers) for _ in range(2))
        program_of(recorded)
        found, expected = run(recorded, chunk), run(op_by_op(plain), chunk)
        assert found[2] == expected[2]
        assert len(found[0]) == len(expected[0]) > 20
        for mine, other in zip(found[0], expected[0], strict=True):
            assert mine.shape == other.shape
            assert torch.equal(bits(mine), bits(other))
        # Past the null block, which no row reads.
        assert torch.equal(bits(found[1][:, :, 1:]), bits(expected[1][:, :, 1:]))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("quantised", [None, *QUANTISERS])
def test_program_equals_its_ops(model, quantised):
    check_equal(make_decoder(MODELS[model], quantised=quantised), (0, 1, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each_isa
def test_in_every_dtype_on_every_instruction_set(dtype, isa):
    for quantised, model in (*((q, "windows") for q in (None, *QUANTISERS)), (None, "tied")):
        check_equal(make_decoder(MODELS[model], dtype, isa=isa, quantised=quantised), (7,))


def test_with_several_kv_groups():
    decoder = make_decoder(replace(QWEN3, num_layers=4))
    check_equal(in_groups(decoder, (0, 2), (1, 3)), (5,), layers=((0, 2), (1, 3)))


def test_with_sinks_and_a_soft_cap():
    """Sinks belong to a layer, and not to the plan of its attention."""
    decoder = make_decoder(QWEN3)
    for attention in decoder.attention.values():
        assert isinstance(attention, NativeAttention)
        attention.shape = replace(attention.shape, softcap=2.0)
    generator = torch.Generator().manual_seed(1)
    for layer in decoder.layers:
        layer.mixer.sinks = (torch.randn(4, generator=generator),)
    check_equal(decoder, (5,))


def test_a_step_is_one_native_call(monkeypatch):
    runner = make_runner(make_decoder(QWEN3))
    library = context_of(state_of(runner).model).functions
    calls: list[str] = []
    run_job = library.run_job
    monkeypatch.setattr(library, "run_job", lambda *args: calls.append("run") or run_job(*args))
    driver = Driver(runner)
    seqs = [driver.add(prompt, 4, SamplingParams(temperature=0.0, seed=0)) for prompt in PROMPTS]
    driver.run(seqs, chunk=6)
    assert calls == ["run"] * driver.step


BROKEN = [
    *(("token", value, "(gather|select)") for value in (-1, 128, 2**31 - 1)),
    *(("block", value, "rope_and_cache") for value in (-1, 81, 2**31 - 1)),
    *(("starts", value, "tokens") for value in (-1, 97, 2**62)),
    *(("req_indices", value, "tokens") for value in (-1, 6, 2**62)),
]
"""What is changed in the batch of a running sequence, and the op that notices."""


@pytest.mark.parametrize(("changed", "value", "op"), BROKEN)
@pytest.mark.parametrize("model", ["tied", "norms of q and k"])
def test_an_index_beyond_its_table_is_an_error(changed, value, op, model):
    runner = make_runner(make_decoder(MODELS[model]))
    driver = Driver(runner)
    seq = driver.add(PROMPTS[0], 6)
    driver.launch([(seq, 0)])
    driver.collect()
    fields = {"req_indices": [seq.req_index], "starts": [4], "counts": [5]}
    state = state_of(runner)
    if changed == "token":
        state.input_batch.token_ids[:, 4:9] = value
    elif changed == "block":
        state.input_batch.tables[0].table[:, 1] = value
    else:
        fields[changed] = [value]
    before = state.cache.tensor.clone()
    batch = StepBatch(9, **fields, samples=[False], num_tokens=5)
    with pytest.raises(RuntimeError, match=rf"step, op \d+, {op}: a slot, block or position"):
        step = LaunchedStep(batch)
        state.stream.submit(step, is_early=False)
        state.stream.wait(step)
    assert torch.equal(state.cache.tensor, before)


def test_positions_beyond_the_rope_table_are_an_error():
    decoder = make_decoder(QWEN3)
    decoder.set_max_positions(10)
    driver = Driver(make_runner(decoder))
    driver.launch([(driver.add(PROMPTS[0], 6), 0)])
    with pytest.raises(RuntimeError, match=r"op \d+, rope_and_cache: a slot, block or position"):
        driver.collect()


@pytest.mark.parametrize(
    ("counts", "num_tokens"), [([129], 129), ([3], 4), ([3], 2), ([1] * 7, 7), ([-1], 1)]
)
def test_sizes_that_do_not_fit_are_an_error(counts, num_tokens):
    runner = make_runner(make_decoder(QWEN3))
    recorded, given = program_of(runner), state_of(runner).memory.buffer.arrays
    given["req_indices"][:] = 0
    rows = len(counts)
    given["counts"][:1] = counts[0]
    with pytest.raises(RuntimeError, match=r"step, (op 0, tokens|.* there is room .*): shapes"):
        run_program(recorded.program, rows, num_tokens, 0, 0, 0)
    for sizes in ((4, 2, 0), (2, 3, 0), (2, 0, 3), (2, 1, 2), (2, 0, -1), (3, 0, 2**62)):
        with pytest.raises(
            RuntimeError, match=r"native step, \[1, 3, .* room for \[6, 128, 128, 6, 6\]: shapes"
        ):
            run_program(recorded.program, 1, 3, *sizes)
    given["counts"][:1], given["output_indices"][:1] = 3, 3
    with pytest.raises(RuntimeError, match=r"op \d+, select: a slot, block or position"):
        run_program(recorded.program, 1, 3, 1, 1, 0)


def test_a_forked_child_is_refused():
    runner = make_runner(make_decoder(LLAMA))
    driver = Driver(runner)
    seq = driver.add(PROMPTS[0], 3)
    check_forked_child(lambda: driver.run([seq]))
    driver.run([seq])
    assert len(seq.outputs) == 3


def test_a_model_with_another_op_runs_as_before():
    outputs = []
    for activation in (None, TorchOps.silu_mul):
        decoder = make_decoder(QWEN3)
        if activation is not None:
            layers: Any = decoder.layers
            for layer in layers:
                layer.mlp.activation = activation
        runner = make_runner(decoder)
        driver = Driver(runner)
        seqs = [driver.add(prompt, 12) for prompt in PROMPTS]
        driver.run(seqs, chunk=7)
        outputs.append([seq.outputs for seq in seqs])
        if activation is None:
            count = len(program_of(runner).program.names)
            assert runner.execution == f"one native program of {count} ops"
        else:
            assert runner.execution.startswith("ops called one by one: aten.silu")
            assert isinstance(state_of(runner).forward_pass, ForwardPass)
        assert context_of(decoder).recorder is None
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    "what", ["torch", "contiguous", "rows", "read", "mask", "attention", "foreign", "native"]
)
def test_unrecordable_ops_are_detected(what):
    decoder = make_decoder(QWEN3)
    layer: Any = decoder.layers[1]
    mlp, foreign = layer.mlp, torch.zeros(11, 32)
    own = context_of(decoder)

    def in_place(x: Tensor) -> Tensor:
        x = mlp(x)
        own.functions.softcap(own.handle, x.data_ptr(), 32, 1.0, len(x), 32, 0)
        return x

    others = {
        "native": (in_place, "a native op cannot be recorded"),
        "mask": (lambda x: mlp(x)[torch.from_numpy(np.ones(11, dtype=bool))], "other than one of"),
        "torch": (lambda x: mlp(x) * 2.0, "aten.mul.Tensor has no native kernel"),
        "contiguous": (lambda x: mlp(x.T.contiguous().T), "aten.clone.default has no"),
        "rows": (lambda x: mlp(x[2:5]), "reads some rows of a tensor"),
        "read": (lambda x: mlp(x) if x[0, 0].item() else x, "aten._local_scalar_dense.default"),
        "foreign": (lambda x: mlp(foreign), "linear reads a tensor that no native op made"),
        "attention": (mlp, "attention 'strange' has no native kernel"),
    }
    layer.mlp, reason = others[what]
    if what == "attention":

        class Strange:
            name, needs_zeroed_blocks = "strange", False

        strange: Any = Strange()
        decoder.attention = {kind: strange for kind in decoder.attention}  # noqa: C420
    runner = make_runner(decoder)
    assert reason in runner.execution


def test_the_start_says_how_steps_run(caplog):
    with caplog.at_level(logging.INFO, "asyncllm"):
        make(attention_backend="native")
        make(attention_backend="torch")
    said = [record.getMessage() for record in caplog.records if "steps run as" in record.msg]
    assert said[0].startswith("steps run as one native program of ")
    assert "has no programs" in said[1]


def test_a_start_loads_no_compiler():
    """torch's, which takes seconds to import; a TorchDispatchMode does so unless it is told."""
    code = """
import sys
from asyncllm import LLM
with LLM(device="cpu", attention_backend="native") as llm:
    llm.generate("a", max_tokens=2)
print(sorted({"torch._dynamo", "sympy", "transformers"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("text", "said"), [("always madvise [never]\n", 1), ("always [madvise] never\n", 0), (None, 0)]
)
def test_disabled_huge_pages_are_reported(text, said, tmp_path, caplog):
    setting = tmp_path / "enabled"
    if text is not None:
        setting.write_text(text)
    with caplog.at_level(logging.WARNING, "asyncllm"):
        warn_without_huge_pages(setting)
    assert len(caplog.records) == said
    assert all("more slowly" in record.getMessage() for record in caplog.records)


def test_activations_are_counted_before_the_cache(monkeypatch):
    available = 64 * 2**20
    monkeypatch.setattr(cache_sizing, "available_memory", lambda: available)
    runner = make(attention_backend="native", max_num_batched_tokens=4096, max_model_len=4096,
                  model=replace(LLAMA, max_position_embeddings=4096))  # fmt: skip
    state = state_of(runner)
    taken = program_of(runner).program.num_bytes
    # The MLP's two halves, beside the hidden states of 32 elements; layers share their memory.
    assert 1 < taken / (4096 * (128 + 32) * 4) < 2
    groups = kv_plan(state.model.model).kv_groups(state.model.attention, runner.info.block_size)
    limits = {"max_num_batched_tokens": 4096, "max_num_seqs": 64}
    assert recorded_activation_bytes(state.model, groups, **limits) == taken
    per_block = state.cache.tensor.nbytes // runner.info.num_blocks
    assert runner.info.num_blocks == (available - taken) // 4 // per_block


def test_a_smaller_budget_takes_less():
    runner = make_runner(make_decoder(QWEN3), 512)
    before = program_of(runner).program.num_bytes
    runner.set_token_budget(64)
    assert runner.info.max_num_batched_tokens == 64
    assert program_of(runner).program.num_bytes < before / 2
    assert len(outputs_of(runner, [1], 1, GREEDY)) == 1


def test_activations_that_no_machine_has_are_refused():
    with pytest.raises(EngineError, match=r"max_num_batched_tokens=\d{14}: .*lower it"):
        make_runner(make_decoder(LLAMA), 2**45)


def test_closing_frees_the_program():
    runner = make_runner(make_decoder(LLAMA))
    program = weakref.ref(program_of(runner).program)
    runner.close()
    assert program() is None
