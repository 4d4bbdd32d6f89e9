"""GGUF files: tensors, configuration, tokenizer, and files that are damaged or not supported."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import shutil
import struct
import sys
import tracemalloc
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from asyncllm import LLM
from asyncllm.checkpoint import gguf_file
from asyncllm.checkpoint.gguf_file import GGML_TYPES, GGUFFile
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.checkpoint.model_files import resolve_model, resolve_tokenizer
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.formats import reader as reader_module
from asyncllm.gpu.formats.open_checkpoint import open_checkpoint
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.native_weights import native_type_code
from asyncllm.gpu.weights import load_weights
from asyncllm.text.template_input import TemplateInput
from asyncllm.text.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint
from tests.linear_weights import dequantised
from tests.parity import check_greedy

gguf = pytest.importorskip("gguf", reason="the extra 'gguf' is not installed")
from tests.gguf_blocks import dequantised_blocks  # noqa: E402
from tests.gguf_files import TEMPLATE, write_gguf  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    make_checkpoint(path, "LlamaForCausalLM", num_hidden_layers=1)
    return path


@pytest.fixture(scope="module")
def whole(plain: Path) -> bytes:
    """A file of that checkpoint."""
    path = plain / "whole.gguf"
    write_gguf(path, plain, load_file(plain / "model.safetensors"), "Q8_0")
    return path.read_bytes()


def write(path: Path, plain: Path, kind: Any = "Q8_0", **more: Any) -> dict[str, torch.Tensor]:
    return write_gguf(path, plain, load_file(plain / "model.safetensors"), kind, **more)


def refused(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        ModelConfig.from_directory(path)
        with closing(open_checkpoint(path, torch.float32)) as reader:
            for name in reader.tensors:
                reader.tensor(name)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_the_table_of_types_is_that_of_gguf_py():
    for number, (name, *sizes) in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == name
        assert gguf.GGML_QUANT_SIZES[kind] == tuple(sizes)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_tensors_are_those_that_were_written(plain, tmp_path, monkeypatch, kind):
    """Rotated rows of q and k included, in slices of a few rows."""
    path = tmp_path / "model.gguf"
    meant, original = write(path, plain, kind), load_file(plain / "model.safetensors")
    monkeypatch.setattr(reader_module, "SLICE_ELEMENTS", 700)
    for dtype in (torch.float32, torch.bfloat16):
        with closing(open_checkpoint(path, dtype)) as reader:
            assert set(reader.tensors) == set(meant)
            for name, tensor in meant.items():
                found = reader.tensor(name)
                assert reader.tensors[name].shape == found.shape == tensor.shape
                assert torch.equal(found.float(), tensor.to(found.dtype).float()), name
                # As far from what was written as the type is coarse.
                steps = {"Q8_0": 0.01, "Q4_0": 0.2, "Q4_1": 0.2, "Q5_0": 0.1, "Q5_1": 0.1}
                error = (found.float() - original[name].float()).abs().max()
                assert error <= steps.get(kind, 0.01) * original[name].abs().max()
                assert found.dtype == dtype or kind in ("F32", "F16", "BF16") or tensor.dim() == 1
                assert len(list(reader.slices(name))) > (tensor.dim() > 1)


RANDOM_KINDS = [name for name, elements, _ in GGML_TYPES.values() if elements > 1]


def random_blocks(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Bytes of a type that gguf-py does not write, without infinite scales."""
    elements, size = next((e, s) for k, e, s in GGML_TYPES.values() if k == kind)
    raw = np.random.default_rng(seed).integers(0, 256, (rows, columns // elements, size), np.uint8)
    # float16 scales, wherever they are: bits 6 and 5 of the high byte clear of the greatest.
    places = {
        "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,),
        "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2), "MXFP4": (), "IQ1_M": (),
    }.get(kind, (0,))  # fmt: skip
    for place in places:
        raw[:, :, place + 1] = raw[:, :, place + 1] & 0x83 | 0x20
    if kind == "IQ1_M":
        raw[:, :, 49::2] &= 0x3F
    if kind == "MXFP4":
        raw[:, :, 0] = 120 + raw[:, :, 0] % 8
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", RANDOM_KINDS)
def test_every_type_equals_gguf_py(tmp_path, monkeypatch, kind):
    """Also where transformers has no such code, and gguf-py is what computes it."""
    number = gguf.GGMLQuantizationType[kind]
    raw = random_blocks(kind, 6, 512, seed=3)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for key in ("context_length", "block_count", "embedding_length", "feed_forward_length"):
        getattr(writer, f"add_{key}")(512)
    writer.add_head_count(8)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = torch.from_numpy(gguf.dequantize(raw, number))
    for without in ((), ("transformers.integrations.gguf.dequant",)):
        for module in without:
            monkeypatch.setitem(sys.modules, module, None)
        with closing(open_checkpoint(tmp_path / "x.gguf", torch.float32)) as reader:
            found = reader.tensor("model.embed_tokens.weight")
        assert bool(found.isfinite().all())
        assert found.std() > 0
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("LlamaForCausalLM", "Q4_0", {}),
        ("Qwen3ForCausalLM", "Q8_0", {"head_dim": 32, "tie_word_embeddings": True}),
        pytest.param("Qwen2ForCausalLM", "Q5_0", {}, marks=pytest.mark.slow),
        pytest.param("LlamaForCausalLM", "F16", {"attention_bias": True}, marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_equal_transformers_with_dequantised_weights(tmp_path, name, kind, settings):
    reference = make_checkpoint(tmp_path, name, **settings)
    path = tmp_path / "model.gguf"
    meant = write(path, tmp_path, kind)
    reference.load_state_dict(meant, strict=not settings.get("tie_word_embeddings"))
    config = ModelConfig.from_directory(path)
    expected = ModelConfig.from_directory(tmp_path)
    same = ("hidden_size", "head_dim", "num_kv_heads", "vocab_size", "tie_word_embeddings", "rope")
    assert [getattr(config, n) for n in same] == [getattr(expected, n) for n in same]
    assert config.quantization == (None if kind == "F16" else "gguf")
    assert config.dtype == ("float16" if kind == "F16" else "bfloat16")
    check_greedy(ModelConfig.from_directory(path), reference)


def test_mixed_k_quants_equal_transformers(tmp_path):
    """As Q4_K_M has them: Q6_K for the values, the down projection and the head."""
    reference = make_checkpoint(
        tmp_path, "Qwen3ForCausalLM", hidden_size=256, head_dim=64, intermediate_size=256
    )
    tensors, raw = load_file(tmp_path / "model.safetensors"), {}
    path = tmp_path / "model.gguf"
    for index, (name, tensor) in enumerate(tensors.items()):
        if tensor.dim() > 1:
            q6 = any(part in name for part in ("v_proj", "down_proj", "lm_head"))
            kind = gguf.GGMLQuantizationType["Q6_K" if q6 else "Q4_K"]
            blocks = random_blocks(kind.name, *tensor.shape, seed=index)
            values = torch.from_numpy(gguf.dequantize(blocks, kind))
            # A model's size: the scales are the last bytes of a block of Q6_K, the first of Q4_K.
            size = 2.0 ** round(math.log2(tensor.std().item() / values.std().item()))
            halves = blocks.view(np.float16).reshape(-1, GGML_TYPES[int(kind)][2] // 2)
            halves[:, slice(104, None) if q6 else slice(0, 2)] *= np.float16(size)
            raw[name] = (blocks, kind)
            tensors[name] = torch.from_numpy(gguf.dequantize(blocks, kind))
    write_gguf(path, tmp_path, tensors, "F32", raw=raw)
    reference.load_state_dict(tensors)
    check_greedy(ModelConfig.from_directory(path), reference)


def llama3_factors(size: int, factor: float, theta: float = 10_000.0) -> np.ndarray:
    """convert_hf_to_gguf.py: ``LlamaModel.generate_extra_tensors``."""
    factors = []
    for index in range(0, size, 2):
        wavelength = 2 * math.pi * theta ** (index / size)
        if wavelength < 8192 / 4.0:
            factors.append(1.0)
        elif wavelength > 8192 / 1.0:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def test_the_factors_of_llama_3_become_its_rope_scaling(tmp_path):
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 10_000.0,
    }  # fmt: skip
    make_checkpoint(tmp_path, "LlamaForCausalLM", num_hidden_layers=1, rope_parameters=scaling)
    expected = ModelConfig.from_directory(tmp_path).rope
    factors = llama3_factors(16, 8.0)
    assert len(set(factors.tolist())) > 2
    path = tmp_path / "model.gguf"
    write(path, tmp_path, extra={"rope_freqs.weight": factors})
    found = ModelConfig.from_directory(path)
    assert found.rope == expected
    assert len(list(load_weights(found, torch.float32, CPU))) > 5
    write(path, tmp_path, extra={"rope_freqs.weight": np.ones(8, np.float32)})
    assert ModelConfig.from_directory(path).rope.kind == "default"
    for wrong in (factors[::-1].copy(), factors[:-1].copy()):
        write(path, tmp_path, extra={"rope_freqs.weight": wrong})
        assert "'rope_freqs.weight' has other factors than Llama 3.1's" in refused(path)
    for value in (0.0, -1.0, np.inf, np.nan):
        write(path, tmp_path, extra={"rope_freqs.weight": np.full(8, value, np.float32)})
        assert "'rope_freqs.weight' has factors from" in refused(path)


def test_the_tokenizer_and_the_template_are_the_files(plain, tmp_path):
    path = tmp_path / "model.gguf"
    write(path, plain)
    tokenizer = Tokenizer.from_directory(path)
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>"}
    assert tokenizer.special_token_ids == {254, 255}
    assert tokenizer.vocab_size == 256
    text = "cab<|im_end|> z"
    ids = tokenizer.encode(text)
    assert ids == [66, 253, 255, 252, 89]
    assert tokenizer.decode(ids) == "cab z"
    assert tokenizer.chat_template.sources == {"default": TEMPLATE}
    assert tokenizer.encode_chat(TemplateInput([{"role": "user", "content": "a"}], {})) is not None
    assert ModelConfig.from_directory(path).eos_token_ids == (255,)


def test_bos_is_added_where_the_file_says_so(plain, tmp_path):
    path = tmp_path / "model.gguf"
    for flag, expected in ((True, [254, 64]), (False, [64])):
        bos = {"tokenizer.ggml.bos_token_id": 254, "tokenizer.ggml.add_bos_token": flag}
        write(path, plain, metadata=bos)
        assert Tokenizer.from_directory(path).encode("a") == expected


def test_a_sentencepiece_vocabulary(plain, tmp_path):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(200, 245)), "▁", "a", "b"]
    pieces += ["ab", "▁ab", "c"]
    tokens = pieces + [f"unused{i}" for i in range(256 - len(pieces))]
    types = [2, 3, 3, *[6] * 45, *[1] * (256 - 48)]
    spm = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) for i in range(256)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b", "▁ ab"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    write(tmp_path / "x.gguf", plain, metadata=spm)
    tokenizer = Tokenizer.from_directory(tmp_path / "x.gguf")
    ids = tokenizer.encode("ab c")
    assert [tokens[i] for i in ids] == ["<s>", "▁ab", "▁", "c"]
    assert tokenizer.decode(ids) == "ab c"
    assert {k: tokenizer.special_tokens[k] for k in ("bos_token", "eos_token", "unk_token")} == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"
    }  # fmt: skip


