"""Attention backends: names, refusals, and entry points of other distributions."""

from __future__ import annotations

import re
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.config import EngineConfig
from asyncllm.errors import EngineError, InvalidRequestError
from asyncllm.gpu import decoder_loading
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.models.attention_kinds import attention_kinds, attention_shape
from asyncllm.gpu.models.layers import AttentionKind
from asyncllm.gpu.ops import flash_attention, native_attention, registry
from asyncllm.gpu.ops.backend import AttentionRequest, Constraints
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops.native_attention import NativeAttention
from asyncllm.gpu.ops.native_ops import NativeOps
from asyncllm.gpu.ops.registry import (
    BUILTIN_BACKENDS,
    ENTRY_POINT_GROUP,
    NativeOpsChoice,
    make_attention,
    make_ops,
    make_ops_without_attention,
)
from asyncllm.gpu.ops.torch_attention import TorchAttention
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.ops.triton import toolchain
from asyncllm.gpu.ops.triton.attention import TritonAttention
from asyncllm.native.shared_library import NativeUnavailableError
from tests import flash_attn_standin
from tests.driver import Driver, state_of
from tests.dummy_runner import MODEL
from tests.native_library import context
from tests.step_inputs import captured

SHAPE = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=64, scale=0.125)
CPU = AttentionRequest(SHAPE, torch.float32, torch.device("cpu"), None, frozenset({None, 24}))
GPU = replace(CPU, dtype=torch.bfloat16, device=torch.device("cuda:0"))
DOCS = Path(__file__).parent.parent / "docs" / "attention_backends.md"


def made_runner(model: ModelConfig, **fields: Any) -> ModelRunner:
    fields = {"max_num_batched_tokens": 64, "attention_backend": "torch"} | fields
    return build_model_runner(EngineConfig(load_format="dummy", device="cpu", **fields), model)


@pytest.fixture
def hopper(monkeypatch):
    """What torch says of a GPU; nothing runs on it."""
    capability = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for module in (flash_attn_standin.flash_attn_2(), flash_attn_standin.flash_attn_3()):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    # It runs what is made; tests/test_flash_attention.py does, on a CPU.
    monkeypatch.setattr(flash_attention, "check_attention_outputs", lambda attention, request: None)
    return capability


def test_a_cpu_has_plain_torch():
    attention, block_size = make_attention("torch", CPU)
    assert type(attention) is TorchAttention
    assert attention.dtype == torch.float32
    assert block_size == 32
    assert make_attention("torch", replace(CPU, block_size=7))[1] == 7


def no_library():
    raise NativeUnavailableError("the native ops have not been compiled")


