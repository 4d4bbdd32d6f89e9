"""GGUF files of every family: names, orders, changed values, rules of layers; split files."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncllm import LLM
from asyncllm.checkpoint.gguf_families import GGUF_FAMILIES
from asyncllm.checkpoint.gguf_file import GGUFFile, gguf_parts
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.checkpoint.model_files import resolve_model
from asyncllm.checkpoint.weights_identity import WeightsIdentity
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.native_weights import native_type_code
from asyncllm.gpu.weights import load_weights
from tests.linear_weights import dequantised
from tests.parity import (
    LONG_LENGTHS,
    PROMPT_LENGTHS,
    Case,
    case_loader,
    check_fails,
    check_reference,
    run_everything,
    run_matrix,
)

gguf = pytest.importorskip("gguf", reason="the extra 'gguf' is not installed")
from tests.gguf_families import CASES, make_family, write_family  # noqa: E402

CPU = torch.device("cpu")
FAST = ("Gemma2", "Gemma3", "GptOss", "Mixtral", "Olmo3", "Phi3", "Qwen3Next", "Qwen3_5Moe")
"""Cases that are run by default: each rule is in one of them. All are compared tensor by tensor."""

LARGE = ("Gemma3", "Phi3-longrope")
"""Cases that are not run in every way: the KV cache of a matrix is too small for their layers, or
transformers would change its frequencies within a shorter prompt."""

OTHER_FIELDS = ("path", "eos_token_ids", "generation_defaults", "num_unused_layers")
"""Fields of ModelConfig that a GGUF file states in another way than config.json."""

OTHER_FIELDS_OF = {
    # Read in the form of Qwen3.5, and of Granite 3, in which their files are stored.
    "Qwen3Next": ("architecture", "intermediate_size", "linear_attention"),
    "GraniteMoeHybrid-dense": ("architecture", "layer_ropes", "names"),
}


def make(path: Path, name: str) -> Case:
    model = make_family(path, name)
    lengths = LONG_LENGTHS if name == "Phi3-longrope" else PROMPT_LENGTHS
    return on_file(Case.of(path, model, lengths=lengths), write_family(path, name))


def on_file(case: Case, path: Path) -> Case:
    """The case with a GGUF file in place of its checkpoint."""
    return replace(case, config=ModelConfig.from_directory(path))


def model_of(case: Case) -> ModelConfig:
    assert case.config is not None
    return case.config


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    return case_loader(tmp_path_factory, make)


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a file of a case, whose checkpoint is made once."""
    made: dict[str, Path] = {}

    def write(name: str, *args: Any, **more: Any) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            make_family(made[name], name)
        return write_family(made[name], name, *args, **more)

    return write


def weights(path: Path, **settings: Any) -> dict[str, Any]:
    model = ModelConfig.from_directory(path)
    return dict(load_weights(model, torch.float32, CPU, **settings))


def test_every_architecture_is_written_in_these_tests():
    assert {architecture for architecture, _ in CASES.values()} == set(GGUF_FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_file_has_configuration_and_tensors_of_checkpoint(write, name):
    path = write(name)
    found, expected = (ModelConfig.from_directory(each) for each in (path, path.parent))
    other = (*OTHER_FIELDS, *OTHER_FIELDS_OF.get(name, ()))
    for field in dataclasses.fields(ModelConfig):
        if field.name not in other:
            values = (getattr(each, field.name) for each in (found, expected))
            assert_close(field.name, *values)
    tensors, originals = weights(path), weights(path.parent)
    assert tensors.keys() == originals.keys()
    for key, tensor in tensors.items():
        if name != "Qwen3Next" or not key.endswith(("qkvz.weight", "gates.weight")):
            torch.testing.assert_close(tensor, originals[key], rtol=1e-6, atol=1e-6, msg=key)


def assert_close(name: str, found: Any, expected: Any) -> None:
    """Numbers are of float32 in a GGUF file."""
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        for field in dataclasses.fields(found):
            assert_close(
                f"{name}.{field.name}", getattr(found, field.name), getattr(expected, field.name)
            )
    elif isinstance(found, tuple) and isinstance(expected, tuple):
        assert len(found) == len(expected), name
        for one, other in zip(found, expected, strict=True):
            assert_close(name, one, other)
    elif isinstance(found, float):
        assert found == pytest.approx(expected, rel=1e-6), name
    else:
        assert found == expected, name


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_batched_and_chunked_tokens_equal_transformers(load, name):
    case = load(name)
    check_reference(case)
    run_everything(case, case.runner(num_blocks=600))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in LARGE])