def test_unknown_split_is_refused(plain, tmp_path):
    path = tmp_path / "x.gguf"
    write(path, plain, metadata={"tokenizer.ggml.pre": "bert-bge"})
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.pre is 'bert-bge', expected"):
        Tokenizer.from_directory(path)
    write(path, plain, metadata={"tokenizer.ggml.pre": "llama-bpe"})
    assert Tokenizer.from_directory(path).encode("a") == [64]


def test_every_end_that_the_file_names_ends_an_output(plain, tmp_path):
    write(tmp_path / "x.gguf", plain, metadata={"tokenizer.ggml.eot_token_id": 254})
    assert ModelConfig.from_directory(tmp_path / "x.gguf").eos_token_ids == (255, 254)


def test_an_engine_serves_a_file(plain, tmp_path, caplog):
    path = tmp_path / "model.gguf"
    write(path, plain)
    with caplog.at_level(logging.INFO, logger="asyncllm"), LLM(path, device="cpu") as llm:
        first = llm.generate("ab", temperature=0.0, max_tokens=6)
        again = llm.chat([{"role": "user", "content": "ab"}], temperature=0.0, max_tokens=3)
    assert len(first.token_ids) == 6
    assert again.usage is not None
    assert again.usage.prompt_tokens > 5
    lines = [r.getMessage() for r in caplog.records if "dequantised" in r.getMessage()]
    assert len(lines) == 1
    assert re.search(r": weights \(gguf, F32, Q8_0\) (are dequantised to|stay packed) ", lines[0])


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_1"])
def test_blocks_of_a_scale_and_integers_stay_packed(plain, tmp_path, monkeypatch, kind):
    """Rotated rows of q and k included; what has a minimum is the file's own blocks."""
    path = tmp_path / "model.gguf"
    write(path, plain, kind)
    monkeypatch.setattr(reader_module, "SLICE_ELEMENTS", 700)
    model = ModelConfig.from_directory(path)
    expected = dict(load_weights(model, torch.float32, CPU))
    found = dict(
        load_weights(
            model,
            torch.float32,
            CPU,
            accepts_weights=lambda spec: native_type_code(spec) is not None,
        )
    )
    packed = {name: each for name, each in found.items() if isinstance(each, LinearWeights)}
    assert {"embed.weight", "layers.0.qkv.weight", "lm_head.weight"} < set(packed)
    for name, weights in packed.items():
        whole = expected[name]
        assert isinstance(whole, torch.Tensor)
        if kind == "Q4_1":
            assert (weights.scheme, weights.scale_block) == ("q4_1", None)
            assert torch.equal(dequantised_blocks(weights), whole)
            continue
        assert (weights.scheme, weights.scale_block) == (f"int{kind[1]}", (1, 32))
        torch.testing.assert_close(dequantised(weights).float(), whole, rtol=1e-6, atol=0)


