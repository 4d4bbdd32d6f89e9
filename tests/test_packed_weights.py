"""Quantised checkpoints on native ops without dequantising."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncllm import EngineConfig
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.checkpoint.reader import QuantisedTensor
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.formats import reader as reader_module
from asyncllm.gpu.ops.linear_weights import LinearWeights, WeightSpec
from asyncllm.gpu.ops.native_weights import native_type_code
from asyncllm.gpu.weights import join_quantised_parts, load_weights
from tests.checkpoints import make_checkpoint
from tests.driver import Driver, watch_outputs
from tests.linear_weights import dequantised
from tests.live_bytes import LiveBytes
from tests.native_library import INT8_IN_SPANS, ISAS, needs_native
from tests.packing import CASES, GROUP4, Case, compressed, packed_tensors, repack

CPU = torch.device("cpu")

PACKED = {
    "awq": ("int4", (1, 32)),
    "gptq": ("int4", (1, 32)),
    "gptq-v2-8": ("int8", (1, 32)),
    "ct-pack-4": ("int4", (1, 32)),
    "ct-pack-4-zeros": ("int4", (1, 32)),
    "ct-pack-8": ("int8", None),
    "ct-int": ("int8", None),
    "ct-int-zeros": ("int8", None),
    "ct-int-tensor": ("int8", None),
}
"""The cases of tests.packing that stay packed; None is a scale per output channel."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    make_checkpoint(path, "Qwen3ForCausalLM", head_dim=32, num_hidden_layers=2)
    return path


def repacked(plain: Path, path: Path, case: Case) -> ModelConfig:
    return ModelConfig.from_directory(repack(plain, path, case))


def loaded(model: ModelConfig, **settings: Any) -> dict[str, Tensor | LinearWeights]:
    return dict(load_weights(model, torch.float32, CPU, **settings))


def takes(spec: WeightSpec) -> bool:
    return native_type_code(spec) is not None


def bundles(weights: Iterable[tuple[str, Tensor | LinearWeights]]) -> dict[str, LinearWeights]:
    return {name: each for name, each in weights if isinstance(each, LinearWeights)}


def unpacked(weights: Mapping[str, Tensor | LinearWeights]) -> dict[str, Tensor]:
    return {name: each for name, each in weights.items() if isinstance(each, Tensor)}


def layers(names: Iterable[str]) -> set[str]:
    """The linear layers of "layers.0.qkv.weight" and its like."""
    return {name.split(".")[-2] for name in names}


@pytest.mark.parametrize("name", CASES)
def test_packed_weights_equal_dequantised(plain, tmp_path, monkeypatch, name):
    monkeypatch.setattr(reader_module, "SLICE_ELEMENTS", 1500)
    model = repacked(plain, tmp_path, CASES[name])
    expected, found = unpacked(loaded(model)), loaded(model, accepts_weights=takes)
    assert list(found) == list(expected)
    packed = bundles(found.items())
    if name not in PACKED:
        assert not packed
        return
    assert layers(packed) - {"lm_head"} == {"qkv", "o", "gate_up", "down"}
    scheme, block = PACKED[name]
    for each, tensor in expected.items():
        if each not in packed:
            assert torch.equal(unpacked(found)[each], tensor)
            continue
        weights = packed[each]
        assert weights.scheme == scheme
        assert weights.scale_block == (block or (1, weights.shape[1]))
        exact = dequantised(weights)
        torch.testing.assert_close(exact.float(), tensor, rtol=1e-6, atol=0.0)


@needs_native
@pytest.mark.parametrize("name", ["awq", "gptq", "gptq-v2-8", "ct-pack-4", "ct-int"])
def test_logits_equal_dequantised_weights(plain, tmp_path, name):
    """But for inputs that are rounded to 8 bits, or, with a scale per output channel, to 16 on some
    instruction sets."""
    model = repacked(plain, tmp_path, CASES[name])
    found = {}
    for attention in ("torch", "native"):
        config = EngineConfig(
            device="cpu", dtype="float32", attention_backend=attention, num_blocks=32,
            num_threads=1, async_scheduling=False,
        )  # fmt: skip
        runner = build_model_runner(config, model)
        outputs = watch_outputs(runner)
        driver = Driver(runner)
        sequences = [driver.add(prompt, 4) for prompt in ([3], list(range(40)), [7] * 9)]
        driver.run(sequences)
        assert len(outputs) == 8
        found[attention] = outputs[0].float()
        runner.close()
    expected, had = (found[key] - found[key].mean(1, keepdim=True) for key in ("torch", "native"))
    error = (had - expected).norm() / expected.norm()
    in_16_bits = name == "ct-int" and ISAS[0] not in INT8_IN_SPANS
    assert 0.0 < error < (0.002 if in_16_bits else 0.03)