def test_tokens_equal_transformers_in_every_way(load, name, backend):
    run_matrix(load(name), backend)


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("Llama-yarn", {"permutes_heads": False}),
        ("Gemma2", {"full_attention_interval": 3}),
        ("Qwen3_5Moe", {"grouped_gates_tensor": "ssm_ba.weight"}),
    ],
)
def test_a_rule_left_out_is_seen(load, monkeypatch, name, mistake):
    case = load(name)
    path, architecture = model_of(case).path, CASES[name][0]
    monkeypatch.setitem(
        GGUF_FAMILIES, architecture, replace(GGUF_FAMILIES[architecture], **mistake)
    )
    wrong = on_file(case, path)
    check_fails(wrong, wrong.runner())


@pytest.mark.parametrize("name", ["Gemma2", "Olmo3"])
def test_a_shifted_pattern_is_seen(load, name):
    case = load(name)
    for pattern, right in (([True, False, True], True), ([False, True, False], False)):
        listed = {"attention.sliding_window_pattern": pattern}
        other = on_file(case, write_family(case.path, name, metadata=listed))
        if right:
            assert model_of(other).sliding_layers == model_of(case).sliding_layers
        else:
            check_fails(other, other.runner())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Gemma3", "Q8_0"),
        ("Qwen3_5Moe", "Q4_0"),
        ("GptOss", "MXFP4"),
        ("Granite", "Q5_1"),
        ("Phi3", "F16"),
    ],
)
def test_quantised_tensors_equal_plain_file(write, name, kind):
    quantised, plain = write(name, kind), write(name, kind, dequantised=True)
    kinds = {gguf.GGMLQuantizationType(t.type).name for t in GGUFFile(quantised).tensors.values()}
    assert kinds == {kind, "F32"}
    expected = weights(plain)
    for key, tensor in weights(quantised).items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-6, atol=0, msg=key)


def test_experts_stay_packed(write):
    path = write("Qwen3Moe", "Q8_0")
    expected = weights(path)
    found = weights(path, accepts_weights=lambda spec: native_type_code(spec) is not None)
    packed = [key for key, each in found.items() if isinstance(each, LinearWeights)]
    # Rows of the down projections, of 48 elements, are no multiple of a block.
    assert "layers.2.experts.gate_up.weight" in packed
    assert "layers.2.experts.down.weight" not in packed
    for key in packed:
        torch.testing.assert_close(dequantised(found[key]).float(), expected[key])