def test_a_model_is_a_file_or_a_directory_with_one(plain, tmp_path):
    path = tmp_path / "a.gguf"
    write(path, plain)
    for location in (path, str(path), tmp_path):
        assert resolve_model(location) == path
        assert resolve_tokenizer(location) == path
    with pytest.raises(ModelLoadError, match=r"revision='main': .* has no revisions"):
        resolve_model(path, "main")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(tmp_path) == path
    assert resolve_model(plain) == plain  # safetensors come first
    shutil.copy(path, tmp_path / "b.gguf")
    with pytest.raises(
        ModelLoadError, match=r"several GGUF files, name one of them behind a colon: a\.gguf, b"
    ):
        resolve_model(tmp_path)
    with pytest.raises(ModelLoadError, match="does not exist, expected a directory, a GGUF file"):
        resolve_model("./absent.gguf")


def test_yarn(plain, tmp_path):
    """As llama.cpp computes it: with YaRN's own factor of attention."""
    scaling = {"type": "yarn", "factor": 4, "original_context_length": 32}
    path = tmp_path / "model.gguf"
    write(path, plain, metadata={f"llama.rope.scaling.{key}": v for key, v in scaling.items()})
    rope = ModelConfig.from_directory(path).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32)
    assert rope.attention_factor == pytest.approx(1 + 0.1 * math.log(4))


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": "mamba"}, "general.architecture is 'mamba', expected"),
        ({"split.count": 3}, "split.count is 3 and split.no is 0, expected 1 and 0"),
        ({"llama.expert_count": 8}, "num_experts_per_tok is missing"),
        ({"llama.attention.sliding_window": 64}, "sliding_window is 64, expected 0"),
        ({"llama.attention.magic": 1}, "attention.magic is 1, expected no such value of llama"),
        ({"llama.attention.value_length": 8}, "attention.value_length is 8, expected 16"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8, expected 16"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.factor is missing"),
        ({"llama.rope.scaling.type": "linear"}, "rope.scaling.factor is missing"),
        ({"llama.attention.head_count": 0}, "attention.head_count is 0"),
        ({"llama.block_count": 100_000}, "block_count is 100000"),
        ({"llama.attention.head_count_kv": 0}, "num_key_value_heads is 0"),
        ({"llama.attention.head_count_kv": 3}, "divisor of num_attention_heads=4"),
        ({"general.alignment": 0}, "general.alignment is 0"),
    ],
)
def test_model_metadata_in_file_is_checked(plain, tmp_path, metadata, words):
    path = tmp_path / "model.gguf"
    write(path, plain, metadata=metadata)
    assert words in refused(path)
    # A reader that was not asked for the configuration first.
    with (
        contextlib.suppress(ModelLoadError),
        closing(open_checkpoint(path, torch.float32)) as reader,
    ):
        for name in reader.tensors:
            reader.tensor(name)


