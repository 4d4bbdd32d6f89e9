"""Refusals and load-time checks of transformers' modules."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from asyncllm import LLM, EngineConfig, InvalidRequestError, ModelLoadError
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.gpu.transformers_model import check, families
from asyncllm.gpu.transformers_model.config import TransformersConfig, read_config
from asyncllm.gpu.transformers_model.probe import probe_model
from tests import remote_code
from tests.checkpoints import copy_tokenizer
from tests.driver import Driver, state_of
from tests.families import SLIDING, TINY, make
from tests.reference import Tally, check_tokens, compare, generate
from tests.refusals import refused
from tests.transformers_runner import SETTINGS, load

AND = ". transformers' modules run here only where that is sure to give the model's own results"


def configure(path: Path, name: str, **settings: Any) -> Path:
    """A directory with the configuration alone: what is refused needs no weights."""
    config = getattr(transformers, name)(**TINY | settings)
    config.save_pretrained(path)
    return path


PROTOCOL = (
    "transformers' interface of linear attention: get_conv_state, update_conv_state, "
    "get_recurrent_state, update_recurrent_state"
)
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "recurrent without a cache": (
        "RecurrentGemmaConfig",
        {"lru_width": 64, "attention_window_size": 16},
        "RecurrentGemmaForCausalLM: model.layers.0.temporal_block.conv_1d (Conv1d) mixes tokens "
        "outside attention and recurrent modules; expected those as the only places where tokens "
        "see one another" + AND,
    ),
    "a cache of another kind": (
        "MiniMaxConfig",
        {"head_dim": 16, "num_local_experts": 2},
        "MiniMaxForCausalLM: model.layers.1.self_attn (MiniMaxLightningAttention) asks its cache "
        f"for more (AttributeError: get_linear_cache of its cache); expected {PROTOCOL}" + AND,
    ),
    "indexer": (
        "DeepseekV32Config",
        {},
        "DeepseekV32ForCausalLM: model.layers.0.self_attn.indexer (DeepseekV32Indexer) chooses the "
        "keys that attention sees, from a cache of its own; expected attention to all keys or to "
        "a window" + AND,
    ),
    "dynamic RoPE": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "LlamaForCausalLM: rope_parameters.rope_type is 'dynamic', which turns every sequence by "
        "the longest one of its batch; expected a kind whose frequencies are fixed" + AND,
    ),
    "attention of its own": (
        "RwkvConfig",
        {"attention_hidden_size": 64},
        "RwkvForCausalLM: rwkv.blocks.0.attention (RwkvSelfAttention) asks its cache for more "
        f"(TypeError: an item of its cache); expected {PROTOCOL}" + AND,
    ),
    "a mask of padding": (
        "MambaConfig",
        {"state_size": 8},
        "MambaForCausalLM: backbone.layers.0.mixer (MambaMixer) takes the tensor attention_mask of "
        "all tokens; expected hidden states and a cache alone" + AND,
    ),
    "chunked attention": (
        "Llama4TextConfig",
        {"head_dim": 16, "attention_chunk_size": 8},
        "Llama4ForCausalLM: the mask of model.layers.0.self_attn depends on more than positions; "
        "expected attention to all keys or to a window" + AND,
    ),
    "attention to later tokens": (
        "Gemma3TextConfig",
        {"head_dim": 16, "use_bidirectional_attention": True},
        "Gemma3ForCausalLM: the mask of model.layers.0.self_attn shows query 254 256 keys that are "
        "neither all before it nor the last of them; expected attention to all keys or to a "
        "window" + AND,
    ),
    "position biases": (
        "BloomConfig",
        {"n_layer": 3, "n_head": 4},
        "BloomForCausalLM: what its layers need cannot be learned, because one pass of its code "
        "without weights fails in transformer.h.0.self_attention (BloomAttention): TypeError: ",
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused_by_the_rules(tmp_path, reason):
    name, settings, message = REFUSED[reason]
    configure(tmp_path, name, **settings)
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path)
    found = str(caught.value)
    if reason == "position biases":
        assert found.startswith(f"{tmp_path}: {message}")
    else:
        assert found == f"{tmp_path}: {message}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"sliding_window": 9},
            "passes sliding_window=9, and its mask shows the last 7 keys; expected the same",
        ),
        ({"options": {"alibi": 3.0}}, "passes alibi=3.0 to attention; expected scaling"),
        ({"num_keys": 5}, "attends with 3 queries to 5 keys of 3 tokens; expected a query and a"),
        ({"scale": None}, "passes no scaling to attention; expected a number"),
        ({"mask": None}, "passes the mask None; expected one that transformers' mask functions"),
        ({"num_key_heads": 3}, "has 4 heads and 3 of keys; expected a multiple of them"),
    ],
)
def test_refused_by_layer_arguments(tmp_path, monkeypatch, change, message):
    from asyncllm.gpu.transformers_model import build

    configure(tmp_path, "MistralConfig", **SLIDING)
    probe = build.probe_model

    def changed(model):
        found = probe(model)
        for name, value in change.items():
            setattr(found.attention_calls[1], {"sliding_window": "window"}.get(name, name), value)
        return found

    monkeypatch.setattr(build, "probe_model", changed)
    found = re.escape(f"{tmp_path}: MistralForCausalLM: model.layers.1.self_attn {message}")
    with pytest.raises(ModelLoadError, match=f"^{found}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("layer_types", "kind"), [(None, "full_attention"), (["full_attention", "mlp"], "mlp")]
)
def test_a_layer_without_attention(tmp_path, monkeypatch, layer_types, kind):
    """It is refused unless the configuration says that it is an MLP alone."""
    from asyncllm.gpu.transformers_model.rules import check_calls

    configure(tmp_path, "LlamaConfig", num_hidden_layers=2)
    model = TransformersConfig.from_directory(tmp_path)
    found = probe_model(model)
    del found.attention_calls[1]
    found.idle_modules |= {"model.layers.1", "model.layers.1.self_attn"}
    model.config.layer_types = layer_types
    if kind == "mlp":
        assert check_calls(model, found) == [None]
        return
    with pytest.raises(ModelLoadError) as caught:
        check_calls(model, found)
    assert str(caught.value) == (
        f"{tmp_path}: LlamaForCausalLM: model.layers.1 (LlamaDecoderLayer) calls attention 0 times "
        "through transformers' attention interface; expected one call or a recurrent module" + AND
    )


def test_a_module_with_a_cache_of_its_own(tmp_path, monkeypatch):
    from asyncllm.gpu.transformers_model import build

    configure(tmp_path, "LlamaConfig")
    probe = build.probe_model

    class Memory(torch.nn.Module):
        def forward(self, x, cache_params=None):
            return x

    def changed(model):
        found = probe(model)
        found.model.model.layers[2].memory = Memory()
        return found

    monkeypatch.setattr(build, "probe_model", changed)
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: LlamaForCausalLM: model.layers.2.memory (Memory) takes cache_params: it "
        "keeps a cache of its own; expected attention and recurrent modules as the only ones with "
        "a cache" + AND
    )


# --- configurations ------------------------------------------------------------------------


def write_config(path: Path, **values: Any) -> Path:
    (path / "config.json").write_text(json.dumps(values))
    return path


VERSION = transformers.__version__


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model_type": "own"},
            f"model_type is 'own', expected one that transformers {VERSION} knows",
        ),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}},
            f"model_type is 'own', which transformers {VERSION} knows only by the checkpoint's own "
            "code; trust_remote_code=True runs that",
        ),
        (
            {"model_type": "t5"},
            "is_encoder_decoder is True, expected a model with a decoder alone",
        ),
        (
            {"model_type": "vit", "architectures": ["ViTModel"]},
            f"architectures is ['ViTModel'], and transformers {VERSION} has no model that "
            "generates text for the configuration ViTConfig; expected one with a class "
            "…ForCausalLM",
        ),
        (
            {"model_type": "gemma2", "quantization_config": {"quant_method": "other"}},
            "quant_method is 'other', expected 'awq' or 'compressed-tensors' or 'fbgemm_fp8' or "
            "'fp8' or 'gguf' or 'gptq' or 'mxfp4'",
        ),
    ],
)
def test_configurations_that_are_refused(tmp_path, values, message):
    with pytest.raises(ModelLoadError) as caught:
        TransformersConfig.from_directory(write_config(tmp_path, **values))
    assert str(caught.value) == f"{tmp_path / 'config.json'}: {message}"


def test_auto_prefers_native_architectures(tmp_path):
    make(tmp_path, "Llama")
    assert isinstance(read_config(tmp_path, "auto"), ModelConfig)
    assert isinstance(read_config(tmp_path, "native"), ModelConfig)
    assert isinstance(read_config(tmp_path, "transformers"), TransformersConfig)
    make(tmp_path, "Gemma")
    assert isinstance(read_config(tmp_path, "auto"), TransformersConfig)
    with pytest.raises(ModelLoadError, match=r"architectures is \['GemmaForCausalLM'\], expected"):
        read_config(tmp_path, "native")


def test_model_impl_is_checked():
    with refused("model_impl"):
        EngineConfig(model_impl="vllm")  # pyright: ignore[reportArgumentType]


def test_ends_and_context_of_a_configuration(tmp_path):
    make(tmp_path, "GPT2", max_position_embeddings=128, eos_token_id=7)
    model = TransformersConfig.from_directory(tmp_path)
    assert model.max_position_embeddings == 128
    assert model.eos_token_ids == (7,)
    assert (model.vocab_size, model.dtype) == (256, "float32")


# --- tensors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            "tensor model.layers.1.mlp.up_proj.weight of Gemma2ForCausalLM is missing: the model "
            "would be computed without it",
        ),
        (
            lambda t: t.update({"model.layers.1.extra.weight": torch.ones(3)}),
            "tensor model.layers.1.extra.weight of Gemma2ForCausalLM is unexpected: the model "
            "would be computed without it",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(3)}),
            "transformers cannot load Gemma2ForCausalLM: ",
        ),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, change, message):
    make(tmp_path, "Gemma2")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: {message}")


# --- the check of untested architectures ---------------------------------------------------


@pytest.mark.usefixtures("own_code")
def test_a_checkpoints_own_code(tmp_path, caplog):
    path = remote_code.write(tmp_path / "own_right")
    with caplog.at_level(logging.INFO, "asyncllm"):
        driver = Driver(load(path, trust_remote_code=True))
    assert "OwnForCausalLM is not among the tested architectures; in chunks" in caplog.text
    config = TransformersConfig.from_directory(path, trust_remote_code=True)
    model = config.model_class.from_pretrained(path, attn_implementation="eager")
    prompt = list(range(40, 73))
    seq = driver.add(prompt, 1)
    driver.run([seq], chunk=7)
    compare(seq, generate(model, prompt, 1), Tally())


@pytest.mark.usefixtures("own_code")
def test_unsupported_custom_code_fails_the_check(tmp_path):
    path = remote_code.write(tmp_path / "own_shifted", shift=True)
    with pytest.raises(ModelLoadError) as caught:
        load(path, trust_remote_code=True)
    found = re.fullmatch(
        re.escape(f"{path}: OwnForCausalLM is not among the tested architectures, and in chunks ")
        + r"and decode steps its log-probabilities differ by (\S+) from its own plain forward "
        r"pass, whose noise is (\S+); expected at most (\S+)",
        str(caught.value),
    )
    assert found
    wrong, noise, limit = map(float, found.groups())
    assert wrong > 1e-3 > limit > noise


@pytest.mark.usefixtures("own_code")
def test_noise_that_would_hide_everything_is_refused(tmp_path, monkeypatch):
    path = remote_code.write(tmp_path / "own_noisy")
    monkeypatch.setattr(check, "_max_logprob_difference", lambda *_: 2.0)
    with pytest.raises(ModelLoadError, match="vary by 2, so that others cannot be told from them"):
        load(path, trust_remote_code=True)


@pytest.mark.parametrize("name", ["Gemma2", "GptOss", "Qwen3Moe", "DeepseekV3"])
def test_tested_families_pass_the_check(tmp_path, monkeypatch, name, caplog):
    make(tmp_path, name)
    monkeypatch.setattr(families, "TESTED_ARCHITECTURES", frozenset())
    with caplog.at_level(logging.INFO, "asyncllm"):
        load(tmp_path)
    assert "is not among the tested architectures; in chunks and decode steps" in caplog.text


def test_the_check_sees_a_window_off_by_one(tmp_path, monkeypatch):
    from dataclasses import replace

    from asyncllm.gpu.transformers_model import build

    make(tmp_path, "Mistral")
    monkeypatch.setattr(families, "TESTED_ARCHITECTURES", frozenset())
    kinds = build.attention_kinds
    monkeypatch.setattr(
        build,
        "attention_kinds",
        lambda *args: [replace(kind, window=kind.window + 1) for kind in kinds(*args)],
    )
    with pytest.raises(ModelLoadError, match="its log-probabilities differ by"):
        load(tmp_path)


def test_rounded_weights_need_a_tested_architecture(tmp_path, monkeypatch):
    from tests.native_library import context

    context()
    make(tmp_path, "Gemma2")
    options = {"attention_backend": "native", "quantization": "int8"}
    driver = Driver(load(tmp_path, **options))
    seq = driver.add([3, 4, 5], 8)
    driver.run([seq])
    assert len(seq.outputs) == 8
    monkeypatch.setattr(families, "TESTED_ARCHITECTURES", frozenset())
    with pytest.raises(InvalidRequestError, match=r"^quantization='int8': .* Gemma2"):
        load(tmp_path, **options)


# --- the engine ----------------------------------------------------------------------------


def test_the_engine_runs_it(tmp_path):
    model = make(tmp_path, "Gemma2", vocab_size=2048)
    copy_tokenizer(tmp_path)
    prompt, modules = list(range(100, 130)), {**SETTINGS, "model_impl": "transformers"}
    with LLM(tmp_path, **{**modules, "max_num_batched_tokens": 16}) as llm:
        result = llm.generate(prompt, temperature=0, max_tokens=12, ignore_eos=True)
    check_tokens(result.token_ids, generate(model, prompt, 12))
    with LLM(tmp_path, **modules, load_format="dummy") as llm:
        drawn = llm.generate(prompt, temperature=0, max_tokens=3, ignore_eos=True)
    assert len(drawn.token_ids) == 3


def test_the_host_keeps_its_defaults(tmp_path):
    make(tmp_path, "Gemma2")
    level = transformers.logging.get_verbosity()
    load(tmp_path, dtype="bfloat16")
    assert torch.get_default_dtype() == torch.float32
    assert transformers.logging.get_verbosity() == level
    assert transformers.logging.is_progress_bar_enabled()


def test_two_engines_share_nothing(tmp_path):
    first = make(tmp_path / "first", "Gemma2")
    second = make(tmp_path / "second", "Gemma2", seed=3, attn_logit_softcapping=30.0)
    prompt = list(range(40, 70))
    drivers = [Driver(load(tmp_path / name)) for name in ("first", "second")]
    seqs = [driver.add(prompt, 12) for driver in drivers]
    for _ in range(12):
        for driver, seq in zip(drivers, seqs, strict=True):
            driver.launch([(seq, 0)])
            driver.collect()
    for model, seq in ((first, seqs[0]), (second, seqs[1])):
        compare(seq, generate(model, prompt, 12), Tally())


def test_model_is_freed(tmp_path):
    import gc
    import weakref

    make(tmp_path, "GptOss")
    runner = load(tmp_path)
    state = state_of(runner)
    left = [weakref.ref(state.model.base), weakref.ref(state.cache.tensor)]
    driver = Driver(runner)
    seq = driver.add([1, 2, 3], 4)
    driver.run([seq])
    del state
    runner.close()
    gc.collect()
    assert [ref() for ref in left] == [None, None]


def test_weights_are_copied_out_of_their_files(tmp_path):
    make(tmp_path, "Gemma2")
    driver = Driver(load(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")  # reading a mapping of it would be a SIGBUS
    seq = driver.add([1, 2, 3], 4)
    driver.run([seq])
    assert len(seq.outputs) == 4
