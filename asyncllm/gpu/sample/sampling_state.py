"""SamplingState: the sampling parameters of every request index, as arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from asyncllm.core.batch import SlotAssignment
from asyncllm.gpu.batch.grammar_masks import num_mask_words, view_mask_words
from asyncllm.gpu.batch.sampling_inputs import LogitsTables, SamplingStages
from asyncllm.gpu.batch.sampling_table import SCALAR_PARAMS, scalar_param_sections
from asyncllm.gpu.batch.sections import BufferSections
from asyncllm.gpu.h2d import copy_to_device
from asyncllm.gpu.ops.gumbel import MIN_TEMPERATURE
from asyncllm.gpu.sample.host_rules import HostSamplingRules
from asyncllm.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_IDS

_MAX_TOP_K = 2**31 - 1

_SPLITMIX_INCREMENT = 0x9E3779B97F4A7C15
_UINT64_MAX = 2**64 - 1

EMPTY_ROW_INDICES = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class LogitsTableUpdate:
    """New contents of a request index's rows of LogitsTables.

    Attributes:
        rows: first elements of the request index's row in each table, by the table's name.
        counts: token ids of the output so far, and how often each occurs; None if the request has
            no penalties.
    """

    req_index: int
    stages: SamplingStages = SamplingStages.NONE
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    counts: tuple[np.ndarray, np.ndarray] | None = None

    def write(self, tables: LogitsTables) -> None:
        """Queues the writes to the tables."""
        tables.allocate(self.stages)
        row, device = self.req_index, tables.device
        for name, values in self.rows.items():
            getattr(tables, name)[row, : len(values)] = copy_to_device(values, device)
        if self.counts is not None:
            ids, counts = (copy_to_device(values, device) for values in self.counts)
            tables.counts[row].zero_()
            tables.counts[row].index_copy_(0, ids, counts)


class SamplingState:
    """Sampling parameters by request index, set when a request is assigned to the index.

    The arrays have the dtypes that steps compute with, so that a value that does not fit raises an
    error when the request is assigned, and not in a step.

    Attributes:
        sections: a tensor ``[N + 1]`` per name of SCALAR_PARAMS, with one element for padding.
        logprobs: ``[N + 1]`` int64, number of log-probabilities per token, at most
            ``num_logprobs``; -1 for none.
        stages: ``[N + 1]`` int64, the bits of the SamplingStages that an index needs.
        needs_logits: ``[N + 1]`` bool, False for an index that needs only the token of its largest
            logit.
        bad_words: ``[N + 1]`` int64, address of ``BadWords.packed``; 0 for none.
        host_rules: HostSamplingRules by request index, for requests that have any.
        host_logprobs: number of log-probabilities per token by request index, for requests that
            want more than ``num_logprobs``.
        version: number of assignments so far; copies of ``sections`` are refreshed if it changed.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, num_logprobs: int) -> None:
        table_rows = max_num_seqs + 1
        self.vocab_size, self.num_logprobs = vocab_size, num_logprobs
        self.sections = BufferSections(scalar_param_sections(table_rows), torch.device("cpu"))
        self._scalars = self.sections.arrays
        for name, param in SCALAR_PARAMS.items():
            self._scalars[name].fill(param.neutral_value)
        self.logprobs = np.full(table_rows, -1, dtype=np.int64)
        self.stages = np.zeros(table_rows, dtype=np.int64)
        self.needs_logits = np.ones(table_rows, dtype=np.bool_)
        self.bad_words = np.zeros(table_rows, dtype=np.int64)
        self.host_rules: dict[int, HostSamplingRules] = {}
        self.host_logprobs: dict[int, int] = {}
        self.version = 0

    def add_request(self, assignment: SlotAssignment) -> LogitsTableUpdate | None:
        """Sets the parameters of a request.

        Raises an error for a value that does not fit its array; the caller then has to release the
        index.

        Returns:
            The request's rows of LogitsTables; None if the request needs no such rows.
        """
        req_index = assignment.req_index
        self.version += 1
        params: Any = assignment.sampling
        scalars = self._scalars
        with np.errstate(over="raise", invalid="raise"):
            for name, param in SCALAR_PARAMS.items():
                if param.field_name:
                    scalars[name][req_index] = getattr(params, param.field_name)
        # Limit top_k to the range of its dtype: no vocabulary is larger than _MAX_TOP_K.
        scalars["top_k"][req_index] = min(params.top_k, _MAX_TOP_K)
        scalars["states"][req_index] = np.uint64(mix_seed(params.seed)).view(np.int64)
        update = LogitsTableUpdate(req_index)
        if params.logprobs is not None:
            self._set_num_logprobs(update, params.logprobs)
        restricted = params.allowed_token_ids is not None or assignment.token_rules is not None
        if restricted or params.logit_bias or params.min_tokens or params.logits_processors:
            self._set_token_constraints(update, assignment)
        added = params.presence_penalty or params.frequency_penalty
        if added or params.repetition_penalty != 1:
            self._set_penalties(update, assignment)
        self.stages[req_index] = update.stages.value
        has_host = req_index in self.host_rules or req_index in self.host_logprobs
        is_random = scalars["temperature"][req_index] >= MIN_TEMPERATURE
        self.needs_logits[req_index] = bool(update.stages) or has_host or is_random
        needs_tables = update.stages & (SamplingStages.TOKEN_CONSTRAINTS | SamplingStages.PENALTIES)
        return update if needs_tables else None

    def _set_num_logprobs(self, update: LogitsTableUpdate, num_logprobs: int) -> None:
        if 0 <= num_logprobs <= self.num_logprobs:
            self.logprobs[update.req_index] = num_logprobs
            update.stages |= SamplingStages.LOGPROBS
        else:
            max_count = self.vocab_size if num_logprobs < 0 else int(np.int64(num_logprobs))
            self.host_logprobs[update.req_index] = max_count

    def _set_token_constraints(self, update: LogitsTableUpdate, assignment: SlotAssignment) -> None:
        req_index, params, scalars = update.req_index, assignment.sampling, self._scalars
        if params.logit_bias:
            update.rows["bias_ids"] = ids = self._checked_token_ids(
                params.logit_bias, MAX_LOGIT_BIASES
            )
            values = np.fromiter(params.logit_bias.values(), np.float64, len(ids))
            with np.errstate(over="raise", invalid="raise"):
                update.rows["bias_values"] = values.astype(np.float32)
            scalars["num_bias"][req_index] = len(ids)
        if params.min_tokens:
            stop_ids = [*assignment.eos_token_ids, *params.stop_token_ids]
            update.rows["stop_ids"] = self._checked_token_ids(stop_ids, MAX_STOP_IDS)
            scalars["num_stop_ids"][req_index] = len(stop_ids)
            scalars["min_end"][req_index] = assignment.num_prompt_tokens + params.min_tokens
        rules = assignment.token_rules
        if rules is not None and rules.allowed_mask is not None:
            # Copy the words: torch warns about read-only memory.
            update.rows["allowed"] = view_mask_words(
                rules.allowed_mask, num_mask_words(self.vocab_size)
            ).copy()
            scalars["restricted"][req_index] = 1
        elif params.allowed_token_ids is not None:
            raise ValueError("token_rules: has no mask, expected one of allowed_token_ids")
        bad_words = None if rules is None else rules.bad_words
        if bad_words is not None:
            # The host rules keep the packed words alive.
            self.bad_words[req_index] = np.frombuffer(bad_words.packed, np.int32).ctypes.data
        if update.rows or bad_words is not None:
            update.stages |= SamplingStages.TOKEN_CONSTRAINTS
        if bad_words is not None or params.logits_processors:
            processors = tuple(params.logits_processors)
            self.host_rules[req_index] = HostSamplingRules(bad_words, processors)

    def _set_penalties(self, update: LogitsTableUpdate, assignment: SlotAssignment) -> None:
        tokens = np.asarray(assignment.token_ids, dtype=np.int64)
        prompt = assignment.num_prompt_tokens
        ids = counts = tokens[prompt:]
        if len(ids):  # Not so for a new request: ``unique`` takes 40 microseconds.
            ids, counts = np.unique(ids, return_counts=True)
        update.counts = ids, counts.astype(np.int32)
        update.rows["in_prompt"] = self._pack_token_bits(tokens[:prompt])
        update.stages |= SamplingStages.PENALTIES
        self._scalars["counted_from"][update.req_index] = len(tokens)

    def _checked_token_ids(self, token_ids: Any, max_count: int) -> np.ndarray:
        """Converts token ids to int32; IndexError for an id outside the vocabulary or too many
        ids."""
        ids = np.fromiter(token_ids, np.int64, len(token_ids))
        if len(ids) > max_count:
            raise IndexError(f"{len(ids)} token ids, expected at most {max_count}")
        if len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise IndexError(f"token ids {ids.min()} to {ids.max()} in {self.vocab_size} tokens")
        return ids.astype(np.int32)

    def _pack_token_bits(self, token_ids: Any) -> np.ndarray:
        """Packs token ids into ``[W]`` int32, a bit per token."""
        bits = np.zeros(num_mask_words(self.vocab_size) * 32, dtype=np.uint8)
        bits[np.asarray(token_ids, dtype=np.int64)] = 1
        return np.packbits(bits, bitorder="little").view("<i4")

    def release(self, req_index: int) -> None:
        """Resets a request index to neutral values, with which its logits are not processed."""
        for name, param in SCALAR_PARAMS.items():
            self._scalars[name][req_index] = param.neutral_value
        self.logprobs[req_index] = -1
        self.bad_words[req_index] = self.stages[req_index] = 0
        self.needs_logits[req_index] = True
        self.host_rules.pop(req_index, None)
        self.host_logprobs.pop(req_index, None)

    def get_or_add_host_rules(self, req_index: int) -> HostSamplingRules:
        """HostSamplingRules of a request index; adds empty ones if the index has none."""
        self.needs_logits[req_index] = True
        return self.host_rules.setdefault(req_index, HostSamplingRules())

    def rows_needing_host(self, req_indices: np.ndarray) -> np.ndarray:
        """Indices into ``req_indices`` of the requests whose sampling needs the host.

        These requests have bad words of several tokens, logits processors, or more
        log-probabilities than a step's buffers hold.
        """
        host_indices = self.host_rules.keys() | self.host_logprobs.keys()
        if not host_indices:
            return EMPTY_ROW_INDICES
        return np.flatnonzero([req_index in host_indices for req_index in req_indices.tolist()])


def mix_seed(seed: int) -> int:
    """Mixes a seed of up to 64 bits, so that neighbouring seeds give unrelated random numbers.

    The function is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    z = (seed + _SPLITMIX_INCREMENT) & _UINT64_MAX
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64_MAX
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _UINT64_MAX
    return z ^ (z >> 31)
