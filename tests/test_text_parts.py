"""The text part of multimodal checkpoints, under both implementations of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.checkpoint.text_part import text_model_tensor_name
from asyncllm.config import EngineConfig
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.transformers_model.config import TransformersConfig, read_config
from tests.driver import Driver
from tests.families import GATED_DELTA, MIXED, MOE, SLIDING, TINY, draw_weights
from tests.reference import Tally, compare, generate
from tests.slow import slow_but
from tests.text_part import check_text_part

SETTINGS: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 40,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "attention_backend": "torch",
}
OUTPUT = 12
SIGLIP = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
SIGLIP |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
PATCHES = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
PATCHES |= {"out_hidden_size": 64, "num_position_embeddings": 16, "patch_size": 4}
DELTA = {name: value for name, value in GATED_DELTA.items() if name != "gain"}
SHARED = {"shared_expert_intermediate_size": 32}
GEMMA4_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
GEMMA4_TOWER |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}

PARTS: dict[str, dict[str, Any]] = {
    "Gemma3": {
        "text_config": {"head_dim": 16, **SLIDING, **MIXED},
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 4,
    },
    "Gemma4": {
        "text_config": {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 256,
            "pad_token_id": 0,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            **SLIDING,
        },
        "vision_config": GEMMA4_TOWER,
    },
    "Mistral3": {
        "text_config": {"model_type": "mistral", "head_dim": 16, **SLIDING},
        "vision_config": {"model_type": "pixtral", **SIGLIP},
    },
    "Qwen3_5": {"text_config": DELTA, "vision_config": PATCHES},
    "Qwen3_5Moe": {"text_config": DELTA | MOE | SHARED, "vision_config": PATCHES},
    "Qwen3VL": {
        "text_config": {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {"deepstack_visual_indexes": [0], **PATCHES},
    },
}


def make_multimodal(path: Path, family: str, **changes: Any) -> Any:
    """Writes a checkpoint with another tower beside the text model."""
    settings = {name: dict(value) if isinstance(value, dict) else value
                for name, value in PARTS[family].items()}  # fmt: skip
    settings["text_config"] = TINY | settings["text_config"]
    config = getattr(transformers, f"{family}Config")(
        **{"tie_word_embeddings": False} | settings | changes
    )
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    draw_weights(model, gain=1.3)
    model.generation_config = transformers.GenerationConfig()
    model.save_pretrained(path)
    return model


NATIVE = ("Gemma3", "Gemma4", "Qwen3VL", "Qwen3_5", "Qwen3_5Moe")


@pytest.mark.parametrize("family", slow_but(PARTS, "Gemma3", "Qwen3_5"))
def test_the_text_part_of_a_multimodal_checkpoint(tmp_path, caplog, family):
    model = make_multimodal(tmp_path, family)
    config = read_config(tmp_path, "auto")
    assert isinstance(config, ModelConfig if family in NATIVE else TransformersConfig)
    settings = EngineConfig(**SETTINGS)
    check_text_part(model, config, settings, caplog, prompt_length=33, output=OUTPUT, distinct=6)


def test_a_tied_head_is_the_wholes(tmp_path):
    """The whole says that its head is tied, and its text part says nothing or another thing."""
    model = make_multimodal(tmp_path, "Qwen3VL", tie_word_embeddings=True)
    config = ModelConfig.from_directory(tmp_path)
    assert config.tie_word_embeddings
    expected = generate(model, [3, 4, 5], OUTPUT)
    driver = Driver(build_model_runner(EngineConfig(**SETTINGS), config))
    seq = driver.add([3, 4, 5], OUTPUT)
    driver.run([seq])
    compare(seq, expected, Tally())


def test_a_missing_tensor_of_the_text_part(tmp_path):
    from safetensors.torch import save_file

    make_multimodal(tmp_path, "Qwen3VL")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.language_model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is mis"):
        build_model_runner(EngineConfig(**SETTINGS), ModelConfig.from_directory(tmp_path))


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_text_model_declared_as_part(tmp_path, model_impl):
    from safetensors.torch import save_file

    make_multimodal(tmp_path, "Qwen3_5")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path).items()
    plain = {name.replace("model.language_model.", "model."): each for name, each in tensors}
    save_file({k: v for k, v in plain.items() if "visual" not in k}, path, {"format": "pt"})
    with pytest.raises(ModelLoadError) as caught:
        build_model_runner(EngineConfig(**SETTINGS), read_config(tmp_path, model_impl))
    told = str(caught.value)
    assert told.startswith(f"{path}: no tensor is of the text part of a multimodal model")
    assert "is 'lm_head.weight', expected names like 'model.language_model.norm.weight'" in told


def test_names_of_a_text_part():
    names = {
        "model.language_model.layers.0.x": "model.layers.0.x",
        "language_model.model.norm.weight": "model.norm.weight",
        "language_model.lm_head.weight": "lm_head.weight",
        "lm_head.weight": "lm_head.weight",
        "model.visual.patch_embed.proj.weight": None,
        "vision_tower.transformer.layers.0.x": None,
        "multi_modal_projector.linear_1.weight": None,
    }
    assert {name: text_model_tensor_name(name) for name in names} == names
