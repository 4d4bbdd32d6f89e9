"""ModelRunner: the executor of a model on a device that runs in step with the engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from threading import get_ident

import numpy as np
import torch

from asyncllm.core.batch import StepBatch, StepResult
from asyncllm.core.executor import ExecutorInfo, StepMemoryError
from asyncllm.gpu.input_batch import InputBatch
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.memory import is_out_of_memory, release
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.sampler import Sampler
from asyncllm.gpu.threads import set_thread_count
from asyncllm.tracebacks import clear_frames


@dataclass(slots=True)
class _Device:
    """All that holds memory, in one place so that closing drops it whole."""

    decoder: Decoder
    cache: KVCache
    inputs: InputBatch
    sampler: Sampler


class ModelRunner:
    """Runs steps eagerly, in the order in which they were launched.

    ``launch`` only queues; ``collect`` runs the oldest step, changes of slots and blocks
    included. So a step sees every token that the steps before it sampled, and two steps in
    flight behave as they do on a device that runs ahead.

    Attributes:
        info: what the scheduler has to know.
        dtype: of weights and KV.
        device: where they are.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        info: ExecutorInfo,
        *,
        num_threads: int | None = None,
    ) -> None:
        self.info = info
        self.dtype = decoder.embedding.dtype
        self.device = decoder.embedding.device
        inputs = InputBatch(info.max_num_seqs, info.max_model_len, info.block_size, self.device)
        sampler = Sampler(info.max_num_seqs, info.vocab_size, inputs, self.device)
        self._state: _Device | None = _Device(decoder, cache, inputs, sampler)
        self._queue: deque[StepBatch] = deque()
        self._num_threads = num_threads
        self._thread: int | None = None

    def launch(self, batch: StepBatch) -> None:
        if self._state is None:
            raise RuntimeError("the model runner is closed")
        self._queue.append(batch)

    def collect(self) -> StepResult:
        if self._state is None:
            raise RuntimeError("the model runner is closed")
        if not self._queue:
            raise RuntimeError("no step is in flight")
        self._enter_thread()
        batch = self._queue.popleft()
        try:
            with torch.inference_mode():
                return self._run(self._state, batch)
        except (RuntimeError, MemoryError) as error:
            # Whoever keeps the exception would keep the model, which its frames refer to.
            clear_frames(error)
            if not is_out_of_memory(error):
                raise
            raise StepMemoryError(
                f"step {batch.step}, {batch.num_tokens} tokens: {error}"
            ) from error

    def discard(self) -> None:
        self._queue.clear()

    def close(self) -> None:
        if self._state is None:
            return
        self._queue.clear()
        self._state = None
        release(self.device)

    def _enter_thread(self) -> None:
        """The thread count belongs to a thread, and the engine may start its own late."""
        thread = get_ident()
        if self._num_threads is not None and thread != self._thread:
            set_thread_count(self._num_threads)
        self._thread = thread

    def _run(self, state: _Device, batch: StepBatch) -> StepResult:
        unfilled = state.inputs.apply(batch)
        for slot in batch.released:
            state.sampler.release(slot)
        for assignment in batch.assignments:
            state.sampler.assign(assignment)
        if len(unfilled) and state.decoder.attention.reads_whole_blocks:
            state.cache.clear(torch.from_numpy(unfilled).to(self.device))
        if not len(batch):
            return StepResult([])
        inputs = state.inputs.prepare(batch)
        logits = state.decoder.forward(inputs, state.cache)
        rows = np.flatnonzero(batch.samples)
        result = StepResult([-1] * len(batch))
        if len(rows):
            self._sample(state, batch, rows, logits, result)
        return result

    def _sample(
        self,
        state: _Device,
        batch: StepBatch,
        rows: np.ndarray,
        logits: torch.Tensor,
        result: StepResult,
    ) -> None:
        slots = np.array(batch.slots)[rows]
        positions = (np.array(batch.starts) + np.array(batch.counts))[rows]
        output = state.sampler.sample(logits, slots, positions)
        # A row that failed gets a token that the embedding has; its next step is void.
        state.inputs.write_sampled(slots, positions, np.maximum(output.token_ids, 0))
        row_of = rows.tolist()
        for row, token in zip(row_of, output.token_ids.tolist(), strict=True):
            result.token_ids[row] = token
        result.logprobs = {row_of[i]: value for i, value in output.logprobs.items()}
        result.errors = {row_of[i]: error for i, error in output.errors.items()}
