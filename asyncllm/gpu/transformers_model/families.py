"""TESTED: the architectures that the tests compare with transformers."""

from __future__ import annotations

from asyncllm.gpu.transformers_model.config import TransformersConfig

TESTED: dict[str, str] = {
    "ApertusForCausalLM": "xIELU",
    "ArceeForCausalLM": "squared ReLU",
    "BambaForCausalLM": "Mamba2 layers",
    "CohereForCausalLM": "logit scale, parallel blocks",
    "Cohere2ForCausalLM": "sliding layers, full ones without RoPE",
    "DeepseekV3ForCausalLM": "latent attention, its keys and values kept uncompressed; experts",
    "Dots1ForCausalLM": "experts chosen with a correction bias, shared ones",
    "Ernie4_5ForCausalLM": "interleaved RoPE",
    "Ernie4_5_MoeForCausalLM": "experts chosen with a correction bias, shared ones",
    "Exaone4ForCausalLM": "norms behind the blocks, sliding layers, full ones without RoPE",
    "FalconH1ForCausalLM": "Mamba2 beside attention in every layer, multipliers",
    "GPT2LMHeadModel": "learned positions",
    "GPTNeoXForCausalLM": "partial RoPE, parallel blocks",
    "GemmaForCausalLM": "norms of 1 + w",
    "Gemma2ForCausalLM": "soft caps, sliding layers",
    "Gemma3ForCausalLM": "sliding layers with a RoPE base of their own",
    "Gemma4ForCausalLM": "full layers of other heads, shared KV, embeddings per layer, experts",
    "GlmForCausalLM": "partial RoPE",
    "Glm4ForCausalLM": "partial RoPE, four norms a layer",
    "Glm4MoeForCausalLM": "experts chosen with a correction bias, shared ones",
    "Glm4MoeLiteForCausalLM": "latent attention, its keys and values kept uncompressed; experts",
    "GptOssForCausalLM": "attention sinks, sliding layers, experts",
    "GraniteForCausalLM": "multipliers",
    "GraniteMoeForCausalLM": "experts, multipliers",
    "GraniteMoeHybridForCausalLM": "Mamba2 layers, experts, multipliers (Granite 4 H)",
    "HeliumForCausalLM": "interleaved RoPE",
    "HunYuanDenseV1ForCausalLM": "norms of q and k behind RoPE",
    "KimiLinearForCausalLM": "gated delta rule by channel, latent attention, experts",
    "Lfm2ForCausalLM": "short convolutions",
    "Lfm2MoeForCausalLM": "short convolutions, experts",
    "Lfm3ForCausalLM": "short convolutions",
    "Mamba2ForCausalLM": "Mamba2 layers alone",
    "MiniMaxM2ForCausalLM": "experts chosen with a correction bias, norms over whole projections",
    "Ministral3ForCausalLM": "query scale by position, yarn",
    "MixtralForCausalLM": "experts",
    "NemotronForCausalLM": "norms of 1 + w with biases, squared ReLU",
    "OPTForCausalLM": "learned positions, biases",
    "OlmoForCausalLM": "norms without weights, clipped projections",
    "Olmo2ForCausalLM": "norms behind the blocks",
    "Olmo3ForCausalLM": "norms behind the blocks, sliding layers",
    "OlmoHybridForCausalLM": "gated delta rule, norms behind the blocks",
    "OlmoeForCausalLM": "experts",
    "PhiForCausalLM": "partial RoPE, parallel blocks",
    "Phi3ForCausalLM": "fused projections, partial RoPE, longrope",
    "PhimoeForCausalLM": "experts by sparse mixing, norms with biases",
    "Qwen2MoeForCausalLM": "experts, a shared one with a gate",
    "Qwen3_5ForCausalLM": "gated delta rule, gated attention, partial RoPE (Qwen3.5, Qwen3.6)",
    "Qwen3_5MoeForCausalLM": "the same with experts",
    "Qwen3MoeForCausalLM": "experts",
    "Qwen3NextForCausalLM": "gated delta rule, gated attention, experts",
    "SeedOssForCausalLM": "biases on q, k and v",
    "SmolLM3ForCausalLM": "layers without RoPE",
    "StableLmForCausalLM": "partial RoPE, norms with biases",
    "Starcoder2ForCausalLM": "sliding layers, norms with biases",
    "LlamaForCausalLM": "RoPE of every fixed kind, yarn among them",
    "MistralForCausalLM": "sliding layers",
    "Qwen2ForCausalLM": "biases on q, k and v",
    "Qwen3ForCausalLM": "q and k norms",
}
"""Distinguishing features by class of model; each class has a case in tests/families.py."""


def is_tested(model: TransformersConfig) -> bool:
    """Whether a model is one of TESTED, in transformers' own code."""
    own = model.model_class.__module__.startswith("transformers.models.")
    return own and model.architecture in TESTED