def test_without_gguf_py_the_extra_is_named(plain, tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    for kind in ("F16", "Q8_0"):
        write(path, plain, kind)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "gguf", None)
            open_checkpoint(path, torch.float32).close()
    write(path, plain, "Q5_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelLoadError, match=r"type Q5_0, .* pip install 'asyncllm\[gguf\]'"):
        open_checkpoint(path, torch.float32)


def test_file_truncated_while_mapped_is_not_read(plain, tmp_path):
    """A read behind its end would end the process."""
    path = tmp_path / "model.gguf"
    write(path, plain)
    with closing(open_checkpoint(path, torch.float32)) as reader:
        first, *rest = reader.tensors
        reader.tensor(first)
        with path.open("r+b") as file:
            file.truncate(8)
        for name in (first, *rest):
            with pytest.raises(ModelLoadError, match=r"model\.gguf: was changed while"):
                reader.tensor(name)


def test_a_truncated_file_is_refused_wherever_it_ends(whole, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    header = min(t.start_offset for t in GGUFFile(path).tensors.values())
    for end in [*range(0, header, 97), header, (header + len(whole)) // 2, len(whole) - 1]:
        path.write_bytes(whole[:end])
        message = refused(path)
        assert "the file ends after" in message or "not a GGUF file" in message


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(name: str = "x", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def header(
    tensors: list[bytes],
    values: tuple[bytes, ...] = (),
    *,
    version: int = 3,
    num_tensors: int | None = None,
    num_values: int | None = None,
) -> bytes:
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(values) if num_values is None else num_values,
    )
    start = b"GGUF" + struct.pack("<IQQ", version, *counts)
    return (start + b"".join(values) + b"".join(tensors)).ljust(4096, b"\0")


BIG = 2**63


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a GGUF file"),
        (b"GGML" + bytes(40), "does not begin with 'GGUF'"),
        (header([], version=1), "version is 1"),
        (header([], version=0x03000000), "expected 2 or 3 of little endian"),
        (header([], num_tensors=BIG), f"{BIG} tensors"),
        (header([], num_values=BIG), f"{BIG} metadata values"),
        (header([entry(shape=(BIG,))]), "the file ends after 4096 bytes"),
        (header([entry(shape=(2**40, 2**40, 2**40, 2**40))]), "the file ends after"),
        (header([entry(shape=(0, 4))]), "no dimension of 0"),
        (header([entry(shape=(4,) * 5)]), "has 5 dimensions, expected 1 to 4"),
        (header([entry(shape=())]), "has 0 dimensions"),
        (header([entry(shape=(33,), kind=2)]), "a multiple of 32 elements"),
        (header([entry(kind=4)]), "is of GGML type 4, expected one of F32, F16, Q4_0"),
        (header([entry(kind=2**32 - 1)]), "is of GGML type 4294967295"),
        (header([entry(offset=BIG)]), "the file ends after"),
        (header([entry(offset=4000)]), "the file ends after"),
        (header([entry("a"), entry("b", offset=64)]), "tensors 'a' and 'b' overlap"),
        (header([entry("a"), entry("a", offset=128)]), "tensor 'a' is there twice"),
        (header([], (struct.pack("<Q", BIG),)), f"has {BIG} bytes, expected at most 256"),
        (header([], (text("k" * 257) + struct.pack("<II", 4, 1),)), "has 257 bytes"),
        (header([entry("x" * 257)]), "the name at byte 32 of the header has 257 bytes"),
        (header([], (text("k") + struct.pack("<IQ", 8, BIG),)), f"'k' has {BIG} bytes, expected"),
        (header([], (text("k") + struct.pack("<IQ", 8, 5000),)), "and 5000 more are due"),
        (header([], (text("k") + struct.pack("<I", 13),)), "'k' is of type 13"),
        (header([], (text("k") + struct.pack("<IIQ", 9, 9, 1),)), "'k' is an array of type 9"),
        (header([], (text("k") + struct.pack("<IIQ", 9, 4, BIG),)), "more are due"),
        (header([], (text("k") + struct.pack("<IIQ", 9, 8, BIG),)), f"'k' has {BIG} strings"),
        (header([], (text("k") + struct.pack("<IIQ", 9, 8, 2**21),)), "the file ends after"),
        (header([], num_tensors=10**6), "1000000 tensors and 0 metadata values"),
        (header([], num_tensors=10**5), "has 0 dimensions, expected 1 to 4"),
        (header([], (text("k") + struct.pack("<II", 4, 1),) * 2), "'k' is there twice"),
    ],
)
def test_a_hostile_header_is_refused(tmp_path, data, words):
    """Before anything is allocated by a number in it."""
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelLoadError) as caught:
        GGUFFile(path)
    assert words in str(caught.value)
    with pytest.raises(ModelLoadError):
        Tokenizer.from_directory(path)


