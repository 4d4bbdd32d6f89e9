"""DecodeRunner: the batch's persistent device state, and the steps that run on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from asyncllm.core.executor import ExecutorInfo
from asyncllm.gpu.batch.decode_inputs import DecodeInputs
from asyncllm.gpu.batch.grammar_masks import GrammarMasks
from asyncllm.gpu.batch.sampling_inputs import (
    LOGITS_STAGES,
    LogitsTables,
    SamplingRows,
    Stages,
    TopLogprobs,
)
from asyncllm.gpu.batch.step_buffers import PinnedStepBuffer, StepBuffer
from asyncllm.gpu.batch.step_inputs import ModelInputs
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer, GraphKey, Part, StepGraphs
from asyncllm.gpu.h2d import copy_to_device
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.models.language_model import LanguageModel
from asyncllm.gpu.ops.base import BalancedAttention
from asyncllm.gpu.sample.host_rows import HostRows


class DecodeRunner:
    """The batch's persistent device state, and the decode and mixed steps that update it.

    A decode step is one copy from the host, one graph, and one copy of its tokens to the host.
    The sampled tokens stay on the device as well, where the next step finds them before the
    host has seen them. Mixed steps, those with a prefill, run eagerly on the same state.

    Nothing here waits for the device; the work is queued on the stream that is current.

    Args:
        capturer: makes a graph of a decode step.
        sizes: batch sizes that get one.
        num_logprobs: per token, in a step with log-probabilities.

    Attributes:
        host_buffers: where the host writes a step. One more than there are steps in flight take
            turns, because a queued copy reads the host's memory late.
        buffer: their copy on the device.
        block_tables: ``[N + 1, W]`` int32 per KV group, by request index.
        last_sampled_tokens: ``[N + 1]`` int64, by request index.
        sampled: ``[N]`` int64, the tokens of the last step, by row.
        masks: of the step that is sampled; None before the first that has any.
        logprobs: of the last step, by row; likewise.
        tables: lines of the rules and penalties; the sampler's.
        graphs: of the decode step.
    """

    def __init__(
        self,
        decoder: LanguageModel,
        cache: KVCache,
        info: ExecutorInfo,
        capturer: GraphCapturer,
        sizes: tuple[int, ...],
        num_logprobs: int = 20,
    ) -> None:
        self.decoder, self.cache, self.info = decoder, cache, info
        self.device = device = decoder.embedding.device
        rows, groups = info.max_num_seqs, info.kv_groups

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.buffer = StepBuffer(rows, len(groups), device)
        widths = [-(-info.max_model_len // spec.block_size) for spec in groups]
        self.block_tables = [zeros(rows + 1, width, dtype=torch.int32) for width in widths]
        self.slot_mappings = [zeros(rows) for _ in groups]
        self.last_sampled_tokens = zeros(rows + 1)
        self.token_ids = zeros(rows)
        self.seq_lens = zeros(rows, dtype=torch.int32)
        self.sampled = torch.full((rows,), -1, dtype=torch.int64, device=device)
        padding = [rows * width for width in widths]
        for (indices, _), index in zip(self.buffer.table_changes, padding, strict=True):
            indices.fill_(index)
        pinned, count = device.type == "cuda", info.pipeline_depth + 1
        self.host_buffers: Iterator[PinnedStepBuffer] = cycle(
            [PinnedStepBuffer(rows, padding, pinned=pinned) for _ in range(count)]
        )
        self.tables = LogitsTables(rows, info.vocab_size, device)
        self.masks: GrammarMasks | None = None
        self.logprobs: TopLogprobs | None = None
        self.num_logprobs = min(num_logprobs, info.vocab_size)
        self._logits: Tensor | None = None
        self._mixed_logits: Tensor | None = None
        self.graphs = StepGraphs(self._decode, capturer, sizes)
        # Inputs without rows, by which tables are changed alone.
        self._table_changes = self._inputs(0)
        # Of attention that has a form for skewed batches.
        self._skews = [
            partial(attention.is_skewed, max_len=info.max_model_len, window=kind.window)
            for kind, attention in decoder.attention.items()
            if isinstance(attention, BalancedAttention)
            and attention.balances(info.max_model_len, kind.window)
        ]

    # --- what the model runner queues --------------------------------------------------

    def run(
        self, host: PinnedStepBuffer, num_rows: int, inputs: Sequence[ModelInputs] | None
    ) -> None:
        """Queues a step, up to the copy of its tokens to ``host.tokens``. Without stages a decode
        step is one graph; else it is two.

        Args:
            host: the step; its rows are those that are sampled.
            num_rows: rows that are sampled.
            inputs: of a mixed step, per KV group; None for a decode step.
        """
        if inputs is None and not host.stages and host.host_rows is None:
            self._receive(host)
            self.graphs.run(num_rows, balanced=self._is_skewed(host, num_rows))
            self.cache.save_states(host.state_saves)
            self._return_tokens(host, num_rows)
        else:
            self.forward(host, num_rows, inputs)
            self.sample(host, num_rows)

    def forward(
        self, host: PinnedStepBuffer, num_rows: int, inputs: Sequence[ModelInputs] | None
    ) -> None:
        """Queues the first half of the same step: up to its logits, and the copies of states that
        it leaves behind, ahead of the next step's forward pass."""
        self._receive(host)
        self._forward(host, num_rows, inputs)
        self.cache.save_states(host.state_saves)

    def _forward(
        self, host: PinnedStepBuffer, num_rows: int, inputs: Sequence[ModelInputs] | None
    ) -> None:
        self._mixed_logits = host.prompt_hidden = None
        if inputs is not None:
            for changes in self._table_changes:
                self.decoder.ops.decode_inputs(changes)
            self._insert_sampled(inputs[0])
            hidden = self.decoder.forward(inputs, self.cache)
            if len(hidden) > num_rows:
                hidden, host.prompt_hidden = hidden[:num_rows], hidden[num_rows:]
            self._mixed_logits = self.decoder.logits(hidden)
            return
        if self._logits is None:
            # Not before a step needs them, and not inside a capture.
            shape = (self.info.max_num_seqs, self.decoder.model.vocab_size)
            self._logits = self.sampled.new_zeros(shape, dtype=self.decoder.embedding.dtype)
        self.graphs.run(num_rows, Part.FORWARD, balanced=self._is_skewed(host, num_rows))

    def sample(self, host: PinnedStepBuffer, num_rows: int) -> None:
        """Queues the second half: from the logits to the copy of the tokens to ``host.tokens``, and
        of their log-probabilities to ``host.logprobs``. ``host.host_rows`` take theirs along, and
        have no token."""
        stages, info = host.stages, self.info
        if stages & Stages.MASKS:
            assert host.masks is not None
            if self.masks is None:
                self.masks = GrammarMasks(info.max_num_seqs, info.vocab_size, self.device)
            self.masks.copy_from(host.masks)
        if stages & Stages.LOGPROBS and self.logprobs is None:
            self.logprobs = TopLogprobs(info.max_num_seqs, self.num_logprobs, self.device)
        logits, self._mixed_logits = self._mixed_logits, None
        if host.host_rows is not None:
            self._set_apart(host.host_rows, num_rows, logits, stages)
            if len(host.host_rows.places) == num_rows:
                return
        if logits is None:
            self.graphs.run(num_rows, Part.SAMPLE, stages)
        elif num_rows:
            self.sample_logits(logits, stages)
        self._return_tokens(host, num_rows)
        if stages & Stages.LOGPROBS:
            assert self.logprobs is not None
            assert host.logprobs is not None
            host.logprobs.copy_from(self.logprobs, num_rows)

    def _set_apart(
        self, host_rows: HostRows, num_rows: int, logits: Tensor | None, stages: Stages
    ) -> None:
        """Excludes the rows from the sampling that follows."""
        if logits is None:
            assert self._logits is not None
            logits = self._logits[:num_rows]
        rows = self.sampling_rows(num_rows)
        index = host_rows.take(logits, rows, self.buffer.sampling, stages)
        self.buffer.req_indices.index_fill_(0, index, -1)

    def prepare_host(self, host: PinnedStepBuffer) -> None:
        """Allocates the masks and the log-probabilities of a host buffer whose stages need them."""
        info, cpu, pinned = self.info, torch.device("cpu"), self.device.type == "cuda"
        if host.stages & Stages.MASKS and host.masks is None:
            host.masks = GrammarMasks(info.max_num_seqs, info.vocab_size, cpu, pinned=pinned)
        if host.stages & Stages.LOGPROBS and host.logprobs is None:
            host.logprobs = TopLogprobs(info.max_num_seqs, self.num_logprobs, cpu, pinned=pinned)

    def _return_tokens(self, host: PinnedStepBuffer, num_rows: int) -> None:
        host.tokens[:num_rows].copy_(self.sampled[:num_rows], non_blocking=True)

    def _receive(self, host: PinnedStepBuffer) -> None:
        self.cache.clear(host.blocks_to_zero)
        self.cache.load_states(host.state_loads)
        self.buffer.memory.copy_(host.memory, non_blocking=True)
        for update in host.updates:
            update.write(self.tables)
        for group, indices, values in host.overflow:
            changes = copy_to_device(indices, self.device), copy_to_device(values, self.device)
            rows = replace(self._table_changes[group], table_changes=changes)
            self.decoder.ops.decode_inputs(rows)

    def _is_skewed(self, host: PinnedStepBuffer, num_rows: int) -> bool:
        """Whether some attention would wait for the longest of the step's sequences."""
        if not self._skews:
            return False
        lengths = host.positions.numpy()[:num_rows] + 1
        batch = self.graphs.bucket(num_rows) or num_rows
        return any(is_skewed(batch, lengths) for is_skewed in self._skews)

    @property
    def can_balance(self) -> bool:
        """Whether there may be a batch that takes balanced attention."""
        return bool(self._skews)

    def _insert_sampled(self, inputs: ModelInputs) -> None:
        """Fills in the tokens of decode rows that only the device knows."""
        count = inputs.num_decodes
        if count:
            tokens = inputs.token_ids[:count]
            sampled = self.last_sampled_tokens[inputs.req_indices[:count]]
            torch.where(tokens < 0, sampled, tokens, out=tokens)

    def run_padding(self, key: GraphKey) -> None:
        """Queues the work of a graph eagerly, on padded rows alone."""
        self._receive(next(self.host_buffers))
        self._decode(key)

    # --- what a graph holds ------------------------------------------------------------

    def _decode(self, key: GraphKey) -> None:
        num_rows = key.bucket
        if key.part is Part.SAMPLE:
            assert self._logits is not None
            self.sample_logits(self._logits[:num_rows], key.stages)
            return
        inputs = self._inputs(num_rows, balanced=key.balanced)
        for rows in inputs:
            self.decoder.ops.decode_inputs(rows)
        logits = self.decoder.logits(self.decoder.decode(inputs, self.cache))
        if key.part is Part.STEP:
            self.sample_logits(logits, key.stages)
        else:
            assert self._logits is not None
            self._logits[:num_rows].copy_(logits)

    def _inputs(self, num_rows: int, *, balanced: bool = False) -> list[DecodeInputs]:
        buffer = self.buffer
        return [
            DecodeInputs(
                req_indices=buffer.req_indices[:num_rows],
                host_token_ids=buffer.host_token_ids[:num_rows],
                positions=buffer.positions[:num_rows],
                block_table=self.block_tables[group],
                table_changes=buffer.table_changes[group],
                token_ids=self.token_ids[:num_rows],
                seq_lens=self.seq_lens[:num_rows],
                slot_mapping=self.slot_mappings[group][:num_rows],
                last_sampled_tokens=self.last_sampled_tokens,
                block_size=spec.block_size,
                max_len=self.info.max_model_len,
                balanced=balanced,
            )
            for group, spec in enumerate(self.info.kv_groups)
        ]

    def sample_logits(self, logits: Tensor, stages: Stages) -> None:
        """Samples the rows that were received last."""
        rows, buffer = logits.shape[0], self.buffer
        ops, processed = self.decoder.ops, logits
        if stages & LOGITS_STAGES:
            processed = ops.process_logits(logits, self.sampling_rows(rows), stages)
        ops.sample(
            processed,
            buffer.sampling,
            buffer.req_indices[:rows],
            buffer.positions[:rows],
            self.last_sampled_tokens,
            self.sampled[:rows],
        )
        if stages & Stages.LOGPROBS:
            assert self.logprobs is not None
            ops.top_logprobs(logits, self.sampled[:rows], self.logprobs)

    def sampling_rows(self, num_rows: int) -> SamplingRows:
        """The rows that were received last."""
        buffer, masks = self.buffer, self.masks
        return SamplingRows(
            req_indices=buffer.req_indices[:num_rows],
            positions=buffer.positions[:num_rows],
            host_token_ids=buffer.host_token_ids[:num_rows],
            last_sampled_tokens=self.last_sampled_tokens,
            rules=buffer.rules,
            tables=self.tables,
            mask_slots=None if masks is None else masks.slots[:num_rows],
            mask_words=None if masks is None else masks.words,
        )
