"""SamplingState: the sampling parameters of every request index, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncllm.core.batch import RequestAssignment
from asyncllm.gpu.sample.rng import mix_seed
from asyncllm.sampling_params import LogitsProcessor

_MAX_TOP_K = 2**31 - 1


@dataclass(slots=True)
class LogitsRules:
    """Sampling parameters that few requests set, or that have no fixed size.

    Attributes:
        bias: token ids and the numbers added to their logits, or None.
        allowed: the only token ids that may be sampled, or None.
        processors: the request's own, in order.
        stop_ids: tokens that ``min_tokens`` suppresses.
        min_tokens: output tokens before one of ``stop_ids`` may come.
    """

    bias: tuple[np.ndarray, np.ndarray] | None
    allowed: np.ndarray | None
    processors: tuple[LogitsProcessor, ...]
    stop_ids: np.ndarray
    min_tokens: int


class SamplingState:
    """Sampling parameters by request index, set when a request enters, in the dtypes that steps
    compute with: a value that does not fit raises then, for its request, and not in a step.

    Attributes:
        temperature, presence, frequency, repetition: ``[max_num_seqs]`` float32.
        top_p, min_p: ``[max_num_seqs]`` float64.
        top_k: ``[max_num_seqs]`` int32; 0 keeps all.
        seeds: ``[max_num_seqs]`` uint64, mixed.
        logprobs: ``[max_num_seqs]`` int64, -1 for none.
        num_prompt_tokens: ``[max_num_seqs]``.
        rules: by request index, for those that have any.
        version: changes of the parameters so far, so that a copy knows whether it is current.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.temperature = np.ones(max_num_seqs, dtype=np.float32)
        self.top_p = np.ones(max_num_seqs)
        self.min_p = np.zeros(max_num_seqs)
        self.presence = np.zeros(max_num_seqs, dtype=np.float32)
        self.frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self.repetition = np.ones(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int32)
        self.seeds = np.zeros(max_num_seqs, dtype=np.uint64)
        self.logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.rules: dict[int, LogitsRules] = {}
        self.version = 0

    def assign(self, assignment: RequestAssignment) -> None:
        """Sets the parameters of a request. Raises for a value that no array holds; the index has
        to be released then."""
        req_index = assignment.req_index
        self.version += 1
        params: Any = assignment.sampling
        with np.errstate(over="raise", invalid="raise"):
            self.temperature[req_index] = params.temperature
            self.presence[req_index] = params.presence_penalty
            self.frequency[req_index] = params.frequency_penalty
            self.repetition[req_index] = params.repetition_penalty
        self.top_p[req_index] = params.top_p
        self.min_p[req_index] = params.min_p
        # No vocabulary is as large as the largest of these.
        self.top_k[req_index] = min(params.top_k, _MAX_TOP_K)
        self.seeds[req_index] = mix_seed(params.seed)
        self.logprobs[req_index] = -1 if params.logprobs is None else params.logprobs
        self.num_prompt_tokens[req_index] = assignment.num_prompt_tokens
        self._assign_rules(assignment)

    def _assign_rules(self, assignment: RequestAssignment) -> None:
        req_index, params = assignment.req_index, assignment.sampling
        self.rules.pop(req_index, None)
        bias, allowed = params.logit_bias, params.allowed_token_ids
        if not bias and allowed is None and not params.min_tokens and not params.logits_processors:
            return
        self.rules[req_index] = LogitsRules(
            bias=(
                (np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32))
                if bias
                else None
            ),
            allowed=None if allowed is None else np.array(allowed, np.int64),
            processors=tuple(params.logits_processors),
            stop_ids=np.array([*assignment.eos_token_ids, *params.stop_token_ids], np.int64),
            min_tokens=params.min_tokens,
        )

    def release(self, req_index: int) -> None:
        """Sets neutral values, with which a row needs no stage but the draw."""
        self.temperature[req_index] = self.repetition[req_index] = self.top_p[req_index] = 1.0
        self.presence[req_index] = self.frequency[req_index] = self.min_p[req_index] = 0.0
        self.top_k[req_index], self.logprobs[req_index] = 0, -1
        self.rules.pop(req_index, None)

    def penalised(self, req_indices: np.ndarray) -> np.ndarray:
        """Which of ``req_indices`` have a penalty, as booleans."""
        return (
            (self.presence[req_indices] != 0.0)
            | (self.frequency[req_indices] != 0.0)
            | (self.repetition[req_indices] != 1.0)
        )