@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(whole, tmp_path_factory, data):
    """Some bytes of the header, and of the vocabulary in it, are others."""
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(4, 1200) | st.integers(4, len(whole) - 1))
        damaged[place] = data.draw(st.sampled_from((0, 1, 8, 9, 127, 128, 255)))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        model = ModelConfig.from_directory(path)
        for _ in load_weights(replace(model, num_layers=1), torch.float32, CPU):
            pass
    except ModelLoadError as error:
        assert str(path) in str(error)  # noqa: PT017


NUMBERS = st.integers(0, 300) | st.sampled_from((2**31, 2**32 - 1, 2**40, BIG, 2**64 - 1))
ENTRIES = st.builds(
    lambda name, shape, kind, offset: entry(name, tuple(shape), kind, offset),
    st.text("ab\x00é", max_size=3) | st.sampled_from(("blk.0.attn_q.weight", "token_embd.weight")),
    st.lists(NUMBERS, max_size=5),
    st.integers(0, 41) | st.just(2**32 - 1),
    st.integers(0, 160).map(lambda number: number * 32) | NUMBERS,
)
VALUES = st.builds(
    lambda key, kind, raw: text(key) + struct.pack("<I", kind) + raw,
    st.sampled_from(("general.architecture", "general.alignment", "split.count", "llama.x", "")),
    st.integers(0, 13),
    st.binary(max_size=24) | NUMBERS.map(lambda number: struct.pack("<Q", number)),
)


