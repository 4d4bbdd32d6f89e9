"""Quantised checkpoints: values and refusals."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncllm import EngineConfig
from asyncllm.checkpoint.model_config import QUANT_METHODS, ModelConfig
from asyncllm.errors import InvalidRequestError, ModelLoadError
from asyncllm.gpu.decoder_loading import resolve_quantisers
from asyncllm.gpu.formats import reader as reader_module
from asyncllm.gpu.formats.open_checkpoint import WEIGHT_FORMATS, open_checkpoint
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.weight_upload import PinnedUploader
from asyncllm.gpu.weights import load_weights
from tests.checkpoints import make_checkpoint
from tests.live_bytes import LiveBytes
from tests.packing import CASES, Case, compressed, quantise_checkpoint, repack
from tests.parity import check_greedy
from tests.slow import slow_but

CPU = torch.device("cpu")


def make(path: Path, case: Case, **settings: Any) -> tuple[torch.nn.Module, dict]:
    model = make_checkpoint(path, "Qwen3ForCausalLM", head_dim=32, **settings)
    return model, quantise_checkpoint(path, case, model)


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def test_tensors_equal_unquantised_checkpoint(plain, case, tmp_path, monkeypatch):
    """By their names, in three dtypes, whole and in slices of a few rows."""
    expected = quantise_checkpoint(Path(shutil.copytree(plain, tmp_path / "copy")), case)
    tmp_path /= "copy"
    monkeypatch.setattr(reader_module, "SLICE_ELEMENTS", 1500)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with closing(open_checkpoint(tmp_path, dtype)) as reader:
            assert set(reader.tensors) == set(expected)
            for name, tensor in expected.items():
                found, slices = reader.tensor(name), list(reader.slices(name))
                packed = found.dtype == dtype != torch.float32 or "_proj" in name
                rounded = tensor.to(dtype) if packed else tensor
                assert reader.tensors[name].shape == found.shape
                if "_proj." in name:
                    assert len(slices) > 2
                    assert reader.tensors[name].num_bytes < tensor.nbytes
                torch.testing.assert_close(found, rounded, rtol=0.0, atol=0.0)
                torch.testing.assert_close(torch.cat(slices), found, rtol=0.0, atol=0.0)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    make_checkpoint(path, "Qwen3ForCausalLM", head_dim=32, num_hidden_layers=1)
    return path


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def refused(path: Path) -> str:
    with (
        pytest.raises(ModelLoadError) as caught,
        closing(open_checkpoint(path, torch.float32)) as r,
    ):
        for name in r.tensors:
            r.tensor(name)
    return str(caught.value)


DEFAULT_PARITY = ("awq", "gptq-act-order", "fp8-ragged", "ct-pack-4-zeros")


@pytest.mark.parametrize("name", slow_but(CASES, *DEFAULT_PARITY))
def test_greedy_tokens_equal_transformers_with_dequantised_weights(name, tmp_path):
    """From two shards, the query, key and value projections fused out of different ones."""
    reference, _ = make(tmp_path, CASES[name], shard="150KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = ModelConfig.from_directory(tmp_path)
    assert model.quantization == CASES[name].config["quant_method"]
    check_greedy(model, reference)


def test_fp8_blocks_equal_transformers(plain, tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    repack(plain, tmp_path, CASES["fp8-block"])
    stored = load_file(tmp_path / "model.safetensors")
    dequantise = Fp8Dequantize(None)
    with closing(open_checkpoint(tmp_path, torch.bfloat16)) as reader:
        assert isinstance(reader, reader_module.DequantisingReader)
        names = [name for name in reader.tensors if "_proj." in name]
        assert len(names) == 7
        for name in names:
            parts: dict[str, Any] = {
                s: [stored[name.removesuffix("weight") + s]] for s in ("weight", "weight_scale_inv")
            }
            expected = dequantise.convert(parts)["weight"].to(torch.bfloat16)
            assert torch.equal(reader.tensor(name), expected), name


def gpt_oss(path: Path, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    stem = "model.layers.0.mlp.experts."
    tensors = {
        f"{stem}gate_up_proj_blocks": draw(3, 48, 2, 16),
        f"{stem}gate_up_proj_scales": draw(3, 48, 2, low=110, high=140),
        f"{stem}gate_up_proj_bias": torch.randn(3, 48),
        f"{stem}down_proj_blocks": draw(3, 64, 1, 16),
        f"{stem}down_proj_scales": draw(3, 64, 1, low=110, high=140),
        "model.norm.weight": torch.ones(64),
    }
    config = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}}
    (path / "config.json").write_text(json.dumps(config))
    save_file(
        tensors | {stem + name: value for name, value in changes.items()},
        path / "model.safetensors",
    )
    return tensors


@pytest.mark.parametrize("elements", [1, 2**20])
def test_mxfp4_experts_equal_transformers(tmp_path, monkeypatch, elements):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    monkeypatch.setattr(reader_module, "SLICE_ELEMENTS", elements)
    tensors = gpt_oss(tmp_path)
    for dtype in (torch.bfloat16, torch.float32):
        with closing(open_checkpoint(tmp_path, dtype)) as reader:
            stem = "model.layers.0.mlp.experts."
            experts = {f"{stem}{n}" for n in ("gate_up_proj", "gate_up_proj_bias", "down_proj")}
            assert set(reader.tensors) == experts | {"model.norm.weight"}
            for name, shape in (("gate_up_proj", (3, 64, 48)), ("down_proj", (3, 32, 64))):
                parts = [tensors[f"{stem}{name}_{part}"].clone() for part in ("blocks", "scales")]
                expected = convert_moe_packed_tensors(*parts, dtype=dtype)
                found = reader.tensor(stem + name)
                assert found.shape == reader.tensors[stem + name].shape == shape
                assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"down_proj_scales": torch.zeros(3, 64, 2, dtype=torch.uint8)}, "down_proj_scales' is U8"),
        ({"down_proj_blocks": torch.zeros(3, 64, 1, 8, dtype=torch.uint8)}, r"\(3, 64, 1, 16\)"),
        ({"down_proj_blocks": torch.zeros(3, 64, 16, dtype=torch.uint8)}, "4 dimensions"),
        ({"other_blocks": torch.zeros(1, 2, 1, 16, dtype=torch.uint8)}, "other_scales' is missing"),
    ],
)
def test_experts_that_do_not_fit_are_refused(tmp_path, changes, words):
    gpt_oss(tmp_path, **changes)
    assert re.search(words, refused(tmp_path))


def test_log_line_has_bytes_read_and_held(plain, tmp_path, caplog):
    repack(plain, tmp_path, CASES["ct-int"])
    with caplog.at_level(logging.INFO, logger="asyncllm"):
        for path in (tmp_path, plain):
            list(load_weights(ModelConfig.from_directory(path), torch.bfloat16, CPU))
    (line,) = [record.getMessage() for record in caplog.records]
    stored = load_file(tmp_path / "model.safetensors")
    read = sum(tensor.nbytes for tensor in stored.values()) / 2**20
    held = sum(t.nbytes for t in load_file(plain / "model.safetensors").values()) / 2 / 2**20
    assert str(tmp_path) in line
    assert "compressed-tensors int-quantized, 8 bits per channel" in line
    assert (
        f"dequantised to bfloat16 as they are read: {read:.1f} MiB read, {held:.1f} MiB held"
        in line
    )
    assert "8-bit int activations are not used, activations and KV cache stay in bfloat16" in line


def test_scales_of_activations_are_left_out(plain, tmp_path):
    """Those of static activations, and of a quantised KV cache."""
    stem = "model.layers.0.self_attn."
    for name, scales in (
        ("fp8-tensor", (f"{stem}q_proj.input_scale", f"{stem}k_scale", f"{stem}k_proj.k_scale")),
        ("ct-float-tensor", (f"{stem}q_proj.input_scale", f"{stem}v_scale")),
    ):
        path = repack(plain, tmp_path / name, CASES[name])
        edit(path, lambda tensors, names=scales: tensors.update((n, torch.ones(1)) for n in names))
        with closing(open_checkpoint(path, torch.float32)) as reader:
            assert not set(reader.tensors) & set(scales)
        model = ModelConfig.from_directory(path)
        assert len(list(load_weights(model, torch.float32, CPU))) > 5


def test_a_bias_of_zeros_changes_nothing(plain, tmp_path):
    """Which AutoGPTQ writes for every layer; any other one would be left out of the model."""
    path, bias = repack(plain, tmp_path, CASES["gptq"]), f"{Q}bias"
    edit(path, put(bias, torch.zeros(128)))
    model = ModelConfig.from_directory(path)
    assert bias not in {n for n, _ in load_weights(model, torch.float32, CPU)}
    edit(path, put(bias, torch.zeros(128).index_fill_(0, torch.tensor([77]), 1e-6)))
    with pytest.raises(ModelLoadError, match=r"q_proj\.bias' is none of this architecture's"):
        list(load_weights(model, torch.float32, CPU))


class CountingUploader(PinnedUploader):
    """Copies at once, and counts them."""

    count = 0

    def record_event(self) -> Any:
        self.count += 1
        return self.count

    def wait(self, event: Any) -> None:
        assert event <= self.count


@pytest.mark.parametrize("name", ["awq", "fp8-block", "ct-pack-4-order"])
def test_slices_go_through_the_buffers_of_a_gpu(plain, tmp_path, monkeypatch, name):
    monkeypatch.setattr(reader_module, "SLICE_ELEMENTS", 1500)
    model = ModelConfig.from_directory(repack(plain, tmp_path, CASES[name]))
    expected = dict(load_weights(model, torch.bfloat16, CPU))
    staging = CountingUploader(CPU, chunk_bytes=1000, pin=False)
    found = dict(load_weights(model, torch.bfloat16, CPU, uploader=staging))
    assert list(found) == list(expected)
    assert all(torch.equal(found[n], tensor) for n, tensor in expected.items())
    assert staging.count > 100


@pytest.mark.parametrize("name", ["awq", "fp8-ragged", "ct-pack-4"])
def test_beside_the_parameters_a_slice_is_held(plain, tmp_path, monkeypatch, name):
    """Neither the packed model nor a tensor of the dequantised one."""
    monkeypatch.setattr(reader_module, "SLICE_ELEMENTS", 64)
    model = ModelConfig.from_directory(repack(plain, tmp_path, CASES[name]))
    with LiveBytes() as live:
        held = list(load_weights(model, torch.float32, CPU))
        parameters = sum(tensor.nbytes for _, tensor in held)
        largest = max(t.nbytes for name, t in held if "qkv" in name or "gate_up" in name)
        assert live.peak - parameters < largest / 3


def test_every_configured_method_has_a_reader():
    assert {*WEIGHT_FORMATS, "gguf"} == set(QUANT_METHODS)


GPTQ4 = {"quant_method": "gptq", "bits": 4, "group_size": 32}
PACK = compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "hqq"}, "quant_method is 'hqq', expected 'awq'"),
        ({"bits": 4}, "quant_method is missing"),
        ({"quant_method": "awq", "bits": 8}, "bits is 8, expected an integer from 4 to 4"),
        ({"quant_method": "awq", "group_size": 0}, "group_size is 0"),
        ({"quant_method": "awq", "group_size": 40}, "multiple of group_size=40 rows"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv', expected 'gemm'"),
        ({"quant_method": "awq", "backend": "llm-awq"}, "backend is 'llm-awq'"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point is False"),
        ({"quant_method": "awq", "magic": 1}, "magic is 1, expected no such field"),
        ({"quant_method": "awq", "modules_to_not_convert": "x"}, "modules_to_not_convert is 'x'"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3, expected 2, 4 or 8"),
        ({"quant_method": "gptq", "bits": 2**70}, "bits is"),
        ({"quant_method": "gptq"}, "bits is missing"),
        (GPTQ4 | {"checkpoint_format": "marlin"}, "'marlin'"),
        (GPTQ4 | {"is_marlin_format": True}, "is_marlin_format"),
        (GPTQ4 | {"dynamic": {"+:x": {"bits": 8}}}, "dynamic is"),
        (GPTQ4 | {"rotation": "hadamard"}, "rotation is"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -2}, "group_size is -2"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "from 1 to 65536"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
        ({"quant_method": "fbgemm_fp8", "fmt": "e4m3"}, "fmt is 'e4m3', expected no such"),
        ({"quant_method": "mxfp4", "bits": 4}, "bits is 4, expected no such field"),
        (PACK | {"format": "marlin-24"}, "format is 'marlin-24'"),
        (PACK | {"quantization_status": "frozen"}, "quantization_status is 'frozen'"),
        (PACK | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format is 'sparse-24"),
        (PACK | {"transform_config": {"x": 1}}, "transform_config is"),
        (PACK | {"config_groups": {}}, "config_groups is"),
        (PACK | {"ignore": "lm_head"}, "ignore is 'lm_head'"),
        (compressed("pack-quantized", {"num_bits": 3}), "num_bits is 3, expected 4 or 8"),
        (compressed("pack-quantized", {"num_bits": 4, "magic": 1}), "magic is 1"),
        (compressed("pack-quantized", {"num_bits": 4, "strategy": "token"}), "strategy is 'token'"),
        (compressed("pack-quantized", {"num_bits": 4, "strategy": "group"}), "group_size is"),
        (compressed("int-quantized", {"type": "float"}), "type is 'float', expected that of"),
        (compressed("int-quantized", {"num_bits": 4}), "num_bits is 4, expected 8 with"),
        (compressed("float-quantized", {"type": "float", "symmetric": False}), "symmetric is"),
        (compressed("float-quantized", {"type": "float", "strategy": "block"}), "block_structure"),
        (compressed("int-quantized", {"dynamic": True}), "dynamic is True"),
        (compressed("int-quantized", {}, targets=["re:("]), "targets is"),
        (compressed("mixed-precision", {"num_bits": 8}), "format is missing, expected pack-q"),
    ],
)  # fmt: skip
def test_unsupported_configuration_is_refused(plain, tmp_path, config, words):
    repack(plain, tmp_path, CASES["awq"])
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"quantization_config": config}))
    message = refused(tmp_path)
    assert words in message
    assert str(tmp_path) in message


Q = "model.layers.0.self_attn.q_proj."


def cut(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()})


def put(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: value})


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("awq", drop(f"{Q}scales"), f"tensor '{Q}scales' is missing, which '{Q}qweight' needs"),
        ("awq", drop(f"{Q}qzeros"), "q_proj.qzeros' is missing"),
        ("awq", cut(f"{Q}scales"), r"scales' is F16 of shape \(1, 128\), expected .*\(2, 128\)"),
        ("awq", put(f"{Q}qweight", torch.zeros(64, 16)), "is F32 of shape .* expected I32"),
        ("awq", put(f"{Q}qweight", torch.zeros(0, 4, dtype=torch.int32)), "no dimension of 0"),
        ("awq", put(f"{Q}weight", torch.zeros(128, 64)), "both plain and as .*q_proj.qweight"),
        ("gptq-act-order", drop(f"{Q}g_idx"), "q_proj.g_idx' is missing"),
        ("gptq-act-order", cut(f"{Q}g_idx"), r"g_idx' is I32 of shape \(63,\)"),
        (
            "gptq-act-order",
            put(f"{Q}g_idx", torch.full((64,), 4, dtype=torch.int32)),
            "g_idx' has values from 4 to 4, expected 0 to 3",
        ),
        ("gptq", put(f"{Q}g_idx", torch.full((64,), -1, dtype=torch.int32)), "from -1 to -1"),
        ("gptq", cut(f"{Q}qzeros"), "qzeros' is I32"),
        ("gptq", put(f"{Q}qweight", torch.zeros(8, 9, dtype=torch.int32)), "a multiple of 8"),
        ("fp8-block", drop(f"{Q}weight_scale_inv"), "weight_scale_inv' is missing"),
        ("fp8-block", cut(f"{Q}weight_scale_inv"), r"\(3, 2\), expected shape \(4, 2\)"),
        ("fp8-tensor", put(f"{Q}weight_scale", torch.zeros(7)), r"expected shape \(\) or"),
        ("ct-pack-4", drop(f"{Q}weight_shape"), "weight_shape' is missing"),
        ("ct-pack-4", put(f"{Q}weight_shape", torch.tensor([2**62, 64])), "weight_shape' is"),
        ("ct-pack-4", put(f"{Q}weight_shape", torch.tensor([128, -64])), "weight_shape' is"),
        ("ct-pack-4", put(f"{Q}weight_shape", torch.tensor([128, 72])), "expected words of"),
        ("ct-pack-4", put(f"{Q}weight_shape", torch.tensor([128, 56])), "expected words of"),
        ("ct-pack-4", cut(f"{Q}weight_scale"), r"weight_scale' is BF16 of shape \(127, 2\)"),
        ("ct-pack-4-zeros", drop(f"{Q}weight_zero_point"), "weight_zero_point' is missing"),
        (
            "ct-pack-4-order",
            put(f"{Q}weight_g_idx", torch.full((64,), 9, dtype=torch.int32)),
            "weight_g_idx' has values from 9 to 9, expected 0 to 1",
        ),
        (
            "ct-int",
            put(f"{Q}weight_zero_point", torch.ones(128, 1, dtype=torch.int8)),
            "tensor 'model.layers.0.self_attn.q_proj.weight'.* 'weight_zero_point' is not 0",
        ),
        (
            "ct-pack-8",
            put(f"{Q}weight_g_idx", torch.zeros(64, dtype=torch.int32)),
            "weight_g_idx' is I32 .* none where the strategy is not 'group'",
        ),
        ("ct-int", put(f"{Q}weight", torch.zeros(4, 4).to(torch.float8_e4m3fn)), "expected I8"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(plain, tmp_path, case, change, words):
    path = repack(plain, tmp_path, CASES[case])
    edit(path, change)
    message = refused(path)
    assert re.search(words, message), message
    assert "model.safetensors: tensor" in message


def test_a_group_of_layers_has_its_own_scheme(plain, tmp_path):
    """Named by an expression before the class, and modules that none names are refused."""
    both = {
        "mlp": {"targets": ["re:.*mlp.*"], "weights": {"num_bits": 8, "strategy": "channel"}},
        "rest": {
            "targets": ["Linear"],
            "format": "float-quantized",
            "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        },
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    both["mlp"]["format"] = "int-quantized"

    def pack(weight: torch.Tensor, random: Any) -> Any:
        name = "ct-int" if 96 in weight.shape else "ct-float-tensor"
        return CASES[name].pack(weight, random)

    expected = quantise_checkpoint(
        Path(shutil.copytree(plain, tmp_path / "both")),
        Case(config | {"config_groups": both}, pack),
    )
    with closing(open_checkpoint(tmp_path / "both", torch.float32)) as reader:
        for name, tensor in expected.items():
            assert torch.equal(reader.tensor(name), tensor), name
    del both["rest"]
    quantise_checkpoint(
        Path(shutil.copytree(plain, tmp_path / "one")),
        Case(config | {"config_groups": both}, pack),
    )
    assert "none of config_groups has a target for its module" in refused(tmp_path / "one")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**63], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 2**63]},
        {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
        {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]},
    ],
)
def test_a_hostile_header_is_refused(tmp_path, entry):
    """Of safetensors: sizes beyond the file, negative ones, and tensors that overlap."""
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": CASES["awq"].config}))
    first = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    for header in ({"a": entry}, {"a": first, "b": entry}, {"a": first, "b": first}):
        data = json.dumps(header).encode()
        file = tmp_path / "model.safetensors"
        file.write_bytes(
            len(data).to_bytes(8, "little") + data + bytes(20 if len(header) > 1 else 16)
        )
        assert "not a whole safetensors file" in refused(tmp_path)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantising_a_quantised_checkpoint_is_refused(plain, tmp_path, quantization):
    model = ModelConfig.from_directory(repack(plain, tmp_path, CASES["awq"]))
    config = EngineConfig(quantization=quantization)
    with pytest.raises(
        InvalidRequestError, match=rf"'{quantization}'.*None: .*quantised already \(awq\)"
    ):
        resolve_quantisers(config, model, CPU, TorchOps())
    assert resolve_quantisers(EngineConfig(), model, CPU, TorchOps()) is None
