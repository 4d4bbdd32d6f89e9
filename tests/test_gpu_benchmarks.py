"""The GPU benchmarks, as far as they are neither CUDA nor a whole stage: floors, shapes, tables,
deadlines and the command line."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.text.tokenizer import Tokenizer
from benchmarks.common import Report
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import decode, engine
from benchmarks.gpu.checkpoint import write_checkpoint
from benchmarks.gpu.clock import (
    CudaClock,
    DeviceSpan,
    covered_share,
    device_spans,
    missing,
    parse_smi,
)
from benchmarks.gpu.goals import Goal, Scores
from benchmarks.gpu.shapes import LLAMA_8B, QWEN3_06B, AttentionLoad, rotations
from benchmarks.gpu.stage import Deadline, Stage
from benchmarks.gpu.workload import equal_lengths, mixed_lengths
from tests.gpu_stand_ins import TINY, TINY_LLAMA, figures, make_stage

ROOT = Path(__file__).parent.parent
BANDWIDTH = 4.3e12

# --- floors -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "batch", "milliseconds"),
    [
        (QWEN3_06B, 1, 0.30),
        (QWEN3_06B, 256, 7.3),
        (LLAMA_8B, 1, 3.5),
        (LLAMA_8B, 64, 5.5),
        (LLAMA_8B, 256, 11.5),
    ],
)
def test_floor_of_a_decode_step_at_1k_context(shape, batch, milliseconds):
    floor = shape.step_floor(batch * 1024, BANDWIDTH) * 1e3
    assert floor == pytest.approx(milliseconds, rel=0.02)


def test_bytes_of_the_shapes():
    assert QWEN3_06B.kv_bytes_per_token == 114_688
    assert LLAMA_8B.kv_bytes_per_token == 131_072
    assert QWEN3_06B.step_weight_bytes == 2 * (28 * 15_728_640 + 151_936 * 1024)
    # The 8B model has 8.03 billion parameters; its embedding is read by the row.
    assert LLAMA_8B.step_weight_bytes // 2 + 128_256 * 4096 == pytest.approx(8.03e9, rel=1e-3)


@pytest.mark.parametrize("shape", [QWEN3_06B, LLAMA_8B, TINY, TINY_LLAMA], ids=lambda s: s.name)
def test_checkpoint_has_the_shape(tmp_path, shape):
    model = ModelConfig.from_directory(write_checkpoint(tmp_path / "model", shape))
    assert model.architecture == shape.architecture
    assert (model.num_layers, model.hidden_size) == (shape.layers, shape.hidden)
    assert (model.num_heads, model.num_kv_heads) == (shape.heads, shape.kv_heads)
    assert (model.head_dim, model.intermediate_size) == (shape.head_dim, shape.ffn)
    assert (model.vocab_size, model.tie_word_embeddings) == (shape.vocab, shape.tied)
    assert model.dtype == ("bfloat16" if shape.itemsize == 2 else "float32")
    assert model.max_position_embeddings == shape.context
    assert model.eos_token_ids == ()


def test_every_token_of_the_tokenizer_is_a_word(tmp_path):
    tokenizer = Tokenizer.from_directory(write_checkpoint(tmp_path, TINY))
    words = [tokenizer.decode([i]) for i in range(TINY.vocab)]
    assert len(set(words)) == TINY.vocab
    assert words[:2] == [" a", " b"]
    assert words[26:28] == [" aa", " ab"]
    decoder = tokenizer.text_decoder()
    assert "".join(decoder.push(i) for i in (0, 27, 511)) == " a ab" + words[511]


def test_attention_load():
    load = AttentionLoad(4, 1, 1023)
    assert load.kv_bytes == 4 * 1024 * 4096
    assert load.bytes == load.kv_bytes + 2 * 4 * 8192
    assert load.flops == 4 * 4 * 1024 * 32 * 128
    prefill = AttentionLoad(1, 3, 2)
    # Queries see 3, 4 and 5 keys.
    assert prefill.flops == 4 * (3 + 4 + 5) * 32 * 128


@pytest.mark.parametrize(
    ("size", "expected"), [(1 << 40, 1), (240, 1), (239, 2), (100, 3), (1, 128)]
)
def test_rotations_defeat_the_cache(size, expected):
    assert rotations(size, 60) == expected


def test_decode_loads_are_all_there_with_the_large_first():
    loads = decode.decode_loads()
    equal = [load for load in loads if not load.longest]
    assert {(load.batch, load.kv_len) for load in equal} == {
        (batch, context)
        for batch in (1, 8, 24, 32, 64, 72, 96, 128, 256)
        for context in (512, 4096, 32_768)
    }
    (skewed,) = [load for load in loads if load.longest]
    assert skewed.name == "decode 128 × 500, one of 32768"
    assert len({load.name for load in loads}) == len(loads)
    tokens = [sum(load.lengths) for load in loads]
    assert tokens == sorted(tokens, reverse=True)
    assert {(load.queries, load.prefix) for load in decode.prefill_loads()} == {
        (queries, prefix) for queries in (512, 2048, 8192) for prefix in (0, 4096, 32_768)
    }


# --- workloads --------------------------------------------------------------------------


def test_mixed_workload_is_nano_vllms():
    work = mixed_lengths()
    assert len(work.prompts) == len(work.max_tokens) == 256
    assert work.num_output_tokens == 133_966
    assert sum(map(len, work.prompts)) == 142_827
    lengths = [len(prompt) for prompt in work.prompts] + work.max_tokens
    assert min(lengths) >= 100
    assert max(lengths) <= 1024
    assert work == mixed_lengths()
    assert work != mixed_lengths(seed=1)


def test_equal_workload():
    work = equal_lengths(5, 40, 7, vocab=300)
    assert [len(prompt) for prompt in work.prompts] == [40] * 5
    assert work.max_tokens == [7] * 5
    assert len({tuple(prompt[:4]) for prompt in work.prompts}) == 5
    assert all(0 <= token < 300 for prompt in work.prompts for token in prompt)


# --- goals, table, deadline -------------------------------------------------------------


@pytest.mark.parametrize(
    ("goal", "value", "met"),
    [
        (Goal("at most", 2.0), 2.0, True),
        (Goal("at most", 2.0), 2.01, False),
        (Goal("at least", 0.75), 0.75, True),
        (Goal("at least", 0.75), 0.7, False),
        (Goal("at most", 2.0), float("nan"), False),
        (Goal("at least", 2.0), float("nan"), False),
    ],
)
def test_goal(goal, value, met):
    assert goal.met(value) is met


def test_goals_are_shown_as_they_come_and_in_a_table(capsys):
    scores = Scores(Report("test"))
    scores.add("lag", 0.0015, "ms", Goal("at most", 2e-3), "64 streams")
    scores.add("busy", 0.9, "", Goal("at least", 0.97))
    scores.add("trace", None, "", Goal("at least", 0.97))
    capsys.readouterr()
    scores.print_table()
    lines = [line.split() for line in capsys.readouterr().out.strip().splitlines()]
    assert lines == [
        ["goals"],
        ["lag", "1.50", "ms", "at", "most", "2.00", "ms", "yes"],
        ["busy", "0.90", "at", "least", "0.97", "NO"],
        ["trace", "–", "at", "least", "0.97", "not", "measured"],
    ]
    assert scores.report.figures[0].note == "goal at most 2.00 ms: yes; 64 streams"


def test_no_table_without_goals(capsys):
    scores = Scores(Report("test"))
    capsys.readouterr()
    scores.print_table()
    assert capsys.readouterr().out == ""


def test_stage_leaves_out_what_may_not_end_in_time():
    now = 0.0
    stage = Stage(Report("test"), Deadline(10.0, lambda: now))
    ran = []
    assert stage.attempt("first", 4, lambda: ran.append("first"))
    now = 7.0
    assert not stage.attempt("long", 4, lambda: ran.append("long"))
    assert stage.attempt("short", 3, lambda: ran.append("short"))
    assert ran == ["first", "short"]
    assert stage.skipped == ["long"]
    assert stage.finish() == 0
    assert stage.report.figures[-1].note == "long"


def test_stage_goes_on_after_a_failure_and_says_so(capsys):
    stage = make_stage()

    def fail() -> None:
        raise RuntimeError("no such kernel\nand more")

    assert not stage.attempt("bad", 1, fail)
    assert stage.attempt("good", 1, lambda: None)
    assert stage.failed == [("bad", "RuntimeError: no such kernel")]
    assert stage.finish() == 1
    assert "FAILED  bad: RuntimeError: no such kernel\n" in capsys.readouterr().out


def test_stage_stops_when_the_device_is_lost():
    stage = make_stage(usable=lambda: False)

    def fail() -> None:
        raise RuntimeError("an illegal memory access")

    stage.attempt("bad", 1, fail)
    assert not stage.attempt("good", 1, lambda: None)
    assert stage.broken
    assert stage.skipped == ["good"]


async def _forever() -> None:
    await engine.asyncio.sleep(3600)


def test_what_hangs_is_cancelled_at_the_deadline():
    stage = make_stage(0.05)
    engine.asyncio.run(stage.attempt_async("hangs", 0, _forever))
    assert stage.failed == [("hangs", "TimeoutError: ")]


def test_figures_are_written_after_every_measurement(tmp_path, monkeypatch):
    out, file = tmp_path / "found", tmp_path / "found" / "decode.json"
    monkeypatch.setattr(sys, "argv", ["/x/benchmarks/gpu/__main__.py", "--out", str(out)])
    conditions = {"gpu": "a GPU", "driver": "1"}
    stage = Stage(Report("test", conditions), Deadline(9), name="decode", out=out)
    stage.attempt("one", 1, lambda: stage.report.add("figure", 1.5, "s"))
    stage.write("tables", {"best": [1, 2]})
    assert json.loads((out / "decode-tables.json").read_text()) == {"best": [1, 2]}
    written = json.loads(file.read_text())
    assert written["figures"] == [{"name": "figure", "value": 1.5, "unit": "s", "note": ""}]
    assert written["machine"]["gpu"] == "a GPU"
    assert written["machine"]["driver"] == "1"
    assert written["command"] == "python -m benchmarks.gpu --out found"
    assert str(tmp_path) not in file.read_text()


# --- the clock's arithmetic -------------------------------------------------------------


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([], None),
        ([(3.0, 3.0)], None),
        ([(0.0, 4.0)], 1.0),
        ([(0.0, 1.0), (3.0, 4.0)], 0.5),
        ([(3.0, 4.0), (0.0, 2.0), (1.0, 2.0), (0.5, 1.0)], 0.75),
    ],
)
def test_covered_share(spans, share):
    assert covered_share([DeviceSpan(*span, "kernel") for span in spans]) == share


def test_device_spans_leave_out_the_cpu_and_marked_ranges():
    def event(kind, start, end, marked=False):
        span = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(
            device_type=kind, time_range=span, is_user_annotation=marked, name=f"from {start}"
        )

    gpu, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [event(gpu, 5, 8), event(cpu, 0, 9), event(gpu, 0, 9, True), event(gpu, 1, 2)]
    assert device_spans(events) == [
        DeviceSpan(1e-6, 2e-6, "from 1"), DeviceSpan(5e-6, 8e-6, "from 5"),
    ]  # fmt: skip


def test_parse_smi():
    assert parse_smi("580.1, 345 MHz, 3201 MHz, 700.00 W\nother") == {
        "driver": "580.1",
        "sm_clock": "345 MHz",
        "memory_clock": "3201 MHz",
        "power_limit": "700.00 W",
    }
    assert parse_smi("580.1, [N/A], 3201 MHz, 700.00 W")["sm_clock"] == "unknown"
    assert set(parse_smi("").values()) == {"unknown"}


# --- the command line -------------------------------------------------------------------


def test_arguments():
    chosen = command.parse(["--stage", "decode"])
    assert (chosen.stage, chosen.deadline, chosen.out) == ("decode", 420.0, None)
    chosen = command.parse(["--stage", "engine", "--deadline", "90.5", "--out", "found"])
    assert (chosen.deadline, chosen.out) == (90.5, Path("found"))
    for stage in command.STAGES:
        assert command.parse(["--stage", stage]).deadline < 540


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--stage", "all"],
        ["--stage", "decode", "--deadline", "0"],
        ["--stage", "decode", "--deadline", "inf"],
        ["--stage", "decode", "--deadline", "soon"],
        ["--stage", "decode", "--quick"],
    ],
)
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        command.parse(arguments)
    assert caught.value.code == 2


def test_refusal_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--stage", "kernels"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        f"benchmarks.gpu: needs an NVIDIA GPU, and torch {torch.__version__} finds none"
    ]


def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "T4")
    assert missing() == "needs compute capability 8.0, and T4 has 7.5"


def test_the_command_refuses_without_a_gpu():
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--stage", "kernels"],
        cwd=ROOT,
        env=hidden,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "needs an NVIDIA GPU" in done.stderr


@pytest.fixture
def a_gpu(monkeypatch):
    """The command believes in a GPU; what its stages would do there is up to the test."""
    monkeypatch.setattr(command, "why_not", lambda: None)
    monkeypatch.setattr("benchmarks.gpu.clock.conditions", lambda: {"gpu": "a GPU"})


def test_a_stage_is_run_with_the_time_that_is_left(a_gpu, monkeypatch, tmp_path, capsys):
    from benchmarks.gpu import kernels

    seen = []

    def run(stage: Stage) -> None:
        seen.append(stage.deadline.left())
        stage.scores.add("wrong", 0.0, "", Goal("at most", 0.0))

    monkeypatch.setattr(kernels, "run", run)
    arguments = ["--stage", "kernels", "--deadline", "90", "--out", str(tmp_path)]
    assert command.main(arguments) == 0
    assert 0 < seen[0] <= 80
    assert json.loads((tmp_path / "kernels.json").read_text())["title"] == "GPU, kernels"
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "wrong"


def test_a_stage_that_raises_leaves_its_figures(a_gpu, monkeypatch, tmp_path):
    def run(stage: Stage, clock: object) -> None:
        stage.report.add("figure", 1.0, "s")
        raise LookupError("a mistake of ours")

    monkeypatch.setattr(engine, "run", run)
    with pytest.raises(LookupError):
        command.main(["--stage", "engine", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "engine.json").read_text())
    assert [figure["name"] for figure in found["figures"]] == ["figure"]


@pytest.mark.parametrize("stage", command.STAGES)
def test_every_stage_has_what_runs_it(stage, monkeypatch):
    module = importlib.import_module(f"benchmarks.gpu.{stage}")
    given = []
    monkeypatch.setattr(module, "run", lambda *arguments: given.append(arguments))
    command.runner_of(stage)(make_stage(name=stage))
    ((first, *clock),) = given
    assert isinstance(first, Stage)
    assert [type(each) for each in clock] == [CudaClock] * (stage not in ("smoke", "kernels"))


# --- the kernels stage ------------------------------------------------------------------


def test_attention_cases_cover_every_combination():
    from benchmarks.gpu import kernels

    for kind in ("decode", "prefill"):
        cases = kernels.attention_cases(kind)
        found = [(case.group, case.head_dim, case.dtype, case.block_size) for case in cases]
        assert len(found) == len(set(found)) == 6 * 5 * 2 * 2
        first = {(case.group, case.head_dim) for case in cases[:30]}
        assert len(first) == 30
        for values in zip(*found[:30], strict=True):
            assert len(set(values)) > 1
        assert {case.splits for case in cases} == ({1, 5} if kind == "decode" else {1})


def test_all_families_are_there_and_none_is_empty():
    from benchmarks.gpu import kernels

    families = kernels.families("cuda", 90)
    names = " ".join(family.name for family in families)
    for word in (
        "decode", "prefill", "sampler", "step state", "norms", "activation", "rotation", "experts",
        "gated delta",
    ):  # fmt: skip
        assert word in names
    assert all(family.cases for family in families)
    assert sum(len(family.cases) for family in families) > 300


def test_a_wrong_kernel_is_counted_and_named(capsys):
    from benchmarks.gpu import kernels

    def wrong() -> None:
        raise AssertionError("row 3: 1 of 8 vectors are off")

    stage = make_stage()
    family = kernels.Family("norms", {"a": lambda: None, "b": wrong, "c": lambda: None})
    kernels.run_families(stage, [family])
    assert figures(stage)["norms, wrong"] == 1.0
    assert stage.report.figures[-1].note == "goal at most 0.00: NO; 2 of 3 cases right"
    assert "FAILED  norms: b: AssertionError: row 3" in capsys.readouterr().out
    assert stage.finish() == 1


def test_checks_of_the_stage_run_on_the_plain_functions():
    """So that what the stage imports from the tests is what the backends are held to."""
    from asyncllm.gpu.ops.torch_ops import TorchOps
    from tests.triton import checks

    checks.check_step_state(TorchOps().decode_inputs, "cpu", 16)