@given(st.lists(ENTRIES, max_size=4), st.lists(VALUES, max_size=3), st.none() | NUMBERS)
def test_any_header_is_refused_or_within_its_file(tmp_path_factory, entries, values, count):
    path = tmp_path_factory.getbasetemp() / "header.gguf"
    path.write_bytes(header(entries, tuple(values), num_tensors=count))
    try:
        tensors = GGUFFile(path).tensors
    except ModelLoadError as error:
        assert len(str(error)) < 2000  # noqa: PT017
        return
    end = 0
    for tensor in sorted(tensors.values(), key=lambda each: each.start_offset):
        assert tensor.start_offset >= end
        end = tensor.start_offset + tensor.num_bytes
        assert tensor.num_bytes > 0
    assert end <= path.stat().st_size


def test_a_long_array_is_its_length(whole, tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    assert GGUFFile(path).metadata["tokenizer.ggml.tokens"] == 256
    assert len(GGUFFile(path).metadata["tokenizer.ggml.token_type"]) == 256
    monkeypatch.setattr(gguf_file, "MAX_ARRAY_LENGTH", 255)
    assert GGUFFile(path).metadata["tokenizer.ggml.token_type"] == 256


@pytest.mark.parametrize(
    ("kind", "count", "words"),
    [
        (0, 2**30, "header has"),
        (12, 2**27, "header has"),
        (8, 2**21 + 1, "strings, expected at most 2097152 in all"),
    ],
)
def test_a_sparse_header_takes_neither_memory_nor_time(tmp_path, kind, count, words):
    path = tmp_path / "sparse.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a")
        file.write(struct.pack("<IIQ", 9, kind, count))
        file.truncate(2**31)
    tracemalloc.start()
    with pytest.raises(ModelLoadError, match=words):
        GGUFFile(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_numbers_of_many_arrays_are_bounded_together(tmp_path):
    path = tmp_path / "many.gguf"
    array = struct.pack("<IIQ", 9, 6, 4096) + bytes(4 * 4096)
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 65))
        for index in range(65):
            file.write(struct.pack("<Q", 2) + f"{index:02}".encode() + array)
    with pytest.raises(ModelLoadError, match="numbers, expected at most 262144 in all"):
        GGUFFile(path)