@pytest.mark.parametrize(
    ("isa", "amx", "head_dim", "expected"),
    [
        (b"avx2", False, 64, "native"),
        (b"avx512", False, 64, "native"),
        (b"neon", False, 64, "native"),
        (b"avx2", False, 513, "torch"),
        (b"baseline", False, 64, "torch"),
        (b"avx512bf16", True, 64, "native"),
        (b"baseline", True, 64, "torch"),
    ],
)
def test_auto_is_native_where_its_vectors_are(monkeypatch, isa, amx, head_dim, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": amx})
    monkeypatch.setattr(registry, "Library", lambda: SimpleNamespace(best_isa=lambda: isa))
    shape = replace(SHAPE, head_dim=head_dim)
    assert registry.resolve_backend_name("auto", replace(CPU, shape=shape)) == expected
    assert registry.resolve_backend_name("auto", GPU) == "triton"
    assert registry.resolve_backend_name("torch", CPU) == "torch"
    named = 'AMX tiles, and attention_backend="torch" does' in registry.choose_native_ops().reason
    assert named == (amx and isa != b"baseline")


def test_cpu_without_native_ops_uses_torch_and_says_why(monkeypatch, caplog):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    monkeypatch.setattr(registry, "Library", no_library)
    monkeypatch.setattr(native_attention, "Library", no_library)
    assert make_attention("auto", CPU)[0].name == "torch"
    (record,) = caplog.records
    assert record.name.startswith("asyncllm.")
    assert "have not been compiled" in record.getMessage()
    assert "python -m asyncllm.native.build" in record.getMessage()
    assert all(isinstance(argument, str) for argument in record.args), "it keeps the frames alive"
    with pytest.raises(
        EngineError, match=r'attention_backend="native": .* not been compiled; .*build'
    ):
        make_attention("native", CPU)


def test_native_ops_are_for_cpus(hopper):
    with pytest.raises(InvalidRequestError, match="'native' takes device cpu, and this is cuda:0"):
        make_attention("native", GPU)


def test_native_layers_share_a_pool_and_torch_has_one_thread():
    own = context()
    model = replace(MODEL, sliding_window=24, sliding_layers=(False, True))
    runner = made_runner(model, dtype="float32", num_threads=3, attention_backend="native")
    state = runner._runner
    assert state is not None
    first, second = state.model.attention.values()
    assert isinstance(first, NativeAttention)
    assert first is not second
    ops = state.model.ops
    assert isinstance(ops, NativeOps)
    assert ops.context is first.context is second.context is not own
    assert ops.context.num_threads == 3
    assert runner._num_threads == 1
    row = torch.zeros(1, dtype=torch.int64)
    unknown = captured(torch.zeros((2, 1), dtype=torch.int32), row, row, row.int(), 16)
    with pytest.raises(NotImplementedError, match="no CUDA graphs"):
        first.plan(unknown, None, 0)
    gone = weakref.ref(ops.context)
    del first, second, ops, state
    runner.close()
    assert gone() is None


@pytest.mark.parametrize(
    ("name", "backend", "block_size"),
    [
        ("auto", "triton", 16),
        ("triton", "triton", 16),
        ("torch", "torch", 16),
        ("flash_attn", "flash_attn", 256),
        ("flash_attn_3", "flash_attn_3", 16),
    ],
)
def test_backends_of_a_gpu(hopper, name, backend, block_size):
    if backend == "triton":
        pytest.importorskip("triton")
    attention, found = make_attention(name, GPU)
    assert (attention.name, found) == (backend, block_size)
    assert attention.shape == SHAPE
    assert make_attention(name, replace(GPU, block_size=512))[1] == 512
    if backend != "torch":
        pytest.importorskip("triton")
        assert make_ops(GPU.device, attention).name == "triton"


def test_model_lists_attention_kinds_once_each():
    full = AttentionKind(attention_shape(MODEL))
    assert attention_kinds(MODEL) == (full,)
    layers = (False, True, True, False)
    sliding = replace(MODEL, num_layers=4, sliding_window=24, sliding_layers=layers)
    assert attention_kinds(sliding) == (full, replace(full, window=24, kv_group=1))


def test_each_kind_of_layer_has_its_own_attention(monkeypatch):
    requests = []

    def make(name, request):
        requests.append(request)
        return make_attention(name, request)

    monkeypatch.setattr(decoder_loading, "make_attention", make)
    layers = (True, False, True, False)
    model = replace(MODEL, num_layers=4, sliding_window=24, sliding_layers=layers)
    decoder = state_of(made_runner(model, attention_backend="auto")).model
    assert [request.windows for request in requests] == [frozenset({24}), frozenset({None})]
    near, full = decoder.attention.values()
    assert near is not full
    assert [layer.mixer.attention for layer in decoder.layers] == [near, full, near, full]
    assert [layer.mixer.attention_index for layer in decoder.layers] == [0, 1, 0, 1]


def test_one_unsupported_layer_kind_excludes_a_backend(monkeypatch):
    model = replace(MODEL, sliding_window=24, sliding_layers=(False, True))
    monkeypatch.setattr(BUILTIN_BACKENDS["torch"], "constraints", Constraints(window=False))
    with pytest.raises(InvalidRequestError, match="no sliding window, and this is 24"):
        made_runner(model)


def test_the_runner_takes_the_backends_own_block_size(monkeypatch):
    monkeypatch.setattr(BUILTIN_BACKENDS["torch"], "default_block_size", lambda device: 48)
    assert made_runner(MODEL).info.block_size == 48


@pytest.mark.parametrize("runs", [True, False])
def test_the_op_set_of_a_model_without_attention(monkeypatch, runs, caplog):
    """The one that goes with the backend which a model with attention would have."""
    context()
    choice = NativeOpsChoice(runs, "for want of a compiler", can_be_built=not runs)
    monkeypatch.setattr(registry, "choose_native_ops", lambda: choice)
    expected = {"auto": "native" if runs else "onednn", "native": "native", "torch": "onednn"}
    for name, op_set in expected.items():
        assert make_ops_without_attention(name, CPU.device, 1).name == op_set
    assert [each.message for each in caplog.records] == ["for want of a compiler"] * (not runs)
    assert type(make_ops_without_attention("auto", GPU.device, 1)) is TorchOps


@pytest.mark.slow
def test_nothing_of_another_backend_is_imported():
    code = f"""
import sys, torch
from asyncllm.gpu.ops.registry import make_attention, make_ops
from asyncllm.gpu.ops.backend import AttentionRequest
from asyncllm.gpu.ops.base import AttentionShape
from asyncllm.gpu.ops import gumbel
from asyncllm.gpu.ops.triton import toolchain, tuning
request = AttentionRequest(
    AttentionShape(2, 1, 8, 1.0), torch.float32, torch.device("cpu"), None, frozenset()
)
make_ops(request.device, make_attention("auto", request)[0])
loaded = {{"triton", "flash_attn", "flash_attn_interface", {__name__!r}}} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)


WIDE = replace(SHAPE, head_dim=288)
WIDEST = replace(SHAPE, head_dim=514)
ODD = replace(SHAPE, head_dim=68)
CAPPED = replace(SHAPE, softcap=30.0)


@pytest.mark.parametrize(
    ("name", "changes", "capability", "words"),
    [
        ("triton", {"device": torch.device("cpu")}, (9, 0), "takes device cuda, and this is cpu"),
        ("triton", {}, (7, 5), "takes compute capability from 8.0, and this is 7.5"),
        ("triton", {"dtype": torch.float64}, (9, 0), "float16 or float32, and this is float64"),
        ("triton", {"shape": WIDEST}, (9, 0), "takes head size at most 512, and this is 514"),
        ("flash_attn", {"device": torch.device("xpu")}, None, "device cuda, and this is xpu"),
        ("flash_attn", {}, (7, 5), "takes compute capability from 8.0, and this is 7.5"),
        ("flash_attn", {"dtype": torch.float32}, (8, 0), "float16, and this is float32"),
        ("flash_attn", {"shape": WIDE}, (8, 0), "head size at most 256"),
        ("flash_attn", {"shape": ODD}, (8, 0), "head size a multiple of 8, and this is 68"),
        ("flash_attn_3", {}, (8, 9), "takes compute capability from 9.0 to 9.0, and this is 8.9"),
        ("flash_attn_3", {}, (10, 0), "and this is 10.0"),
        ("flash_attn_3", {"dtype": torch.float32}, (9, 0), "bfloat16 or float16"),
        ("auto", {}, (7, 0), "is 'triton' on device cuda:0, which takes compute capability"),
    ],
)
def test_requests_that_a_backend_does_not_cover(hopper, name, changes, capability, words):
    hopper[:] = capability or ()
    said = f"^attention_backend={name!r}.*{words}.*or attention_backend=.torch., which covers it"
    with pytest.raises(InvalidRequestError, match=said) as error:
        make_attention(name, replace(GPU, **changes))
    assert error.value.param == "attention_backend"


@pytest.mark.parametrize(
    ("name", "block_size", "words"),
    [
        ("triton", 24, "'triton' takes block_size a multiple of 16"),
        ("auto", 24, "'triton' on device cuda:0, which takes block_size a multiple of 16"),
        ("flash_attn", 128, "'flash_attn' takes block_size a multiple of 256"),
    ],
)
def test_a_block_size_that_does_not_fit(hopper, name, block_size, words):
    with pytest.raises(InvalidRequestError, match=f"^block_size={block_size}: .*{words}") as error:
        make_attention(name, replace(GPU, block_size=block_size))
    assert error.value.param == "block_size"
    assert make_attention("torch", replace(GPU, block_size=block_size))[1] == block_size
    assert make_attention("flash_attn_3", replace(GPU, block_size=block_size))[1] == block_size


def test_a_soft_cap_is_handed_on(hopper):
    capped = replace(GPU, shape=CAPPED)
    for name in ("flash_attn", "flash_attn_3"):
        assert make_attention(name, capped)[0].softcap == 30.0
    attention, _ = make_attention("torch", capped)
    assert isinstance(attention, TorchAttention)
    assert attention.shape.softcap == 30.0


def test_sinks_are_refused_where_they_would_be_left_out(hopper):
    pytest.importorskip("triton")
    sinking = replace(GPU, shape=replace(SHAPE, sinks=True))
    with pytest.raises(InvalidRequestError, match=r"'flash_attn' takes no attention sinks.*torch"):
        make_attention("flash_attn", sinking)
    assert isinstance(make_attention("torch", sinking)[0], TorchAttention)
    assert isinstance(make_attention("triton", sinking)[0], TritonAttention)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "most"),
    [(64, torch.float32, 32), (64, torch.bfloat16, 128), (512, torch.float32, 16)],
)
def test_a_group_that_does_not_fit_into_a_tile_of_triton(hopper, head_dim, dtype, most):
    pytest.importorskip("triton")

    def make(group):
        shape = replace(SHAPE, num_heads=2 * group, head_dim=head_dim)
        return make_attention("triton", replace(GPU, dtype=dtype, shape=shape))[0]

    assert isinstance(make(most), TritonAttention)
    with pytest.raises(InvalidRequestError, match=f"at most {most} query heads.*is {most + 1}"):
        make(most + 1)


def test_a_capability_can_be_checked_without_the_gpu():
    (unmet,) = TritonAttention.constraints.unmet(GPU, (7, 5))
    assert (unmet.actual, unmet.expected) == ("7.5", "compute capability from 8.0")
    assert not list(TritonAttention.constraints.unmet(GPU, (12, 1)))


@pytest.fixture
def no_compiler(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_without_a_compiler_the_way_out_is_named(hopper, no_compiler, name):
    with pytest.raises(EngineError, match=r'C compiler.*or choose attention_backend="torch"'):
        make_attention(name, GPU)


def test_the_way_out_needs_no_compiler(hopper, no_compiler):
    attention, _ = make_attention("torch", GPU)
    assert isinstance(make_ops(GPU.device, attention), TorchOps)
    flash, _ = make_attention("flash_attn", GPU)
    with pytest.raises(EngineError, match='attention_backend="torch"'):
        make_ops(GPU.device, flash)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Makes a distribution with one module and its entry points, and removes it again."""
    before = set(sys.modules)

    def install(source: str, name: str = "exact_attention", **entries: str) -> None:
        """Each entry point is an attribute of the module."""
        place = tmp_path / name
        info = place / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (place / f"{name}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{entry} = {name}:{value}\n" for entry, value in entries.items()]
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{''.join(lines)}")
        monkeypatch.syspath_prepend(str(place))

    yield install
    for module in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]


