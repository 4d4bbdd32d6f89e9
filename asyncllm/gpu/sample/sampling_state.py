"""SamplingState: the sampling parameters of every request index, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asyncllm.core.batch import RequestAssignment
from asyncllm.gpu.batch.grammar_masks import num_words
from asyncllm.gpu.batch.sampling_inputs import LogitsTables, Stages
from asyncllm.gpu.batch.sampling_table import SCALARS, scalar_sections
from asyncllm.gpu.batch.sections import Sections
from asyncllm.gpu.h2d import copy_to_device
from asyncllm.gpu.ops.gumbel import MIN_TEMPERATURE
from asyncllm.gpu.sample.host_rules import HostRules
from asyncllm.gpu.sample.rng import mix_seed
from asyncllm.sampling_params import MAX_BIAS, MAX_STOP_IDS
from asyncllm.validation import MAX_ITEMS

IdsAndValues = tuple[np.ndarray, np.ndarray]

_MAX_TOP_K = 2**31 - 1

NO_ROWS = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class TableUpdate:
    """New contents of a request index's rows of LogitsTables; None for tables without one.

    Attributes:
        allowed: ``[W]`` int32.
        bias: ids and values.
        stop_ids: int32.
        counts: token ids of the output so far, and how often each occurs.
        in_prompt: ``[W]`` int32.
    """

    req_index: int
    stages: Stages
    allowed: np.ndarray | None = None
    bias: IdsAndValues | None = None
    stop_ids: np.ndarray | None = None
    counts: IdsAndValues | None = None
    in_prompt: np.ndarray | None = None

    def write(self, tables: LogitsTables) -> None:
        """Queues the writes to the tables."""
        tables.make(self.stages)
        line, device = self.req_index, tables.device
        if self.allowed is not None:
            tables.allowed[line] = copy_to_device(self.allowed, device)
        if self.bias is not None:
            ids, values = self.bias
            tables.bias_ids[line, : len(ids)] = copy_to_device(ids, device)
            tables.bias_values[line, : len(ids)] = copy_to_device(values, device)
        if self.stop_ids is not None:
            tables.stop_ids[line, : len(self.stop_ids)] = copy_to_device(self.stop_ids, device)
        if self.counts is not None and self.in_prompt is not None:
            ids, counts = self.counts
            tables.counts[line].zero_()
            tables.counts[line].index_copy_(
                0, copy_to_device(ids, device), copy_to_device(counts, device)
            )
            tables.in_prompt[line] = copy_to_device(self.in_prompt, device)


class SamplingState:
    """Sampling parameters by request index, set when a request enters.

    They have the dtypes that steps compute with, so that a value that does not fit raises when its
    request enters, and not in a step.

    Attributes:
        sections: the scalars of SCALARS, ``[N + 1]`` each, with an element for padding.
        logprobs: ``[N + 1]`` int64, -1 for none; at most ``num_logprobs``.
        stages: ``[N + 1]`` int64, the bits of Stages that an index needs.
        needs_logits: ``[N + 1]`` bool, False for an index that needs only the token of its largest
            logit.
        host: rules for the host, by request index, where there are any.
        host_logprobs: by request index, numbers of log-probabilities above ``num_logprobs``.
        version: number of changes so far, by which a copy knows whether it is current.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, num_logprobs: int) -> None:
        table_rows = max_num_seqs + 1
        self.vocab_size, self.num_logprobs = vocab_size, num_logprobs
        self.sections = Sections(scalar_sections(table_rows), torch.device("cpu"))
        self._scalars = self.sections.arrays
        for name, scalar in SCALARS.items():
            self._scalars[name].fill(scalar.neutral)
        self.logprobs = np.full(table_rows, -1, dtype=np.int64)
        self.stages = np.zeros(table_rows, dtype=np.int64)
        self.needs_logits = np.ones(table_rows, dtype=np.bool_)
        self.host: dict[int, HostRules] = {}
        self.host_logprobs: dict[int, int] = {}
        self.version = 0

    def assign(self, assignment: RequestAssignment) -> TableUpdate | None:
        """Sets the parameters of a request.

        It raises for a value that does not fit its array; the index has to be released then.

        Returns:
            The request's rows of LogitsTables; None if it needs none.
        """
        req_index = assignment.req_index
        self.version += 1
        params: Any = assignment.sampling
        scalars = self._scalars
        with np.errstate(over="raise", invalid="raise"):
            for name, scalar in SCALARS.items():
                if scalar.parameter:
                    scalars[name][req_index] = getattr(params, scalar.parameter)
        # No vocabulary is larger than _MAX_TOP_K.
        scalars["top_k"][req_index] = min(params.top_k, _MAX_TOP_K)
        scalars["states"][req_index] = np.uint64(mix_seed(params.seed)).view(np.int64)
        update = TableUpdate(req_index, Stages.NONE)
        if params.logprobs is not None:
            self._assign_logprobs(update, params.logprobs)
        restricted = params.allowed_token_ids is not None or assignment.bad_words
        if restricted or params.logit_bias or params.min_tokens or params.logits_processors:
            self._assign_rules(update, assignment)
        added = params.presence_penalty or params.frequency_penalty
        if added or params.repetition_penalty != 1:
            self._assign_penalties(update, assignment)
        self.stages[req_index] = update.stages.value
        has_host = req_index in self.host or req_index in self.host_logprobs
        drawn = scalars["temperature"][req_index] >= MIN_TEMPERATURE
        self.needs_logits[req_index] = bool(update.stages) or has_host or drawn
        return update if update.stages & (Stages.RULES | Stages.PENALTIES) else None

    def _assign_logprobs(self, update: TableUpdate, count: int) -> None:
        if 0 <= count <= self.num_logprobs:
            self.logprobs[update.req_index] = count
            update.stages |= Stages.LOGPROBS
        else:
            self.host_logprobs[update.req_index] = (
                self.vocab_size if count < 0 else int(np.int64(count))
            )

    def _assign_rules(self, update: TableUpdate, assignment: RequestAssignment) -> None:
        req_index, params, scalars = update.req_index, assignment.sampling, self._scalars
        update.bias = self._bias(params.logit_bias)
        if update.bias is not None:
            scalars["num_bias"][req_index] = len(update.bias[0])
        if params.min_tokens:
            stop_ids = [*assignment.eos_token_ids, *params.stop_token_ids]
            update.stop_ids = self._token_ids(stop_ids, MAX_STOP_IDS)
            scalars["num_stop_ids"][req_index] = len(stop_ids)
            scalars["min_end"][req_index] = assignment.num_prompt_tokens + params.min_tokens
        update.allowed = self._allowed(params.allowed_token_ids, assignment.bad_words)
        scalars["restricted"][req_index] = update.allowed is not None
        if any(one is not None for one in (update.allowed, update.bias, update.stop_ids)):
            update.stages |= Stages.RULES
        bad_words = tuple(words for words in assignment.bad_words if len(words) > 1)
        if bad_words or params.logits_processors:
            self.host[req_index] = HostRules(bad_words, tuple(params.logits_processors))

    def _assign_penalties(self, update: TableUpdate, assignment: RequestAssignment) -> None:
        tokens = np.asarray(assignment.token_ids, dtype=np.int64)
        prompt = assignment.num_prompt_tokens
        ids, counts = np.unique(tokens[prompt:], return_counts=True)
        update.counts = ids, counts.astype(np.int32)
        update.in_prompt = self._packed_bits(tokens[:prompt])
        update.stages |= Stages.PENALTIES
        self._scalars["counted_from"][update.req_index] = len(tokens)

    def _bias(self, bias: Any) -> IdsAndValues | None:
        if not bias:
            return None
        with np.errstate(over="raise", invalid="raise"):
            return self._token_ids(list(bias), MAX_BIAS), np.array(list(bias.values()), np.float32)

    def _allowed(self, allowed: Any, bad_words: tuple[tuple[int, ...], ...]) -> np.ndarray | None:
        single = [words[0] for words in bad_words if len(words) == 1]
        if allowed is None and not single:
            return None
        words = (
            self._packed_bits(self._token_ids(allowed))
            if allowed is not None
            else ~self._packed_bits([])
        )
        return words & ~self._packed_bits(self._token_ids(single))

    def _token_ids(self, token_ids: Any, most: int = MAX_ITEMS) -> np.ndarray:
        """Token ids as int32; IndexError for one outside the vocabulary, or more than ``most``."""
        ids = np.array(token_ids, np.int64)
        if len(ids) > most:
            raise IndexError(f"{len(ids)} token ids, expected at most {most}")
        if len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise IndexError(f"token ids {ids.min()} to {ids.max()} in {self.vocab_size} tokens")
        return ids.astype(np.int32)

    def _packed_bits(self, token_ids: Any) -> np.ndarray:
        """Packs token ids into ``[W]`` int32, a bit per token."""
        bits = np.zeros(num_words(self.vocab_size) * 32, dtype=np.uint8)
        bits[np.asarray(token_ids, dtype=np.int64)] = 1
        return np.packbits(bits, bitorder="little").view("<i4")

    def release(self, req_index: int) -> None:
        """Sets neutral values, with which a row needs the draw only."""
        for name, scalar in SCALARS.items():
            self._scalars[name][req_index] = scalar.neutral
        self.logprobs[req_index] = -1
        self.stages[req_index] = 0
        self.needs_logits[req_index] = True
        self.host.pop(req_index, None)
        self.host_logprobs.pop(req_index, None)

    def rules_of(self, req_index: int) -> HostRules:
        """The host's rules of a request index; made empty if it has none."""
        self.needs_logits[req_index] = True
        return self.host.setdefault(req_index, HostRules())

    def rows_needing_host(self, req_indices: np.ndarray) -> np.ndarray:
        """Places in ``req_indices`` whose sampling needs the host.

        These have bad words of several tokens, logits processors, or more log-probabilities than a
        step's buffers hold.
        """
        known = self.host.keys() | self.host_logprobs.keys()
        if not known:
            return NO_ROWS
        return np.flatnonzero([req_index in known for req_index in req_indices.tolist()])