def test_parts_of_different_forms_are_beside_each_other(plain, tmp_path):
    """The value projection of 8 bits, the others of 4: one linear layer computes all three."""
    config = compressed("pack-quantized", GROUP4)
    config["config_groups"]["group_1"] = {
        "targets": ["re:.*v_proj"], "weights": {"num_bits": 8, "strategy": "channel"},
        "input_activations": None,
    }  # fmt: skip
    four, eight = packed_tensors(4, 32), packed_tensors(8, None)
    turn = iter(range(10**6))

    def pack(weight, random):
        return (eight if next(turn) in values else four)(weight, random)

    stored = [name for name in load_file(plain / "model.safetensors") if "_proj." in name]
    values = {index for index, name in enumerate(stored) if "v_proj" in name}
    model = repacked(plain, tmp_path, Case(config, pack))
    expected = unpacked(loaded(model))
    packed = bundles(loaded(model, accepts_weights=takes).items())
    assert layers(packed) - {"lm_head"} == {"qkv", "o", "gate_up", "down"}
    for each, weights in packed.items():
        schemes = ["int4", "int8"] if "qkv" in each else ["int4"]
        assert [part.scheme for part in weights.single_scheme_parts] == schemes
        exact = torch.cat([dequantised(part) for part in weights.single_scheme_parts])
        torch.testing.assert_close(exact.float(), expected[each], rtol=1e-6, atol=0.0)


def codes(bits: int = 4, group: int = 32, rows: int = 8, **more: Any) -> QuantisedTensor:
    values = torch.randint(0, 2**bits, (rows, 64), dtype=torch.uint8)
    grid = (rows, -(-64 // group))
    zeros = more.pop("zeros", torch.full(grid, 2 ** (bits - 1)))
    return QuantisedTensor(
        bits, (rows, 64), lambda a, b: values[a:b], torch.ones(grid), (1, group), zeros, **more
    )


def test_unpackable_weights():
    alike = join_quantised_parts([codes(), codes(rows=16)], takes)
    assert alike is not None
    assert (alike.shape, alike.next_parts) == ((24, 64), ())
    parts = [codes(), codes(), codes(group=64), codes(bits=8), codes()]
    mixed = join_quantised_parts(parts, takes)
    assert mixed is not None
    assert [(part.shape, part.scheme) for part in mixed.single_scheme_parts] == [
        ((16, 64), "int4"), ((8, 64), "int4"), ((8, 64), "int8"), ((8, 64), "int4"),
    ]  # fmt: skip
    order = torch.arange(64).flip(0) // 32
    for parts in (
        [codes(), None],
        [None],
        [codes(), codes(bits=2)],
        [codes(group=16)],
        [codes(bits=2)],
        [codes(column_groups=order)],
        [codes(zeros=torch.full((8, 2), -3))],
    ):
        assert join_quantised_parts(parts, takes) is None
    assert join_quantised_parts([codes()], lambda spec: spec.scheme == "plain") is None


def test_log_line_names_packed_weights(plain, tmp_path, caplog):
    model = repacked(plain, tmp_path, CASES["awq"])
    with caplog.at_level(logging.INFO, logger="asyncllm"):
        held = loaded(model, accepts_weights=takes)
    (line,) = [record.getMessage() for record in caplog.records]
    num_bytes = sum(
        each.num_bytes if isinstance(each, LinearWeights) else each.nbytes for each in held.values()
    )
    assert "stay packed for linear layers (int4 in groups of 32)" in line
    assert "others are dequantised to float32" in line
    assert f"{num_bytes / 2**20:.1f} MiB held" in line


def test_less_is_held_than_dequantised(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(reader_module, "SLICE_ELEMENTS", 64)
    model = repacked(plain, tmp_path, CASES["awq"])
    with LiveBytes() as live:
        held = loaded(model, accepts_weights=takes)
        packed = bundles(held.items())
        whole = sum(t.nbytes for t in held.values() if isinstance(t, Tensor))
        num_bytes = sum(each.num_bytes for each in packed.values())
        elements = sum(each.shape[0] * each.shape[1] for each in packed.values())
        assert num_bytes < 0.9 * elements
        assert live.peak - whole - num_bytes < 0.2 * elements
