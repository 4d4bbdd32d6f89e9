"""Checkpoints of dense families, each with what transformers generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.families import LLAMA3, LONGROPE, MINISTRAL, TWO_ROPES, YARN, make
from tests.native_library import native_library
from tests.parity import LONG_LENGTHS, PROMPT_LENGTHS, Case, case_loader

CASES: dict[str, dict[str, Any]] = {
    "Gemma2": {},
    "Gemma3": {"rope_parameters": TWO_ROPES},
    "Gemma4": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "Gemma4-shared": {"seed": 4, "use_double_wide_mlp": True, "final_logit_softcapping": 10.0},
    "Gemma4-experts": {"hidden_size_per_layer_input": 0},
    "Glm4": {"attention_bias": True},
    "Granite": {},
    "GraniteMoeHybrid": {
        "layer_types": ["full_attention"] * 3,
        "num_local_experts": 0,
        "seed": 4,
        "shared_intermediate_size": 80,
        "position_embedding_type": "rope",
        "mamba_n_heads": 8,
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
    },
    "Llama-yarn": {},
    "Ministral3": {"head_dim": 16, "rope_parameters": MINISTRAL},
    "Olmo2": {},
    "Olmo3": {"rope_parameters": TWO_ROPES},
    "Phi3": {},
    "Phi3-longrope": {},
    "SmolLM3": {},
}
"""Settings beside those of tests/families.py; one of each family, and of each kind of RoPE."""

SHAPES: dict[str, dict[str, Any]] = {
    "Gemma2-untied": {"tie_word_embeddings": False, "final_logit_softcapping": None},
    "Gemma2-one-head": {"num_key_value_heads": 1, "attn_logit_softcapping": None, "shard": "60KB"},
    "Gemma2-tied": {
        "seed": 3,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "embedding": 0.04,
    },
    "Gemma3-tied": {
        "seed": 5,
        "tie_word_embeddings": True,
        "final_logit_softcapping": 8.0,
        "embedding": 0.04,
    },
    "Gemma3-biases": {"attention_bias": True, "shard": "60KB", "num_key_value_heads": 4},
    "Gemma3-pattern": {"layer_types": None, "sliding_window_pattern": 2, "rope_parameters": None},
    "Gemma4-dense": {"hidden_size_per_layer_input": 0, "shard": "60KB"},
    "Gemma4-one-size": {"seed": 1, "global_head_dim": 24, "attention_bias": True},
    "Gemma4-alike": {"global_head_dim": 16, "tie_word_embeddings": True, "embedding": 0.04},
    "Gemma4-shared-keys": {
        "seed": 10,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "Gemma4-shared-most": {
        "seed": 5,
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": False,
    },
    "Gemma4-shared-pattern": {"layer_types": None, "num_hidden_layers": 8, "gain": 0.8},
    "Gemma4-experts-inputs": {"hidden_size_per_layer_input": 12, "top_k_experts": 3},
    "Glm4-quarter": {"partial_rotary_factor": 0.25, "attention_bias": False, "shard": "60KB"},
    "Glm4-tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "Granite-tied": {"embedding": 0.05, "tie_word_embeddings": True, "rope_parameters": YARN},
    "Granite-biases": {"attention_bias": True, "mlp_bias": True, "shard": "60KB"},
    "GraniteMoeHybrid-nope": {"position_embedding_type": None, "attention_bias": True},
    "Llama-yarn-factor": {"rope_parameters": YARN | {"attention_factor": 0.7, "truncate": False}},
    "Llama-yarn-betas": {"seed": 3, "rope_parameters": YARN | {"beta_fast": 4.0, "beta_slow": 0.5}},
    "Ministral3-window": {"sliding_window": 7, "tie_word_embeddings": True, "shard": "60KB"},
    "Ministral3-sizes": {"num_attention_heads": 6, "head_dim": 24, "num_key_value_heads": 3},
    "Olmo2-heads": {"num_key_value_heads": 4, "shard": "60KB"},
    "Olmo3-pattern": {"layer_types": None, "num_hidden_layers": 4, "rope_parameters": None},
    "Olmo3-tied": {"seed": 2, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "Phi3-window": {"seed": 0, "sliding_window": 9, "tie_word_embeddings": True, "shard": "60KB"},
    "Phi3-longrope-factor": {"rope_parameters": LONGROPE | {"attention_factor": 0.8}},
    "SmolLM3-window": {"use_sliding_window": True, "sliding_window": 7, "attention_bias": True},
    "SmolLM3-tied": {"tie_word_embeddings": True, "mlp_bias": True, "rope_parameters": LLAMA3},
}
"""Further shapes of the cases above, by the longest of their names that one begins with."""

SEEDS = {"Ministral3": 2}
"""Where tests/families.py has none, and 0 gives a model that repeats itself."""

BACKEND = "torch" if native_library() is None else "native"


def base_of(name: str) -> str:
    return max((each for each in CASES if name.startswith(each)), key=len)


@pytest.fixture(scope="module")
def load_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    def make_case(path: Path, name: str) -> Case:
        base = base_of(name)
        settings = {**CASES[base], **SHAPES.get(name, {})}
        settings = ({"seed": SEEDS[base]} if base in SEEDS else {}) | settings
        lengths = LONG_LENGTHS if "longrope" in name else PROMPT_LENGTHS
        return Case.of(path, make(path, base, **settings), lengths=lengths, backend=BACKEND)

    return case_loader(tmp_path_factory, make_case)
