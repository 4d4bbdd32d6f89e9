"""ModelRunner: the executor of a model, on a device in step with the engine or ahead of it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident

import numpy as np
import torch
from torch import Tensor

from asyncllm.core.batch import RowError, StepBatch, StepResult
from asyncllm.core.executor import ExecutorInfo, StepOutOfMemoryError
from asyncllm.core.in_process import InProcess
from asyncllm.core.tracebacks import clear_frames
from asyncllm.gpu.batch.input_batch import UNKNOWN, InputBatch
from asyncllm.gpu.batch.step_buffers import PinnedStepBuffer
from asyncllm.gpu.batch.step_inputs import ModelInputs
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer, StepGraphs
from asyncllm.gpu.graph.decode_runner import DecodeRunner
from asyncllm.gpu.graph.streams import Stream, SyncStream, Ticket
from asyncllm.gpu.h2d import copy_to_device
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.memory import is_out_of_memory, release
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.sample.sampler import NOT_FINITE, SampleOutput, Sampler
from asyncllm.gpu.threads import set_thread_count


@dataclass(slots=True)
class _Device:
    """All that holds memory, in one place so that closing drops it whole."""

    decoder: Decoder
    cache: KVCache
    inputs: InputBatch
    sampler: Sampler
    decode: DecodeRunner | None


class _Step:
    """A step between launch and collect.

    Attributes:
        rows: ``[S]``, rows of the batch that are sampled.
        req_indices, positions: ``[S]``, of these rows, and where their tokens will be.
        epochs: ``[S]``, of the slots, of a step that runs ahead of the host.
        blocks_to_zero: blocks to be cleared before it runs.
        ticket, host: of a step that runs ahead of the host.
        error: what went wrong when it was to be started.
        failures: by row, errors of requests that could not be assigned to their slots.
    """

    __slots__ = (
        "batch",
        "blocks_to_zero",
        "epochs",
        "error",
        "failures",
        "host",
        "positions",
        "req_indices",
        "rows",
        "started",
        "ticket",
    )  # fmt: skip

    def __init__(self, batch: StepBatch) -> None:
        self.batch = batch
        self.rows = np.flatnonzero(batch.samples)
        self.req_indices = np.array(batch.req_indices, dtype=np.int64)[self.rows]
        ends = np.array(batch.starts, dtype=np.int64) + np.array(batch.counts, dtype=np.int64)
        self.positions = ends[self.rows]
        self.epochs = self.blocks_to_zero = self.rows[:0]
        self.started = False
        self.ticket: Ticket | None = None
        self.host: PinnedStepBuffer | None = None
        self.error: Exception | None = None
        self.failures: dict[int, Exception] = {}

    @property
    def is_decode(self) -> bool:
        return self.batch.num_decodes == len(self.batch)


class ModelRunner:
    """Runs steps in the order in which they were launched.

    On a CPU, ``launch`` only queues; ``collect`` runs the oldest step, changes of slots and
    blocks included.

    On a device that runs ahead, ``launch`` queues the step's work on the device's stream,
    behind the step before it, whose tokens it finds there. A step with a row that needs the
    host (penalties, log-probabilities, rules) is run by ``collect``, and a step behind it is
    started only then. What the host learns late it files by the epoch of the slot, so that a
    token of a request that is gone does not become its successor's.

    Args:
        stream: where work is queued; None is in step with the caller.
        capturer: makes graphs of decode steps; None keeps the state between steps on the
            host, which a stream that runs ahead cannot do with.
        graph_sizes: batch sizes that get a graph.
        races: tokens are drawn by the op set's sampler even where the host draws them.

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
        stream: Stream | None = None,
        capturer: GraphCapturer | None = None,
        graph_sizes: tuple[int, ...] = (),
        races: bool = False,
    ) -> None:
        self.info = info
        self.in_process = InProcess()
        self.dtype = decoder.embedding.dtype
        self.device = decoder.embedding.device
        self._stream = SyncStream() if stream is None else stream
        if self._stream.is_async and capturer is None:
            raise ValueError("a stream that runs ahead needs a recorder")
        with self._stream.context():
            self._state: _Device | None = self._make_state(
                decoder, cache, capturer, graph_sizes, races or capturer is not None
            )
        self._steps: deque[_Step] = deque()
        self._num_threads = num_threads
        self._thread: int | None = None

    def _make_state(
        self,
        decoder: Decoder,
        cache: KVCache,
        capturer: GraphCapturer | None,
        graph_sizes: tuple[int, ...],
        races: bool,
    ) -> _Device:
        info = self.info
        static = capturer is not None
        inputs = InputBatch(
            info.max_num_seqs, info.max_model_len, info.block_size, tracks_table=static
        )
        ops = decoder.ops if races else None
        sampler = Sampler(info.max_num_seqs, info.vocab_size, inputs, self.device, ops)
        if capturer is None:
            return _Device(decoder, cache, inputs, sampler, None)
        decode = DecodeRunner(
            decoder,
            cache,
            max_num_seqs=info.max_num_seqs,
            max_len=info.max_model_len,
            block_size=info.block_size,
            steps_in_flight=info.pipeline_depth,
            capturer=capturer,
            sizes=graph_sizes,
        )
        return _Device(decoder, cache, inputs, sampler, decode)

    @property
    def graphs(self) -> StepGraphs | None:
        """The graphs of decode steps; None where there are none, and once it is closed."""
        if self._state is None or self._state.decode is None:
            return None
        return self._state.decode.graphs

    def capture_graphs(self, progress: Callable[[int, int], None] = lambda *_: None) -> None:
        """Captures the graph of every bucket, before the first step.

        Args:
            progress: called with (graphs captured, graphs in all).
        """
        graphs = self.graphs
        if graphs is not None:
            with torch.inference_mode(), self._stream.context():
                graphs.capture_all(progress)
            self._stream.synchronize()

    # --- the executor ------------------------------------------------------------------

    def launch(self, batch: StepBatch) -> None:
        self._open()
        self._steps.append(_Step(batch))
        if self._stream.is_async:
            self._start_next()

    def collect(self) -> StepResult:
        self._open()
        if not self._steps:
            raise RuntimeError("no step is in flight")
        self._enter_thread()
        step = self._steps.popleft()
        if step.error is not None:
            clear_frames(step.error)
            raise step.error
        try:
            with torch.inference_mode(), self._stream.context():
                if not step.started:
                    self._apply(self._open(), step)
                result = self._finish(self._open(), step)
        except (RuntimeError, MemoryError) as error:
            # Whoever keeps the exception would keep the model, which its frames refer to.
            clear_frames(error)
            if is_out_of_memory(error):
                raise _memory_error(error, step) from error
            raise
        if self._stream.is_async:
            self._start_next()
        return result

    def discard(self) -> None:
        if self._steps and self._state is not None:
            self._stream.synchronize()
        self._steps.clear()

    def close(self) -> None:
        if self._state is None:
            return
        # Not waited for here: a device that hangs would never be done.
        self._steps.clear()
        graphs, self._state = self.graphs, None
        if graphs is not None:
            graphs.close()
        with contextlib.suppress(RuntimeError), self._stream.context():
            release(self.device)

    def _open(self) -> _Device:
        if self._state is None:
            raise RuntimeError("the model runner is closed")
        return self._state

    def _enter_thread(self) -> None:
        """The thread count belongs to a thread, and the engine may start its own late."""
        thread = get_ident()
        if self._num_threads is not None and thread != self._thread:
            set_thread_count(self._num_threads)
        self._thread = thread

    # --- starting a step ---------------------------------------------------------------

    def _start_next(self) -> None:
        """Starts what can run now. A step that needs the host, or that failed, holds up those
        behind it until it is collected."""
        for step in self._steps:
            if not step.started:
                self._start(step)
            if step.ticket is None and len(step.batch):
                return

    def _start(self, step: _Step) -> None:
        """Takes over what changed, and queues the step if it can run ahead. An error is
        raised when the step is collected: the one before it may have gone well."""
        state = self._open()
        step.started = True
        try:
            with torch.inference_mode(), self._stream.context():
                self._apply(state, step)
                if not state.sampler.needs_eager_sampler(step.req_indices):
                    self._queue(state, step)
        except Exception as error:
            step.error = _memory_error(error, step) if is_out_of_memory(error) else error

    def _apply(self, state: _Device, step: _Step) -> None:
        batch = step.batch
        step.blocks_to_zero = state.inputs.apply(batch)
        for req_index in batch.released:
            state.sampler.release(req_index)
        for assignment in batch.assignments:
            state.sampler.assign(self.in_process.with_processors(assignment))
        if failures := state.sampler.failures:
            # Kept with the step: its slots may have other requests when it is collected.
            step.failures = {
                row: failures[req_index]
                for row, req_index in enumerate(batch.req_indices)
                if req_index in failures
            }

    def _queue(self, state: _Device, step: _Step) -> None:
        """A step that needs nothing of the host until its tokens are read."""
        batch, decode = step.batch, state.decode
        assert decode is not None
        if not len(batch):
            return
        host, prepare = self._stage(state, decode, step)
        req_indices = np.array(batch.req_indices[: batch.num_decodes], dtype=np.int64)
        arrays = None if step.is_decode else state.inputs.prepare(batch)
        # From here on only the device knows these tokens.
        state.inputs.write_sampled(step.req_indices, step.positions, UNKNOWN)

        def work() -> None:
            prepare()
            if arrays is None:
                decode.decode(host, len(batch))
            else:
                decode.mixed(host, arrays, req_indices)

        step.host, step.epochs = host, state.inputs.epochs[step.req_indices]
        step.ticket = self._stream.submit(work)

    def _stage(
        self, state: _Device, decode: DecodeRunner, step: _Step
    ) -> tuple[PinnedStepBuffer, Callable[[], None]]:
        """Writes what the device has to know. Returns that, and what comes before the step."""
        inputs, host = state.inputs, decode.step_buffers.next()
        before = step.positions - 1
        host.set_rows(step.req_indices, inputs.token_ids[step.req_indices, before], before)
        host.set_sampling(state.sampler.state)
        cells, blocks = inputs.take_table_changes()
        fits = len(cells) <= self.info.max_num_seqs
        host.set_table_changes(cells if fits else cells[:0], blocks if fits else blocks[:0])

        def prepare() -> None:
            self._clear(state, step)
            if not fits:
                decode.change_table(cells, blocks)

        return host, prepare

    def _clear(self, state: _Device, step: _Step) -> None:
        if len(step.blocks_to_zero) and state.decoder.needs_zeroed_blocks:
            state.cache.clear(copy_to_device(step.blocks_to_zero, self.device))

    # --- finishing a step --------------------------------------------------------------

    def _finish(self, state: _Device, step: _Step) -> StepResult:
        result = StepResult(step.batch.step, [], [int(one) for one in step.batch.samples])
        if not len(step.batch):
            return result
        output = self._run(state, step) if step.ticket is None else self._read_tokens(step)
        self._write_back_tokens(state, step, output.token_ids)
        row_of = step.rows.tolist()
        if output.logprobs:
            result.logprobs = {row_of[i]: (value,) for i, value in output.logprobs.items()}
        if output.errors or step.failures:
            errors = {row_of[i]: error for i, error in output.errors.items()} | step.failures
            self.in_process.errors[result.step] = errors
            for row, error in errors.items():
                result.errors[row] = RowError.of(error)
                result.counts[row] = 0
                clear_frames(error)
        tokens = zip(row_of, output.token_ids.tolist(), strict=True)
        result.token_ids = [token for row, token in tokens if row not in result.errors]
        return result

    def _write_back_tokens(self, state: _Device, step: _Step, tokens: np.ndarray) -> None:
        """Keeps the tokens for later steps. One that failed becomes a token that the embedding
        has: what is computed from it is void."""
        tokens, req_indices, positions = np.maximum(tokens, 0), step.req_indices, step.positions
        if step.ticket is not None:
            same = state.inputs.epochs[req_indices] == step.epochs
            tokens, req_indices, positions = tokens[same], req_indices[same], positions[same]
        state.inputs.write_sampled(req_indices, positions, tokens)

    def _read_tokens(self, step: _Step) -> SampleOutput:
        """The tokens of a step that ran ahead."""
        assert step.ticket is not None
        assert step.host is not None
        step.ticket.synchronize()
        tokens = step.host.tokens[: len(step.rows)].numpy().copy()
        broken = np.flatnonzero(tokens < 0).tolist()
        return SampleOutput(tokens, errors={row: ValueError(NOT_FINITE) for row in broken})

    def _run(self, state: _Device, step: _Step) -> SampleOutput:
        """A step in step with the host."""
        if state.decode is None:
            self._clear(state, step)
            arrays = state.inputs.prepare(step.batch)
            inputs = ModelInputs.from_arrays(arrays, self.device)
            hidden = state.decoder.forward(inputs, state.cache)
            return self._sample(state, step, state.decoder.logits(hidden))
        return self._run_on_device(state, state.decode, step)

    def _run_on_device(self, state: _Device, decode: DecodeRunner, step: _Step) -> SampleOutput:
        batch = step.batch
        host, prepare = self._stage(state, decode, step)
        outputs: list[SampleOutput] = []

        def work() -> None:
            prepare()
            if step.is_decode:
                logits = decode.decode_logits(host, len(batch))
            else:
                req_indices = np.array(batch.req_indices[: batch.num_decodes], dtype=np.int64)
                logits = decode.mixed_logits(host, state.inputs.prepare(batch), req_indices)
            outputs.append(self._sample(state, step, logits))

        self._stream.submit(work).synchronize()
        return outputs[0]

    def _sample(self, state: _Device, step: _Step, logits: Tensor) -> SampleOutput:
        if not len(step.rows):
            return SampleOutput(step.rows)
        return state.sampler.sample(logits, step.req_indices, step.positions)


def _memory_error(error: Exception, step: _Step) -> StepOutOfMemoryError:
    told = StepOutOfMemoryError(f"step {step.batch.step}, {step.batch.num_tokens} tokens: {error}")
    told.__cause__ = error
    return told