@pytest.mark.parametrize(
    ("name", "metadata", "words"),
    [
        ("Qwen3", {"attention.sliding_window": 7}, "attention.sliding_window is 7, expected 0"),
        ("Qwen3", {"attention.causal": False}, "attention.causal is False, expected True"),
        ("Qwen3", {"expert_count": 4}, "expert_count is 4, expected 0"),
        ("Qwen3", {"nextn_predict_layers": 1}, "nextn_predict_layers is 1, expected no such"),
        ("Gemma2", {"rope.freq_base_swa": 5.0}, "rope.freq_base_swa is 5.0, expected no such"),
        ("Gemma2", {"attention.sliding_window_pattern": [True]}, "a list of block_count=3"),
        ("Gemma2", {"attention.sliding_window_pattern": 2}, "a list of block_count=3 booleans"),
        ("Granite", {"attention.scale": None}, "attention.scale is missing"),
        ("Granite", {"rope.scaling.finetuned": False}, "finetuned is False, expected True"),
        ("Glm4", {"rope.dimension_sections": [4, 2, 2, 0]}, "rope.dimension_sections is"),
        ("Glm4", {"rope.dimension_count": 17}, "rope.dimension_count is 17"),
        ("Glm4Moe", {"expert_gating_func": 1}, "expert_gating_func is 1, expected 2"),
        ("Llama-yarn", {"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
        ("Llama-yarn", {"rope.scaling.attn_factor": 0.5}, "attn_factor is 0.5, expected 1.0"),
        ("Llama-yarn", {"attention.temperature_scale": 0.5}, "temperature_scale is 0.5, expected"),
        ("Llama-yarn", {"rope.scaling.type": "dynamic"}, "rope.scaling.type is 'dynamic'"),
        ("Phi3-longrope", {"rope.scaling.original_context_length": None}, "is missing"),
        ("Qwen3_5", {"ssm.inner_size": 30}, "ssm.inner_size is 30, expected a multiple of"),
        ("Qwen3_5", {"ssm.inner_size": 64}, "rows or columns of heads, expected"),
        ("Qwen3_5", {"ssm.time_step_rank": 0}, "ssm.time_step_rank is 0"),
        ("Qwen3_5", {"attention.recurrent_layers": [True]}, "a list of block_count=3 booleans"),
        ("Qwen3_5", {"nextn_predict_layers": 3}, "nextn_predict_layers is 3"),
        ("Qwen3Moe", {"expert_count": 5}, "shape (6, 64, 48), expected the stacked weights of"),
        ("Qwen3Moe", {"expert_count": 2**31}, "num_experts is 2147483648"),
        ("Qwen3Moe", {"expert_used_count": 7}, "num_experts_per_tok is 7"),
        ("GptOss", {"expert_count": None}, "num_local_experts is missing"),
    ],
)
def test_a_value_that_is_not_supported_is_named(write, name, metadata, words):
    path = write(name, metadata=metadata)
    with pytest.raises(ModelLoadError) as caught:
        weights(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_factor_without_a_type_is_linear(write):
    path = write("Llama-linear", metadata={"rope.scaling.type": None})
    rope = ModelConfig.from_directory(path).rope
    assert (rope.kind, rope.factor) == ("linear", 2.0)


def test_files_of_mistral_small_are_of_llama(write):
    path = write("Ministral3", metadata={"attention.temperature_scale": None})
    assert ModelConfig.from_directory(path).architecture == "LlamaForCausalLM"


def test_layers_for_multi_token_prediction_are_left_out(write):
    """A file with a layer less than it has tensors of."""
    path = write("Qwen3_5", metadata={"nextn_predict_layers": 1})
    model = ModelConfig.from_directory(path)
    assert model.num_layers == 2
    assert model.linear_attention is not None
    assert model.linear_attention.layers == (True, False)
    assert {key.split(".")[1] for key in weights(path) if "layers" in key} == {"0", "1"}


def test_invalid_decay_rates_are_refused(write, monkeypatch):
    monkeypatch.setattr(np, "exp", lambda values: values)
    path = write("Qwen3_5", "F16")
    with pytest.raises(ModelLoadError, match="'ssm_a' has rates of 0 or more"):
        weights(path)


@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(write, tmp_path_factory, data):
    """Some bytes are others, of which those of the metadata and of the tensor table count."""
    name = data.draw(st.sampled_from(("Qwen3_5Moe", "Qwen3Next", "Phi3-longrope")))
    whole = write(name).read_bytes()
    header = min(tensor.start_offset for tensor in GGUFFile(write(name)).tensors.values())
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(24, 2000) | st.integers(header - 5000, header))
        damaged[place] = data.draw(st.integers(0, 3) | st.sampled_from((8, 9, 64, 127, 128, 255)))
    path = tmp_path_factory.getbasetemp() / "damaged-family.gguf"
    path.write_bytes(damaged)
    with contextlib.suppress(ModelLoadError):
        weights(path)


# --- split files -----------------------------------------------------------------------------


@pytest.fixture
def split(write, tmp_path) -> list[Path]:
    """Three parts of a file, in a directory of their own."""
    first = write("Qwen3", "Q8_0", parts=3)
    parts = [tmp_path / part.name for part in gguf_parts(first)]
    for part in parts:
        part.write_bytes((first.parent / part.name).read_bytes())
    return parts


def test_parts_are_one_file(split, write):
    expected = weights(write("Qwen3", "Q8_0"))
    for location in (*split, split[0].parent):
        path = resolve_model(location)
        assert path == split[0]
    for part in split:
        found = weights(part)
        assert found.keys() == expected.keys()
        for key, tensor in found.items():
            assert torch.equal(tensor, expected[key]), key
    used = {tensor.path for tensor in GGUFFile(split[1]).tensors.values()}
    assert used == set(split)
    assert WeightsIdentity.of(split[0]).paths == tuple(split)


def test_an_engine_serves_parts(split, write, caplog):
    with caplog.at_level(logging.INFO, logger="asyncllm"), LLM(split[2], device="cpu") as llm:
        found = llm.generate([1, 2, 3], temperature=0.0, max_tokens=8).token_ids
    with LLM(write("Qwen3", "Q8_0"), device="cpu") as llm:
        assert llm.generate([1, 2, 3], temperature=0.0, max_tokens=8).token_ids == found
    assert any(split[0].name in record.getMessage() for record in caplog.records)


def test_missing_parts_are_named(split):
    split[1].unlink()
    for location in (split[0], split[2], split[0].parent):
        with pytest.raises(ModelLoadError, match=rf"1 of its 3 parts are missing: {split[1].name}"):
            resolve_model(location)
    with pytest.raises(ModelLoadError, match="parts are missing"):
        GGUFFile(split[0])


def test_a_second_file_beside_parts_is_named(split):
    (split[0].parent / "other.gguf").write_bytes(b"")
    with pytest.raises(
        ModelLoadError, match=rf"name one of them behind a colon: {split[0].name}, other\.gguf"
    ):
        resolve_model(split[0].parent)


def test_parts_that_are_not_of_one_file_are_refused(split, write):
    second = split[1].read_bytes()

    def refused() -> str:
        with pytest.raises(ModelLoadError) as caught:
            GGUFFile(split[0])
        return str(caught.value)

    split[1].write_bytes(split[2].read_bytes())
    assert f"{split[1]}: split.count is 3 and split.no is 2, expected 3 and 1" in refused()
    split[1].write_bytes(write("Qwen3").read_bytes())
    assert f"{split[1]}: split.count is 1" in refused()
    other = gguf_parts(write("Qwen2", "Q8_0", parts=3))
    split[1].write_bytes(other[1].read_bytes())
    message = refused()
    assert "is there twice, in two parts" in message or "split.tensors.count is" in message
    split[1].write_bytes(second)
    GGUFFile(split[0])
    alone = split[0].with_name("renamed.gguf")
    split[0].rename(alone)
    with pytest.raises(ModelLoadError, match=r"split\.count is 3 and split\.no is 0, expected 1"):
        GGUFFile(alone)


def test_part_changed_while_read_is_noticed(split):
    from asyncllm.gpu.formats.open_checkpoint import open_checkpoint

    reader = open_checkpoint(split[0], torch.float32)
    with split[2].open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ModelLoadError, match=rf"{split[2].name}: was changed"):
        reader.tensor("lm_head.weight")
    reader.close()
