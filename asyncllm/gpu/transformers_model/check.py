"""ReferenceLogprobs: checks untested architectures against their own plain forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.core.batch import SlotAssignment, StepBatch
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.batch.step_buffer import make_dummy_batch, step_inputs
from asyncllm.gpu.kv_cache import KVCache, KVGroup
from asyncllm.gpu.state_cache import StateCache
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.gpu.transformers_model.decoder import TransformersDecoder
from asyncllm.logger import get_logger
from asyncllm.sampling_params import SamplingParams

logger = get_logger(__name__)

SEQUENCE_LENGTHS = (48, 31)
"""Numbers of tokens of the two random sequences, which are computed in one batch."""

STEP_TOKEN_COUNTS = ((17, 9), (28, 19), (1, 1), (1, 1), (1, 1))
"""Numbers of tokens of the two sequences in each step: two chunks of different sizes, then three
decodes."""

TOLERANCE_NOISE_MULTIPLE = 4.0
"""Maximum accepted difference, as a multiple of ``ReferenceLogprobs.noise``."""

MIN_LOGPROB_NOISE_EPSILONS = 16
"""Minimum of ``ReferenceLogprobs.noise``, as a multiple of the largest logit's float32 epsilon."""

MAX_LOGPROB_NOISE = 1.0
"""Maximum of ``ReferenceLogprobs.noise``; beyond it, wrong results would pass the check."""

RANDOM_TOKENS_SEED = 0


