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
from asyncllm.core.in_process import UnpicklableObjects
from asyncllm.core.tracebacks import clear_frames
from asyncllm.errors import EngineError
from asyncllm.gpu.execution_report import execution_report
from asyncllm.gpu.graph.captures import exclusive_compilation
from asyncllm.gpu.graph.cuda_graphs import StepGraphs
from asyncllm.gpu.graph.graph_replay import GraphPlan, GraphReplay
from asyncllm.gpu.graph.recorded_step import record_step
from asyncllm.gpu.graph.step_queue import StepQueue
from asyncllm.gpu.graph.streams import DeviceStream
from asyncllm.gpu.graph.warm_up import warm_up
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.memory import is_out_of_memory, release_cached_memory
from asyncllm.gpu.models.language_model import LanguageModel
from asyncllm.gpu.packed.packed_store import PackedStore
from asyncllm.gpu.sample.logprobs import MAX_BUFFERED_LOGPROBS
from asyncllm.gpu.step_runner import StepRunner
from asyncllm.gpu.threads import set_thread_count
from asyncllm.logits_processor import LogitsProcessor


class ModelRunner:
    """Executor of one model. Steps run in the order in which they were launched.

    **On a synchronous stream** (the CPU) ``launch`` only queues; ``collect`` runs the oldest step.
    With a pipeline depth of 2, recorded steps begin early on a thread of the native library. A
    recorded step runs to its end, or only up to its logits if rows await masks or need the host. A
    step that awaits masks begins early at pipeline depth 1 too, while the masks are made.

    **On an asynchronous stream** ``launch`` queues the step's work on the device, behind the
    previous step, whose sampled tokens it reads there. If a step awaits masks, only its forward
    pass is queued; ``sample`` queues the rest, and then the steps behind it. Rows that need the
    host (logits processors, bad words of several tokens) are sampled by ``collect``, from copies of
    their inputs. Until then the scheduler does not continue these rows.

    A sampled token is written back only if the request index still has the step's epoch, so that a
    late token of a finished request cannot reach the next request at that index.

    Args:
        stream: stream on which work is queued; None is synchronous.
        graphs: CUDA graphs of steps, which keep the batch's state on the device; None keeps it on
            the host. An asynchronous stream needs graphs.
        num_logprobs: number of log-probabilities per token for which a step has buffers.
        logits_processors: the engine's processors.
        packed: store of the model's packed weights, or the reason why it has none.

    Attributes:
        info: limits for the scheduler.
        dtype, device: dtype and device of weights and KV.
        execution: phrase for the log that says how the forward pass runs.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: KVCache,
        info: ExecutorInfo,
        *,
        num_threads: int | None = None,
        stream: DeviceStream | None = None,
        graphs: GraphPlan | None = None,
        num_logprobs: int = 20,
        logits_processors: Sequence[LogitsProcessor] = (),
        packed: PackedStore | str = "",
    ) -> None:
        self._packed_store = packed
        self.info = info
        self.in_process = UnpicklableObjects(logits_processors=logits_processors)
        self.dtype = model.embedding.dtype
        self.device = model.embedding.device
        self._stream = DeviceStream() if stream is None else stream
        with self._stream.context(), self._explain_memory_error():
            runner = StepRunner(
                model, cache, info, self._stream, self.in_process,
                on_device=graphs is not None, num_logprobs=min(num_logprobs, MAX_BUFFERED_LOGPROBS),
                padded_tokens=max(graphs.token_counts, default=0) if graphs else 0,
            )  # fmt: skip
        if self._stream.is_async:
            held = SamplingLimits(runner.sampler.state.num_logprobs)
            self.info = replace(info, sampling_limits=held)
        self._runner: StepRunner | None = runner
        self._launched_steps: deque[LaunchedStep] = deque()
        self._num_threads = num_threads
        self._thread: int | None = None
        if graphs is not None:
            runner.forward_pass = GraphReplay(
                model, cache, runner.memory, graphs, runner.sample_logits
            )
        self.execution = runner.forward_pass.description
        if graphs is None:
            with self._explain_memory_error():
                self._record_forward()

    def _record_forward(self) -> None:
        """Records the forward pass for replay, if every op can be recorded."""
        runner = self._require_runner()
        memory = runner.memory
        found = record_step(runner.model, runner.cache, runner.input_batch, memory.buffer)
        if isinstance(found, str):
            self.execution = f"{runner.forward_pass.description}: {found}"
            return
        found.make_program()
        runner.forward_pass, self.execution = found, found.description
        runner.stream = self._stream = StepQueue(found, memory, runner.sampler)

    @contextlib.contextmanager
    def _explain_memory_error(self) -> Iterator[None]:
        """Context manager that raises EngineError if the largest step does not fit into memory."""
        try:
            yield
        except MemoryError as error:
            raise EngineError(
                f"max_num_batched_tokens={self.info.max_num_batched_tokens}: the activations of "
                "such a step cannot be allocated, lower it or max_num_seqs"
            ) from error

    @property
    def graphs(self) -> StepGraphs | None:
        """CUDA graphs of decode steps; None if there are none, and after ``close``."""
        replay = None if self._runner is None else self._runner.forward_pass
        return replay.graphs if isinstance(replay, GraphReplay) else None

    def warm_up(self, progress: Callable[[int, int], None] = lambda *_: None) -> None:
        """Compiles the kernels of all steps, before the first one.

        Args:
            progress: called with (steps run, steps in all).
        """
        runner = self._require_runner()
        if isinstance(runner.forward_pass, GraphReplay):
            with exclusive_compilation(), self._synchronize_after():
                warm_up(runner, runner.forward_pass, progress)

    def capture_graphs(self, progress: Callable[[int, int], None] = lambda *_: None) -> None:
        """Captures a graph for every batch size and token count, before the first step.

        Args:
            progress: called with (graphs captured, graphs in all).
        """
        replay = self._require_runner().forward_pass
        if isinstance(replay, GraphReplay):
            with self._synchronize_after():
                replay.capture_all(progress)

    @contextlib.contextmanager
    def _synchronize_after(self) -> Iterator[None]:
        """Context manager that queues work on the stream and waits for it on exit."""
        with torch.inference_mode(), self._stream.context():
            yield
        self._stream.synchronize()

    def report(self) -> ExecutionReport:
        """Makes the ExecutionReport; no step may be in flight."""
        self._prepare_current_thread()
        runner = self._require_runner()
        packed = (
            self._packed_store if isinstance(self._packed_store, str) else self._packed_store.state
        )
        return execution_report(runner.model, runner.cache, self.info, self._num_threads, packed)

    def set_token_budget(self, max_num_batched_tokens: int) -> None:
        """Sets the token budget, before the first step."""
        self.info = replace(self.info, max_num_batched_tokens=max_num_batched_tokens)
        runner = self._require_runner()
        if isinstance(self._stream, StepQueue):
            with self._explain_memory_error():
                runner.allocate_step_memory(self.info)
                self._record_forward()

    @property
    def can_schedule_async(self) -> bool:
        """Whether recorded steps can run on the native library's thread."""
        return isinstance(self._stream, StepQueue)

    def enable_async_scheduling(self, min_step_tokens: int) -> None:
        """Sets the pipeline depth to 2, before the first step.

        Steps of at least ``min_step_tokens`` tokens are then queued behind the running step.
        """
        assert isinstance(self._stream, StepQueue)
        self.info = replace(self.info, pipeline_depth=2)
        self._stream.min_step_tokens = min_step_tokens

    # --- the executor ------------------------------------------------------------------

    def launch(self, batch: StepBatch) -> None:
        self._require_runner()
        self._launched_steps.append(LaunchedStep(batch))
        self._begin_steps()

    def sample(self, masks: GrammarMask) -> None:
        runner = self._require_runner()
        step = next((step for step in self._launched_steps if step.awaits_masks), None)
        if step is None or step.batch.step != masks.step:
            expected = "none" if step is None else f"those of step {step.batch.step}"
            raise RuntimeError(f"masks of step {masks.step} came; expected {expected}")
        if not set(masks.rows) <= set(step.batch.masked_rows):
            raise RuntimeError(
                f"masks of rows {masks.rows} came; expected some of {step.batch.masked_rows}"
            )
        step.masks = masks
        if not step.has_begun:
            return
        with self._defer_errors(step):
            if self._stream.is_async:
                runner.sample(step)
            else:
                self._stream.sample(step, is_early=True)
        self._begin_steps()

    def collect(self) -> StepResult:
        self._require_runner()
        if not self._launched_steps:
            raise RuntimeError("no step is in flight")
        if self._launched_steps[0].awaits_masks and self._launched_steps[0].error is None:
            raise RuntimeError(f"step {self._launched_steps[0].batch.step} awaits its masks")
        self._prepare_current_thread()
        step = self._launched_steps.popleft()
        if step.error is not None:
            clear_frames(step.error)
            raise step.error
        try:
            with torch.inference_mode(), self._stream.context():
                result = self._finish_step(step)
        except (RuntimeError, MemoryError) as error:
            # Clear the traceback: the engine keeps the exception, and the traceback's frames refer
            # to the model.
            clear_frames(error)
            if is_out_of_memory(error):
                raise step.as_out_of_memory_error(error) from error
            raise
        self._begin_steps()
        return result

    def discard(self) -> None:
        if self._launched_steps and self._runner is not None:
            self._stream.synchronize()
        self._launched_steps.clear()

    def close(self) -> None:
        if self._runner is None:
            return
        if isinstance(self._packed_store, PackedStore):
            self._packed_store.close()
        # Do not wait for a GPU: a device that hangs would never finish.
        if not self._stream.is_async:
            self._stream.synchronize()
        self._launched_steps.clear()
        if isinstance(self._runner.forward_pass, GraphReplay):
            self._runner.forward_pass.close()
        # Drop the model first: only the memory of tensors that nothing refers to is released.
        self._runner = None
        if not self._stream.is_async:
            # Drop the step queue, which refers to the model.
            self._stream = DeviceStream()
        with contextlib.suppress(RuntimeError), self._stream.context():
            if release_cached_memory(self.device):
                self._stream.give_back()

    def _require_runner(self) -> StepRunner:
        if self._runner is None:
            raise RuntimeError("the model runner is closed")
        return self._runner

    def _prepare_current_thread(self) -> None:
        """Sets the calling thread's time slice and number of op threads, before its first step."""
        thread = get_ident()
        if thread == self._thread:
            return
        self._thread = thread
        if self._num_threads is not None:
            set_thread_count(self._num_threads)
        self._require_runner().model.ops.prepare_current_thread()

    # --- a step ------------------------------------------------------------------------

    def _begin_steps(self) -> None:
        """Begins launched steps, in order, as far as the stream can run them now.

        A step behind a failed step, or behind one that is sampled on the host, waits. ``collect``
        raises a step's error when its turn comes, because earlier steps may have succeeded.
        """
        runner = self._require_runner()
        for number, step in enumerate(self._launched_steps):
            if not step.has_begun:
                if not self._stream.can_begin_early(step, islice(self._launched_steps, number)):
                    return
                step.has_begun = True
                with self._defer_errors(step):
                    runner.begin(step, is_early=True)
            if not step.is_sampling_queued:
                return

    @contextlib.contextmanager
    def _defer_errors(self, step: LaunchedStep) -> Iterator[None]:
        """Context manager that stores an error in its step, for ``collect`` to raise."""
        try:
            with torch.inference_mode(), self._stream.context():
                yield
        except Exception as error:
            step.error = step.as_out_of_memory_error(error) if is_out_of_memory(error) else error

    def _finish_step(self, step: LaunchedStep) -> StepResult:
        """Waits for the step's tokens and writes them to the batch, for later steps.

        Runs the step first if it has not begun.
        """
        runner = self._require_runner()
        if not step.has_begun:
            runner.begin(step, is_early=False)
        result = StepResult(step.batch.step, [], [int(one) for one in step.batch.samples])
        if not len(step.batch):
            return result
        output = runner.finish(step)
        runner.store_tokens(step, output.token_ids)
        row_of, tokens = step.rows.tolist(), output.token_ids
        if step.is_reordered:
            tokens = tokens[np.argsort(step.rows)]
        result.token_ids = tokens.tolist()
        if output.logprobs:
            result.logprobs = {row_of[i]: (value,) for i, value in output.logprobs.items()}
        if output.errors or step.failures:
            errors = {row_of[i]: error for i, error in output.errors.items()} | step.failures
            self.in_process.errors[result.step] = errors
            for row, error in errors.items():
                result.errors[row] = RowError.of(error)
                result.counts[row] = 0
                clear_frames(error)
            found = zip(sorted(row_of), result.token_ids, strict=True)
            result.token_ids = [token for row, token in found if row not in errors]
        if output.prompt_logprobs:
            found = output.prompt_logprobs.items()
            result.prompt_logprobs = {row: one for row, one in found if row not in result.errors}
        return result
