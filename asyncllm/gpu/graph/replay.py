"""Replay: runs a step's forward pass, op by op; base of the other ways to run it."""

from __future__ import annotations

from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.models.language_model import LanguageModel, StepOutput
from asyncllm.gpu.step_memory import StepMemory


class Replay:
    """Calls the ops of a step one by one.

    Attributes:
        description: how steps run, for the log.
        finds_largest: it finds the token of a row's largest logit without writing the logits.
    """

    description = "ops called one by one"

    def __init__(self, model: LanguageModel, cache: KVCache, memory: StepMemory) -> None:
        self.model, self.cache, self.memory = model, cache, memory
        self.finds_largest = model.argmax is not None and not memory.on_device

    def prepare(self, step: LaunchedStep) -> bool:
        """Chooses how the step will run, and sets that in it: its bucket and its attention.

        Returns:
            Whether ``forward`` also computes the derived sections of the step's inputs.
        """
        return False

    def forward(self, step: LaunchedStep) -> StepOutput:
        """Runs the model on the step received last; with its sampling, if captured in one graph.

        The result is valid until the next call.
        """
        assert step.inputs is not None
        self.memory.insert_sampled(step.inputs)
        return self.model.forward(step.inputs, self.cache)

    def sample(self, step: LaunchedStep) -> bool:
        """Runs the sampling of the step if it is captured; else returns False."""
        return False