def example() -> str:
    """The example of the documentation, and the entry point that it names."""
    text = DOCS.read_text()
    entry = 'exact = "exact_attention:ExactAttention"'
    assert f'[project.entry-points."{ENTRY_POINT_GROUP}"]\n{entry}' in text
    match = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert match is not None
    return match[1]


def test_the_documented_backend_runs_a_model(install):
    install(example(), exact="ExactAttention")
    model = replace(MODEL, sliding_window=9, sliding_layers=(False, True))

    def outputs(name: str) -> tuple[list[list[int]], list[float]]:
        size = 16 if name == "torch" else None
        driver = Driver(
            made_runner(model, dtype="float32", block_size=size, attention_backend=name)
        )
        seqs = [driver.add([3, 5, 7] * count, 12) for count in (1, 4, 9)]
        driver.run(seqs, chunk=7)
        return [seq.outputs for seq in seqs], [seq.logprobs[-1].logprob for seq in seqs]

    tokens, logprobs = outputs("exact")
    expected_tokens, expected_logprobs = outputs("torch")
    assert tokens == expected_tokens
    assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


def test_its_constraints_and_its_name_are_known(install):
    install(example(), exact="ExactAttention")
    attention, block_size = make_attention("exact", CPU)
    assert (attention.name, block_size) == ("exact", 32)
    with pytest.raises(InvalidRequestError, match="takes device cpu, and this is xpu"):
        make_attention("exact", replace(CPU, device=torch.device("xpu")))
    with pytest.raises(InvalidRequestError, match=r"flash_attn, flash_attn_3, exact$"):
        make_attention("exakt", CPU)


