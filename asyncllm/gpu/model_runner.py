"""ModelRunner: the executor of one model."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from threading import get_ident

import numpy as np
import torch

from asyncllm.core.batch import GrammarMask, RowError, StepBatch, StepResult
from asyncllm.core.execution_report import ExecutionReport
from asyncllm.core.executor import ExecutorInfo, SamplingLimits
from asyncllm.core.in_process import InProcess
from asyncllm.core.tracebacks import clear_frames
from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.batch.sampling_inputs import MAX_BIAS, MAX_STOP_IDS
from asyncllm.gpu.device_steps import DeviceSteps
from asyncllm.gpu.execution_report import execution_report
from asyncllm.gpu.graph.compile_turn import compiling_alone
from asyncllm.gpu.graph.cuda_graphs import StepGraphs
from asyncllm.gpu.graph.decode_runner import DecodeRunner
from asyncllm.gpu.graph.streams import Stream, SyncStream
from asyncllm.gpu.graph.warm_up import warm_up
from asyncllm.gpu.host_steps import HostSteps
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.memory import is_out_of_memory, release
from asyncllm.gpu.models.language_model import LanguageModel
from asyncllm.gpu.sample.logprobs import MAX_FUSED
from asyncllm.gpu.sample.sampler import Sampler
from asyncllm.gpu.step_runner import StepRunner
from asyncllm.gpu.threads import set_thread_count
from asyncllm.logits_processor import LogitsProcessor


class ModelRunner:
    """Executor of one model. Steps run in the order in which they were launched.

    **On a synchronous stream** (the CPU) ``launch`` only queues; ``collect`` runs the oldest step.
    With a pipeline depth of 2, recorded steps run ahead on a thread of the native library: whole,
    or up to their logits if their rows ask for more than the draw, or await masks. The forward pass
    of a step that awaits masks runs while these are made, at pipeline depth 1 too.

    **On an asynchronous stream** ``launch`` queues the step's work on the device, behind the step
    before it, whose sampled tokens it reads there. Of a step that awaits masks the forward pass is
    queued; ``sample`` queues the rest, and the steps behind it. Rows that need the host (logits
    processors, rules of no fixed size) are sampled by ``collect``, from copies of all that they
    depend on. A step that continues such a row could start only then, and the scheduler makes none.

    A result is written back only if the request index still has the step's epoch, so that a late
    token of a finished request cannot reach the next one at that index.

    Args:
        stream: where work is queued; None is synchronous.
        decode: the batch's persistent state on the device, which an asynchronous stream needs; None
            keeps it on the host.
        num_logprobs: log-probabilities per token for which a step has buffers.
        logits_processors: of the engine.

    Attributes:
        info: limits for the scheduler.
        dtype, device: of weights and KV.
        execution: how the model's part of a step runs, as a phrase for the log.
    """

    def __init__(
        self,
        decoder: LanguageModel,
        cache: KVCache,
        info: ExecutorInfo,
        *,
        num_threads: int | None = None,
        stream: Stream | None = None,
        decode: DecodeRunner | None = None,
        num_logprobs: int = 20,
        logits_processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.info = info
        self.in_process = InProcess(logits_processors=logits_processors)
        self.dtype = decoder.embedding.dtype
        self.device = decoder.embedding.device
        self._stream = SyncStream() if stream is None else stream
        if self._stream.is_async and decode is None:
            raise ValueError("an asynchronous stream needs a DecodeRunner")
        has_decode = decode is not None
        inputs = InputBatch(
            info.max_num_seqs, info.max_model_len, info.kv_groups, tracks_tables=has_decode
        )
        limits = info.max_num_seqs, info.vocab_size
        if decode is not None:
            num_logprobs = decode.num_logprobs
        with self._stream.context():
            fused = min(num_logprobs, MAX_FUSED)
            sampler = Sampler(*limits, inputs, self.device, decoder.ops, fused, logits_processors)
        if self._stream.is_async:
            held = SamplingLimits(MAX_BIAS, MAX_STOP_IDS, sampler.state.num_logprobs)
            self.info = replace(info, sampling_limits=held)
        self._state: StepRunner | None
        if decode is None:
            self._state = HostSteps(decoder, cache, inputs, sampler)
            self.execution = self._state.record(info)
        else:
            self._state = DeviceSteps(decoder, cache, inputs, sampler, decode, self._stream)
            self.execution = "graphs of decode steps"
        self._steps: deque[LaunchedStep] = deque()
        self._ahead_from = 1
        self._num_threads = num_threads
        self._thread: int | None = None

    @property
    def graphs(self) -> StepGraphs | None:
        """The graphs of decode steps; None where there are none, and once it is closed."""
        return self._state.decode.graphs if isinstance(self._state, DeviceSteps) else None

    def warm_up(self, progress: Callable[[int, int], None] = lambda *_: None) -> None:
        """Compiles the kernels of all steps to come; before the first of them.

        Args:
            progress: called with (steps run, steps in all).
        """
        state = self._open()
        if isinstance(state, DeviceSteps):
            with compiling_alone():
                with torch.inference_mode(), self._stream.context():
                    warm_up(state.decode, progress)
                self._stream.synchronize()

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

    def report(self) -> ExecutionReport:
        """See ``ExecutionReport``; no step may be in flight."""
        self._enter_thread()
        state = self._open()
        return execution_report(state.decoder, state.cache, self.info, self._num_threads)

    def set_token_budget(self, max_num_batched_tokens: int) -> None:
        """Sets the token budget, before the first step."""
        self.info = replace(self.info, max_num_batched_tokens=max_num_batched_tokens)
        state = self._open()
        if isinstance(state, HostSteps) and state.recorded is not None:
            self.execution = state.record(self.info)

    @property
    def can_run_ahead(self) -> bool:
        """Whether recorded steps can run on the native library's thread."""
        state = self._open()
        return isinstance(state, HostSteps) and state.queue is not None

    def run_ahead(self, num_tokens: int) -> None:
        """Sets the pipeline depth to 2, before the first step: steps of at least ``num_tokens``
        begin on the native library's thread."""
        self.info = replace(self.info, pipeline_depth=2)
        self._ahead_from = num_tokens

    # --- the executor ------------------------------------------------------------------

    def launch(self, batch: StepBatch) -> None:
        self._open()
        self._steps.append(LaunchedStep(batch))
        if self._stream.is_async:
            self._start_steps()
        elif self._begins_alone(batch):
            self._submit_steps()

    def sample(self, masks: GrammarMask) -> None:
        self._open()
        step = next((step for step in self._steps if step.awaits_masks), None)
        if step is None or step.batch.step != masks.step:
            expected = "none" if step is None else f"those of step {step.batch.step}"
            raise RuntimeError(f"masks of step {masks.step} came; expected {expected}")
        if not set(masks.rows) <= set(step.batch.masked_rows):
            raise RuntimeError(
                f"masks of rows {masks.rows} came; expected some of {step.batch.masked_rows}"
            )
        step.masks = masks
        if step.host is not None:
            with self._errors_kept(step):
                self._device_steps().sample_ahead(step)
            self._start_steps()

    def collect(self) -> StepResult:
        self._open()
        if not self._steps:
            raise RuntimeError("no step is in flight")
        if self._steps[0].awaits_masks and self._steps[0].error is None:
            raise RuntimeError(f"step {self._steps[0].batch.step} awaits its masks")
        self._enter_thread()
        step = self._steps.popleft()
        if step.error is not None:
            clear_frames(step.error)
            raise step.error
        try:
            with torch.inference_mode(), self._stream.context():
                if not step.started:
                    self._apply(step)
                result = self._finish(step)
        except (RuntimeError, MemoryError) as error:
            # The engine keeps the exception, whose frames refer to the model.
            clear_frames(error)
            if is_out_of_memory(error):
                raise step.memory_error(error) from error
            raise
        if self._stream.is_async:
            self._start_steps()
        elif self._steps and self._begins_alone(self._steps[0].batch):
            self._submit_steps()
        return result

    def discard(self) -> None:
        if self._steps and self._state is not None:
            self._stream.synchronize()
            self._drain_queue()
        self._steps.clear()

    def close(self) -> None:
        if self._state is None:
            return
        # Steps are not waited for on a GPU: one that hangs would never finish them.
        self._drain_queue()
        self._steps.clear()
        graphs, self._state = self.graphs, None
        if graphs is not None:
            graphs.close()
        with contextlib.suppress(RuntimeError), self._stream.context():
            release(self.device)

    def _open(self) -> StepRunner:
        if self._state is None:
            raise RuntimeError("the model runner is closed")
        return self._state

    def _device_steps(self) -> DeviceSteps:
        state = self._open()
        assert isinstance(state, DeviceSteps)
        return state

    def _enter_thread(self) -> None:
        """Sets the calling thread's thread count and time slice, both of which are per thread,
        before the first step that it runs."""
        thread = get_ident()
        if thread == self._thread:
            return
        self._thread = thread
        if self._num_threads is not None:
            set_thread_count(self._num_threads)
        self._open().decoder.ops.enter_thread()

    # --- a step ------------------------------------------------------------------------

    def _start_steps(self) -> None:
        """Starts the steps that can run now. One that failed, or that awaits its masks or a token
        that the host samples, holds up those behind it. An error is raised when its own step is
        collected: the steps before that may have gone well."""
        for number, step in enumerate(self._steps):
            if not step.started:
                before = islice(self._steps, number)
                if any(step.awaits_tokens_of(one) for one in before):
                    return
                step.started = True
                with self._errors_kept(step):
                    self._apply(step)
                    self._device_steps().queue_step(step)
            if step.event is None and len(step.batch):
                return

    def _begins_alone(self, batch: StepBatch) -> bool:
        """Whether a step is begun before it is collected: it is long enough, or its masks are made
        meanwhile. One that loads or saves states is not: the host copies them before or behind
        it."""
        if batch.state_loads or batch.state_saves:
            return False
        enough = self.info.pipeline_depth > 1 and batch.num_tokens >= self._ahead_from
        return enough or bool(batch.masked_rows)

    def _submit_steps(self) -> None:
        """Starts the steps that can run now on the native library's thread. One that is sampled
        with the host holds up those behind it."""
        state = self._open()
        queue = state.queue if isinstance(state, HostSteps) else None
        if queue is None:
            return
        for number, step in enumerate(self._steps):
            if not step.started:
                alone = len(step.batch) and self._begins_alone(step.batch)
                if not alone or not queue.takes(step, islice(self._steps, number)):
                    return
                step.started = True
                with self._errors_kept(step):
                    self._apply(step)
                    step.queued = queue.submit(step)
            if step.queued is None or not step.queued.samples:
                return

    def _drain_queue(self) -> None:
        if isinstance(self._state, HostSteps) and self._state.queue is not None:
            self._state.queue.drain()

    @contextlib.contextmanager
    def _errors_kept(self, step: LaunchedStep) -> Iterator[None]:
        """Keeps an error of a step's queued work for ``collect`` to raise."""
        try:
            with torch.inference_mode(), self._stream.context():
                yield
        except Exception as error:
            step.error = step.memory_error(error) if is_out_of_memory(error) else error

    def _apply(self, step: LaunchedStep) -> None:
        """Applies the step's changes of the batch."""
        state, batch = self._open(), step.batch
        unfilled = state.inputs.apply(batch)
        if state.decoder.needs_zeroed_blocks:
            step.blocks_to_zero = unfilled
        for req_index in batch.released:
            state.sampler.release(req_index)
        for assignment in batch.assignments:
            state.sampler.assign(self.in_process.with_processors(assignment))
        if isinstance(state, HostSteps):
            state.sampler.write_updates()
        step.epochs = state.inputs.epochs[step.req_indices]
        step.row_stages = state.sampler.state.stages[step.req_indices]
        step.row_logprobs = state.sampler.state.logprobs[step.req_indices]
        if failures := state.sampler.failures:
            # Kept with the step: its indices may have other requests when it is collected.
            step.failures = {
                row: failures[req_index]
                for row, req_index in enumerate(batch.req_indices)
                if req_index in failures
            }

    def _finish(self, step: LaunchedStep) -> StepResult:
        """Waits for the step's tokens, and keeps them for later steps."""
        result = StepResult(step.batch.step, [], [int(one) for one in step.batch.samples])
        if not len(step.batch):
            return result
        output = self._open().run(step)
        self._write_back(step, output.token_ids)
        row_of, result.token_ids = step.rows.tolist(), output.token_ids.tolist()
        if output.logprobs:
            result.logprobs = {row_of[i]: (value,) for i, value in output.logprobs.items()}
        if output.errors or step.failures:
            errors = {row_of[i]: error for i, error in output.errors.items()} | step.failures
            self.in_process.errors[result.step] = errors
            for row, error in errors.items():
                result.errors[row] = RowError.of(error)
                result.counts[row] = 0
                clear_frames(error)
            tokens = zip(row_of, result.token_ids, strict=True)
            result.token_ids = [token for row, token in tokens if row not in errors]
        if output.prompt_logprobs:
            found = output.prompt_logprobs.items()
            result.prompt_logprobs = {row: one for row, one in found if row not in result.errors}
        return result

    def _write_back(self, step: LaunchedStep, tokens: np.ndarray) -> None:
        """Writes tokens to the batch, where their request still has its index. That of a failed
        row becomes one that the embedding has: what is computed from it is void."""
        inputs = self._open().inputs
        same = inputs.epochs[step.req_indices] == step.epochs
        at = step.req_indices[same], step.positions[same]
        inputs.token_ids[at] = np.maximum(tokens[same], 0)
