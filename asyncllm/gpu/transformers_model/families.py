"""TESTED_ARCHITECTURES: the architectures that the tests compare with transformers."""

from __future__ import annotations

from asyncllm.gpu.transformers_model.config import TransformersConfig

TESTED_ARCHITECTURES = frozenset(
    """
    ApertusForCausalLM ArceeForCausalLM BambaForCausalLM CohereForCausalLM Cohere2ForCausalLM
    DeepseekV3ForCausalLM Dots1ForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM
    Exaone4ForCausalLM FalconH1ForCausalLM GPT2LMHeadModel GPTNeoXForCausalLM GemmaForCausalLM
    Gemma2ForCausalLM Gemma3ForCausalLM Gemma4ForCausalLM GlmForCausalLM Glm4ForCausalLM
    Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GptOssForCausalLM GraniteForCausalLM
    GraniteMoeForCausalLM GraniteMoeHybridForCausalLM HeliumForCausalLM
    HunYuanDenseV1ForCausalLM KimiLinearForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM
    Lfm3ForCausalLM Mamba2ForCausalLM MiniMaxM2ForCausalLM Ministral3ForCausalLM
    MixtralForCausalLM NemotronForCausalLM OPTForCausalLM OlmoForCausalLM Olmo2ForCausalLM
    Olmo3ForCausalLM OlmoHybridForCausalLM OlmoeForCausalLM PhiForCausalLM Phi3ForCausalLM
    PhimoeForCausalLM Qwen2MoeForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM
    Qwen3MoeForCausalLM Qwen3NextForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM
    StableLmForCausalLM Starcoder2ForCausalLM LlamaForCausalLM MistralForCausalLM
    Qwen2ForCausalLM Qwen3ForCausalLM
    """.split()
)
"""Names of model classes. Each has a case in tests/families.py and a row in docs/models.md."""


def is_tested(model: TransformersConfig) -> bool:
    """Whether a model's class is transformers' own and one of TESTED_ARCHITECTURES."""
    is_transformers_own = model.model_class.__module__.startswith("transformers.models.")
    return is_transformers_own and model.architecture in TESTED_ARCHITECTURES
