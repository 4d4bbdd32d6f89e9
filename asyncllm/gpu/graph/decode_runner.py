"""DecodeRunner: steps whose inputs, state and outputs stay where they are on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncllm.gpu.batch.decode_inputs import DecodeInputs
from asyncllm.gpu.batch.step_buffers import PinnedStepBuffer, StepBuffer, StepBufferRing
from asyncllm.gpu.batch.step_inputs import HostInputs, ModelInputs
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer, StepGraphs
from asyncllm.gpu.h2d import copy_to_device
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.models.decoder import Decoder


class DecodeRunner:
    """Everything that is on the device between two steps, and the work of a step on it.

    A step is one copy from the host, one graph, and one copy of its tokens to the host. The
    sampled tokens stay on the device as well, where the next step finds them before the host
    has seen them. Steps with a prefill go kernel by kernel, on the same state.

    Nothing here waits for the device; the work is queued on the stream that is current.

    Args:
        max_num_seqs: N, slots.
        max_len: longest sequence in tokens.
        steps_in_flight: at most; there is one more host block.
        capturer: how a decode step becomes a graph.
        sizes: batch sizes that get one.

    Attributes:
        step_buffers: where the host writes a step.
        block: what the host last said.
        block_table: ``[N + 1, W]`` int32, by slot.
        last_sampled_tokens: ``[N + 1]`` int64, by slot.
        sampled: ``[N]`` int64, the tokens of the last step, by row.
        graphs: of the decode step.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_len: int,
        block_size: int,
        steps_in_flight: int,
        capturer: GraphCapturer,
        sizes: tuple[int, ...],
    ) -> None:
        device = decoder.embedding.device
        self.decoder, self.cache = decoder, cache
        self.device = device
        self.max_num_seqs, self.max_len, self.block_size = max_num_seqs, max_len, block_size
        width = -(-max_len // block_size)
        self.block = StepBuffer(max_num_seqs, device)
        self.block_table = torch.zeros((max_num_seqs + 1, width), dtype=torch.int32, device=device)
        self.last_sampled_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self.token_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.slot_mapping = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.sampled = torch.full((max_num_seqs,), -1, dtype=torch.int64, device=device)
        padding_index = max_num_seqs * width
        self.step_buffers = StepBufferRing(
            max_num_seqs, padding_index, steps_in_flight + 1, pinned=device.type == "cuda"
        )
        self._logits: Tensor | None = None
        self.block.table_indices.fill_(padding_index)
        self.graphs = StepGraphs(self._run, capturer, sizes)

    # --- what the model runner queues --------------------------------------------------

    def decode(self, host: PinnedStepBuffer, num_rows: int) -> None:
        """A step of decode rows, up to the tokens in ``host.tokens``."""
        self._read(host)
        self.graphs.run(num_rows, True)
        host.tokens[:num_rows].copy_(self.sampled[:num_rows], non_blocking=True)

    def decode_logits(self, host: PinnedStepBuffer, num_rows: int) -> Tensor:
        """The same step up to its logits ``[num_rows, vocab_size]``, valid until the next."""
        if self._logits is None:
            # Not before somebody needs them, and not inside a capture.
            shape = (self.max_num_seqs, self.decoder.model.vocab_size)
            self._logits = self.block_table.new_zeros(shape, dtype=self.decoder.embedding.dtype)
        self._read(host)
        self.graphs.run(num_rows, False)
        return self._logits[:num_rows]

    def mixed(self, host: PinnedStepBuffer, arrays: HostInputs, req_indices: np.ndarray) -> None:
        """A step with prefill rows. ``host`` has the rows that are sampled, ``req_indices`` the
        decode rows' slots."""
        logits = self.mixed_logits(host, arrays, req_indices)
        rows, block = logits.shape[0], self.block
        if not rows:
            return
        self.decoder.ops.sample(
            logits,
            block.sampling,
            block.req_indices[:rows],
            block.positions[:rows],
            self.last_sampled_tokens,
            self.sampled[:rows],
        )
        host.tokens[:rows].copy_(self.sampled[:rows], non_blocking=True)

    def mixed_logits(
        self, host: PinnedStepBuffer, arrays: HostInputs, req_indices: np.ndarray
    ) -> Tensor:
        """The same step up to its logits."""
        self._read(host)
        self._change_table()
        inputs = ModelInputs.from_arrays(arrays, self.device)
        if len(req_indices):
            tokens = inputs.token_ids[: len(req_indices)]
            sampled = self.last_sampled_tokens[copy_to_device(req_indices, self.device)]
            torch.where(tokens < 0, sampled, tokens, out=tokens)
        return self.decoder.logits(self.decoder.forward(inputs, self.cache))

    def change_table(self, table_indices: np.ndarray, table_values: np.ndarray) -> None:
        """More changes of the block table than a host block holds."""
        self.block_table.view(-1).index_copy_(
            0, copy_to_device(table_indices, self.device), copy_to_device(table_values, self.device)
        )

    # --- what a graph holds ------------------------------------------------------------

    def _run(self, num_rows: int, samples: bool) -> None:
        rows = self._rows(num_rows)
        self._change_table()
        self.decoder.ops.decode_inputs(rows)
        logits = self.decoder.logits(self.decoder.decode(rows, self.cache))
        if samples:
            self.decoder.ops.sample(
                logits,
                self.block.sampling,
                rows.req_indices,
                rows.positions,
                self.last_sampled_tokens,
                self.sampled[:num_rows],
            )
        else:
            assert self._logits is not None
            self._logits[:num_rows].copy_(logits)

    def _rows(self, num_rows: int) -> DecodeInputs:
        block = self.block
        return DecodeInputs(
            req_indices=block.req_indices[:num_rows],
            host_token_ids=block.host_token_ids[:num_rows],
            positions=block.positions[:num_rows],
            block_table=self.block_table,
            token_ids=self.token_ids[:num_rows],
            seq_lens=self.seq_lens[:num_rows],
            slot_mapping=self.slot_mapping[:num_rows],
            last_sampled_tokens=self.last_sampled_tokens,
            block_size=self.block_size,
            max_len=self.max_len,
        )

    def _read(self, host: PinnedStepBuffer) -> None:
        self.block.memory.copy_(host.block.memory, non_blocking=True)

    def _change_table(self) -> None:
        self.block_table.view(-1).index_copy_(0, self.block.table_indices, self.block.table_values)
