"""Conditions for engines to form a group."""

from __future__ import annotations

from typing import Any

from asyncllm import validation as check
from asyncllm.engine import AsyncLLMEngine

_REQUIRED_EQUAL_FIELDS = (
    "scheduling_policy",
    "max_logprobs",
    "logits_processors",
    "tool_call_parser",
    "reasoning_parser",
)
"""Fields of EngineConfig by which a request is checked before its engine is chosen."""


def check_compatible_engines(engine: AsyncLLMEngine, group_engine: AsyncLLMEngine) -> None:
    """Raise an error if the two engines may check or tokenise a request differently."""
    expected = _required_equal_values(group_engine)
    for name, value in _required_equal_values(engine).items():
        if value != expected[name]:
            raise check.argument_error(
                "engine",
                f"its {name} is {check.describe(value)}, expected "
                f"{check.describe(expected[name])}, as in the other engines of the group",
            )


def _required_equal_values(engine: AsyncLLMEngine) -> dict[str, Any]:
    loaded, config = engine._require_started().loaded_model, engine.config
    info, tokenizer, model = loaded.executor.info, loaded.tokenizer, loaded.model_config
    template = tokenizer.chat_template
    return {
        "max_model_len": info.max_model_len,
        "vocab_size": info.vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "chat_template": (template.sources, template.special_tokens),
        "eos_token_ids": tuple(model.eos_token_ids),
        "generation_config": dict(model.generation_defaults or {}),
        "sampling_limits": info.sampling_limits,
        "max_tokens_per_row": info.max_tokens_per_row,
        **{name: getattr(config, name) for name in _REQUIRED_EQUAL_FIELDS},
    }