@dataclass(frozen=True, slots=True)
class ReferenceLogprobs:
    """Log-probabilities of random tokens, as transformers' unchanged modules compute them.

    Attributes:
        sequences: token ids ``[n]`` int64 of each sequence.
        expected: log-probabilities ``[n, vocab_size]`` float32 of each sequence, with
            transformers' eager attention.
        noise: how much rounding alone may change a log-probability: the largest difference from
            ``expected`` when half of each sequence is computed, or transformers' SDPA is used; at
            least MIN_LOGPROB_NOISE_EPSILONS float32 rounding errors of the largest logit.
    """

    sequences: list[Tensor]
    expected: list[Tensor]
    noise: float

    @classmethod
    def compute(
        cls, modules: Any, model: TransformersConfig, dtype: torch.dtype, device: torch.device
    ) -> ReferenceLogprobs:
        """Compute the log-probabilities with ``modules``, before any of them is replaced."""
        if model.max_position_embeddings < max(SEQUENCE_LENGTHS):
            raise ModelLoadError(
                f"{model.path}: max_position_embeddings is {model.max_position_embeddings}, "
                f"expected at least {max(SEQUENCE_LENGTHS)}: {model.architecture} is not "
                "among the tested architectures, and is checked with that many tokens"
            )
        config = modules.config
        ours = config._attn_implementation, config._experts_implementation
        generator = torch.Generator(device="cpu").manual_seed(RANDOM_TOKENS_SEED)
        sequences = [
            torch.randint(model.vocab_size, (length,), generator=generator, device="cpu")
            for length in SEQUENCE_LENGTHS
        ]
        try:
            config._experts_implementation = config._attn_implementation = "eager"
            logits = [_logits(modules, tokens, device) for tokens in sequences]
            expected = [each.log_softmax(-1) for each in logits]
            largest = max(float(each.abs().max()) for each in logits)
            noise = MIN_LOGPROB_NOISE_EPSILONS * torch.finfo(torch.float32).eps * largest
            halves = [tokens[: len(tokens) // 2] for tokens in sequences]
            noise = max(noise, _max_logprob_difference(modules, halves, expected, device))
            if getattr(modules, "_supports_sdpa", False):
                config._attn_implementation = "sdpa"
                with suppress(ValueError):  # SDPA does not support soft caps.
                    noise = max(
                        noise, _max_logprob_difference(modules, sequences, expected, device)
                    )
        finally:
            config._attn_implementation, config._experts_implementation = ours
        if noise > MAX_LOGPROB_NOISE:
            raise ModelLoadError(
                f"{model.path}: {model.architecture} is not among the tested architectures, and "
                f"its own results in {dtype} vary by {noise:.3g}, so that others cannot be told "
                f'from them; expected at most {MAX_LOGPROB_NOISE:g}, as dtype="float32" may give'
            )
        return cls(sequences, expected, noise)

    def check(self, decoder: TransformersDecoder, groups: Sequence[KVGroup]) -> None:
        """Compare the log-probabilities of the engine's steps with transformers'.

        Raises:
            ModelLoadError: log-probabilities differ by more than ``TOLERANCE_NOISE_MULTIPLE``
                times ``noise``.
        """
        model, difference = decoder.model, self.max_logprob_difference(decoder, groups)
        limit = TOLERANCE_NOISE_MULTIPLE * self.noise
        if not difference <= limit:
            raise ModelLoadError(
                f"{model.path}: {model.architecture} is not among the tested architectures, and in "
                f"chunks and decode steps its log-probabilities differ by {difference:.3g} from "
                f"its own plain forward pass, whose noise is {self.noise:.3g}; expected at most "
                f"{limit:.3g}"
            )
        logger.info(
            "%s is not among the tested architectures; in chunks and decode steps it differs by "
            "%.3g from its own plain forward pass, of at most %.3g",
            model.architecture, difference, limit,
        )  # fmt: skip

    @torch.inference_mode()
    def max_logprob_difference(
        self, decoder: TransformersDecoder, groups: Sequence[KVGroup]
    ) -> float:
        """Largest difference of a log-probability from the reference; NaN if any is NaN."""
        device, specs = decoder.embedding.device, [group.spec for group in groups]
        block_ids = count(1)
        blocks = [
            tuple([next(block_ids) for _ in range(-(-length // spec.block_size))] for spec in specs)
            for length in SEQUENCE_LENGTHS
        ]
        dtype, states = decoder.embedding.dtype, None
        if decoder.states:
            states = StateCache(decoder.states, len(SEQUENCE_LENGTHS), dtype, device)
        cache = KVCache(groups, next(block_ids), dtype, device, states)
        decoder.set_max_positions(max(SEQUENCE_LENGTHS))
        batch = InputBatch(len(SEQUENCE_LENGTHS), max(SEQUENCE_LENGTHS), specs)
        starts, difference = [0] * len(self.sequences), 0.0
        sampling = SamplingParams(temperature=0.0, seed=0).resolve({}, {}, lambda: 0)
        assignments = [
            SlotAssignment(row, f"check-{row}", tokens.tolist(), len(tokens), blocks[row], sampling)
            for row, tokens in enumerate(self.sequences)
        ]
        batch.apply_step_changes(StepBatch(step=0, assignments=assignments))
        for counts in STEP_TOKEN_COUNTS:
            num_decodes = len(counts) if set(counts) == {1} else 0
            step = make_dummy_batch(starts, counts, num_decodes=num_decodes)
            inputs = step_inputs(step, batch, device)
            inputs = replace(inputs, output_indices=None, num_logits=inputs.num_tokens)
            logits = decoder.forward(inputs, cache).logits.float().cpu()
            rows = logits.log_softmax(-1).split(step.counts)
            for row, expected, start in zip(rows, self.expected, starts, strict=True):
                part = expected[start : start + len(row)]
                difference = float(np.maximum(difference, float((row - part).abs().max())))
            starts = [start + count for start, count in zip(starts, step.counts, strict=True)]
        return difference


@torch.inference_mode()
def _logits(modules: Any, tokens: Tensor, device: torch.device) -> Tensor:
    """Logits of a sequence, ``[n, vocab_size]`` float32, on the host."""
    return modules(input_ids=tokens[None].to(device), use_cache=False).logits[0].float().cpu()


def _max_logprob_difference(
    modules: Any, sequences: list[Tensor], expected: list[Tensor], device: torch.device
) -> float:
    """Largest difference between ``expected`` and the log-probabilities of ``sequences``.

    A sequence may be a prefix of the one whose log-probabilities are expected.
    """
    differences = [0.0]
    for tokens, reference in zip(sequences, expected, strict=True):
        log_probs = _logits(modules, tokens, device).log_softmax(-1)
        differences.append(float((log_probs - reference[: len(tokens)]).abs().max()))
    return max(differences)
