"""StepRunner: the base of HostSteps and DeviceSteps."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.models.language_model import LanguageModel
from asyncllm.gpu.sample.prompt_logprobs import gather_prompt_logprobs
from asyncllm.gpu.sample.sampler import SampleOutput, Sampler


class StepRunner(ABC):
    """Runs the steps of one model, and has all state that holds memory, so that closing drops it
    whole.

    Attributes:
        device: of weights and KV.
    """

    def __init__(
        self, decoder: LanguageModel, cache: KVCache, inputs: InputBatch, sampler: Sampler
    ) -> None:
        self.decoder, self.cache, self.inputs, self.sampler = decoder, cache, inputs, sampler
        self.device = decoder.embedding.device

    @abstractmethod
    def run(self, step: LaunchedStep) -> SampleOutput:
        """The tokens of a step whose changes of the batch have been applied."""

    def gather_prompt_logprobs(
        self, step: LaunchedStep, hidden: Tensor, output: SampleOutput
    ) -> None:
        """Adds the log-probabilities of prompts, of their positions' hidden states ``[E, H]``."""
        decoder, spans = self.decoder, step.batch.prompt_logprobs
        found = gather_prompt_logprobs(spans, step.prompt_tokens, hidden, decoder)
        output.prompt_logprobs, errors = found
        step.failures = errors | step.failures
