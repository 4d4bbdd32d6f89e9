"""ForwardPass: runs a step's forward pass op by op; base class of faster ways to run it."""

from __future__ import annotations

from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.models.language_model import LanguageModel, StepOutput
from asyncllm.gpu.step_memory import StepMemory


class ForwardPass:
    """Runs a step's forward pass by calling its ops one by one.

    Attributes:
        description: phrase for the log that says how steps run.
        finds_greedy_tokens: whether the model finds the token of a row's largest logit without
            writing the logits.
        is_recorded: whether a native program runs whole steps, sampling included.
    """

    description = "ops called one by one"
    is_recorded = False

    def __init__(self, model: LanguageModel, cache: KVCache, memory: StepMemory) -> None:
        self.model, self.cache, self.memory = model, cache, memory
        self.finds_greedy_tokens = model.argmax_function is not None and not memory.on_device

    def prepare(self, step: LaunchedStep) -> bool:
        """Chooses how the step will run, and sets its ``bucket`` and ``has_balanced_splits``.

        Returns:
            Whether ``forward`` also computes the derived inputs, such as positions and KV slots, so
            that the host need not.
        """
        return False

    def forward(self, step: LaunchedStep) -> StepOutput:
        """Runs the model on a step; also samples if one CUDA graph holds the whole step.

        The result is valid until the next call.
        """
        assert step.inputs is not None
        self.memory.insert_sampled_tokens(step.inputs)
        return self.model.forward(step.inputs, self.cache)

    def sample(self, step: LaunchedStep) -> bool:
        """Samples the step if a CUDA graph includes its sampling; returns whether one does."""
        return False
