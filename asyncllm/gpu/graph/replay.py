"""Replay: how the model's part of a step is run again and again."""

from __future__ import annotations

from typing import Protocol

from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.models.language_model import LanguageModel, StepOutput
from asyncllm.gpu.step_memory import StepMemory


class Replay(Protocol):
    """Runs the model's part of steps: op by op, or as what was captured of it.

    Attributes:
        description: of what runs, for the log.
        finds_largest: it finds the largest logit of a row without its logits.
    """

    @property
    def description(self) -> str: ...

    @property
    def finds_largest(self) -> bool: ...

    def derives(self, step: LaunchedStep) -> bool:
        """Whether ``forward`` computes the derived sections of the step's inputs as well."""
        ...

    def forward(self, step: LaunchedStep) -> StepOutput:
        """Runs the model on the step that was received last, or the whole step if that is captured
        in one piece. The result is valid until the next call."""
        ...

    def sample(self, step: LaunchedStep) -> bool:
        """Runs the sampling of the step, if that is captured; else returns False."""
        ...


class EagerReplay:
    """Calls the ops of a step one by one."""

    description = "ops called one by one"

    def __init__(self, model: LanguageModel, cache: KVCache, memory: StepMemory) -> None:
        self.model, self.cache, self.memory = model, cache, memory
        self.finds_largest = model.argmax is not None and not memory.on_device

    def derives(self, step: LaunchedStep) -> bool:
        return False

    def forward(self, step: LaunchedStep) -> StepOutput:
        assert step.inputs is not None
        self.memory.insert_sampled(step.inputs)
        return self.model.forward(step.inputs, self.cache)

    def sample(self, step: LaunchedStep) -> bool:
        return False