APART = """
class ExactBackend:
    constraints = ExactAttention.constraints

    def default_block_size(self, device):
        return 48

    def make(self, request):
        return ExactAttention(request.shape)

backend = ExactBackend()
"""


@pytest.mark.parametrize("name", ["ExactBackend", "backend"])
def test_entry_point_is_an_object_or_a_class(install, name):
    install(example() + APART, exact=name)
    attention, block_size = make_attention("exact", CPU)
    assert (attention.name, block_size) == ("exact", 48)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError.*nowhere_at_all"),
        ("", "AttributeError.*Backend"),
        ("class Backend:\n    def __init__(self): raise OSError('no driver')", "no driver"),
        ("class Backend:\n    constraints = None", "is no AttentionBackend"),
    ],
)
def test_a_broken_distribution_is_named(install, source, words):
    install(source, "broken_attention", broken="Backend")
    where = "attention_backend='broken': 'broken_attention:Backend' of broken_attention"
    with pytest.raises(EngineError, match=f"{where} .*{words}"):
        make_attention("broken", CPU)
    assert make_attention("torch", CPU)[0].name == "torch"


def test_a_backend_has_to_make_an_attention(install):
    source = example() + "\nExactAttention.make = classmethod(lambda cls, request: None)\n"
    install(source, exact="ExactAttention")
    with pytest.raises(EngineError, match="attention_backend='exact': it made a NoneType"):
        make_attention("exact", CPU)


def test_a_name_belongs_to_one_distribution(install):
    install(example(), exact="ExactAttention")
    install(example(), "other_attention", exact="ExactAttention")
    with pytest.raises(EngineError, match="registered by exact_attention, other_attention"):
        make_attention("exact", CPU)


def test_builtin_names_cannot_be_registered(install, monkeypatch):
    monkeypatch.setattr(registry, "Library", no_library)
    install(example(), torch="ExactAttention")
    for name in ("torch", "auto"):
        with pytest.raises(EngineError, match="registered by asyncllm, exact_attention"):
            make_attention(name, CPU)
