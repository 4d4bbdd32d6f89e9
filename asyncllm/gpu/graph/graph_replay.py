"""GraphReplay: steps replayed from CUDA graphs, with the batch's state on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from asyncllm.gpu.batch.sampling_inputs import SamplingStages
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer, GraphKey, StepGraphs, StepPart
from asyncllm.gpu.graph.forward_pass import ForwardPass
from asyncllm.gpu.graph.piecewise_graphs import PiecewiseGraphs
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.models.language_model import LanguageModel, StepOutput
from asyncllm.gpu.ops.base import LoadBalancingAttention
from asyncllm.gpu.step_memory import StepMemory
from asyncllm.logger import get_logger

logger = get_logger("asyncllm")

SampleFunction = Callable[[Tensor, SamplingStages], None]
"""Function that samples the tokens of the first S sampled rows from their logits ``[S,
vocab_size]``."""


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """The CUDA graphs to capture.

    Attributes:
        capturer: captures the graphs.
        batch_sizes: batch sizes of decode steps that get a graph.
        token_counts: token counts of mixed steps that get graphs.
    """

    capturer: GraphCapturer
    batch_sizes: Sequence[int]
    token_counts: Sequence[int] = ()


class GraphReplay(ForwardPass):
    """Runs steps from CUDA graphs.

    A decode step is one graph. It is two graphs if logits are processed before sampling, or if the
    step waits for masks. A mixed step, which has a prefill, runs in PiecewiseGraphs, or op by op on
    the same StepMemory.

    No method waits for the device; all work is queued on the current stream.

    Args:
        graphs: the graphs to capture.
        sample_logits: samples tokens from a step's logits.

    Attributes:
        graphs: graphs of decode steps.
        piecewise: graphs of mixed steps; None if these run op by op.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: KVCache,
        memory: StepMemory,
        graphs: GraphPlan,
        sample_logits: SampleFunction,
    ) -> None:
        super().__init__(model, cache, memory)
        self.graphs = StepGraphs(self._run_step_part, graphs.capturer, graphs.batch_sizes)
        self.piecewise: PiecewiseGraphs | None = None
        if graphs.token_counts and isinstance(model, Decoder):
            self.piecewise = PiecewiseGraphs(
                model, cache, memory, graphs.capturer, graphs.token_counts
            )
        self._sample_logits = sample_logits
        self._logits: Tensor | None = None
        mixed = "op by op" if self.piecewise is None else "in segments"
        self.description = f"graphs of decode steps, mixed steps {mixed}"
        most = memory.info.max_model_len
        # Only attentions with a balanced plan test batches for skewed lengths.
        self._skew_tests = [
            partial(attention.has_skewed_lengths, max_len=most, window=kind.window)
            for kind, attention in model.attention.items()
            if isinstance(attention, LoadBalancingAttention)
            and attention.may_have_skewed_lengths(most, kind.window)
        ]

    @property
    def has_balanced_attention(self) -> bool:
        """Whether decode steps may have balanced splits, see StepInputs."""
        return bool(self._skew_tests)

    def capture_all(self, progress: Callable[[int, int], None]) -> None:
        """Captures every bucket of whole decode steps and of mixed steps, before the first step.

        Args:
            progress: called with (graphs captured, graphs in all).
        """
        kinds = [(self.graphs, StepPart.STEP)]
        if self.piecewise is not None:
            kinds.append((self.piecewise.graphs, StepPart.ALL_BUT_LAST_LAYER))
        total = sum(len(graphs.buckets) for graphs, _ in kinds)
        progress(0, total)
        captures = chain.from_iterable(graphs.capture_all(part) for graphs, part in kinds)
        for done, _ in enumerate(captures, 1):
            progress(done, total)
        made = [one for graphs, _ in kinds for one in graphs.capture_stats]
        logger.info(
            "captured %d of %d CUDA graphs in %.2f s, %.1f MiB",
            len(made), total, sum(one.seconds for one in made),
            sum(one.num_bytes for one in made) / 2**20,
        )  # fmt: skip

    def prepare(self, step: LaunchedStep) -> bool:
        if step.is_decode:
            step.bucket = self.graphs.bucket(len(step.rows))
            # Choose the balanced plan if the rows' lengths differ too much for equal splits.
            batch = step.bucket or len(step.rows)
            step.has_balanced_splits = any(
                has_skewed_lengths(batch, step.positions) for has_skewed_lengths in self._skew_tests
            )
        elif self.piecewise is not None:
            step.bucket = self.piecewise.graphs.bucket(step.batch.num_tokens)
        return step.is_decode

    def forward(self, step: LaunchedStep) -> StepOutput:
        if not step.is_decode:
            inputs = step.inputs
            if step.bucket is None or self.piecewise is None or inputs is None:
                return super().forward(step)
            self.memory.insert_sampled_tokens(inputs)
            return self.piecewise.forward(inputs, step.bucket)
        count = len(step.rows)
        part = StepPart.STEP if step.needs_only_plain_sampling else StepPart.FORWARD
        # The static logits are allocated when a step first needs them, and never inside a capture.
        logits = (
            self._static_logits() if part is StepPart.FORWARD else self.memory.sampled_tokens[:0]
        )
        self.graphs.run(
            GraphKey(step.bucket or count, part, has_balanced_splits=step.has_balanced_splits)
        )
        return StepOutput(logits[:count], logits[:0])

    def sample(self, step: LaunchedStep) -> bool:
        if not step.is_decode:
            return False
        if not step.needs_only_plain_sampling:
            self.graphs.run(GraphKey(step.bucket or len(step.rows), StepPart.SAMPLE, step.stages))
        return True

    def close(self) -> None:
        """Drops the graphs and the functions that they run, which refer to the steps' memory."""
        self.graphs.close()
        if self.piecewise is not None:
            self.piecewise.close()
        del self._sample_logits

    def run_padded_rows(self, key: GraphKey) -> None:
        """Runs the key's StepPart without a graph, on padded rows, to compile its kernels."""
        if key.part is not StepPart.STEP:
            self._static_logits()
        self._run_step_part(key)

    def _run_step_part(self, key: GraphKey) -> None:
        """Runs the part of a decode step that the key names."""
        if key.part is StepPart.SAMPLE:
            self._sample_logits(self._static_logits()[: key.bucket], key.stages)
            return
        inputs = self.memory.decode_step_inputs(
            key.bucket, has_balanced_splits=key.has_balanced_splits
        )
        self.memory.derive_decode_inputs(inputs)
        logits = self.model.forward(inputs, self.cache).logits
        if key.part is StepPart.STEP:
            self._sample_logits(logits, key.stages)
        else:
            self._static_logits()[: key.bucket].copy_(logits)

    def _static_logits(self) -> Tensor:
        """Logits ``[N, vocab_size]`` at a fixed address, which a step's two graphs share."""
        if self._logits is None:
            info, dtype = self.memory.info, self.model.embedding.dtype
            shape = info.max_num_seqs, info.vocab_size
            self._logits = torch.zeros(shape, dtype=dtype, device=self.memory.device)
        return self._logits
