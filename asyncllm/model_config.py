"""ModelConfig: what a checkpoint says about itself, read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. ``kind`` "llama3" rescales frequencies as Llama 3.1 does; the four
    fields below ``theta`` belong to it alone."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder, from its ``config.json`` and ``generation_config.json``.

    Attributes:
        path: local directory of the files.
        architecture: e.g. "Qwen3ForCausalLM".
        max_position_embeddings: the model's context in tokens.
        dtype: the checkpoint's own: "float32", "bfloat16" or "float16".
        qk_norm: RMSNorm over each query and key head before RoPE (Qwen3).
        attention_bias: biases on q, k and v; ``output_bias`` on o; ``mlp_bias`` on the MLP.
        sliding_window: positions each token sees in the layers where
            ``sliding_layers[layer]`` is True; None where no layer has one.
        eos_token_ids: ids that end an output, those of ``generation_config`` first.
        generation_defaults: ``temperature``, ``top_p``, ``top_k``, ``min_p`` and
            ``repetition_penalty`` where ``generation_config`` sets them. With
            ``do_sample`` false or absent, ``temperature`` is absent, as in vLLM.
    """

    path: Path
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    dtype: str = "float32"
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    generation_defaults: Mapping[str, Any] | None = None
