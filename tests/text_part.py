"""The text part of a multimodal checkpoint, with reference outputs."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from safetensors.torch import load_file

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.config import EngineConfig
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.transformers_model.config import TransformersConfig
from tests.driver import Driver
from tests.reference import Tally, compare, generate


def check_text_part(
    model: Any,
    config: ModelConfig | TransformersConfig,
    settings: EngineConfig,
    caplog: pytest.LogCaptureFixture,
    *,
    prompt_length: int,
    output: int,
    distinct: int,
) -> None:
    """Raises AssertionError unless the engine generates ``model``'s tokens, of which ``distinct``
    differ at least, and says how many tensors of the checkpoint it leaves out."""
    draw = random.Random(1)
    prompt = [draw.randrange(250) for _ in range(prompt_length)]
    expected = generate(model, prompt, output)
    assert len(set(expected.tokens)) >= distinct
    with caplog.at_level(logging.INFO, "asyncllm"):
        driver = Driver(build_model_runner(settings, config))
    stored = load_file(config.path / "model.safetensors")
    towers = sum("language_model" not in name and "lm_head" not in name for name in stored)
    assert towers > 0
    assert f"text part alone, without {towers} of {len(stored)} tensors" in caplog.text
    seq = driver.add(prompt, output)
    driver.run([seq], chunk=7)
    compare(seq, expected, Tally())
