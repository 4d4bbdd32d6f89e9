"""GraphReplay: decode steps from graphs, on a device that keeps the batch's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from asyncllm.gpu.batch.sampling_inputs import Stages
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer, GraphKey, Part, StepGraphs
from asyncllm.gpu.graph.replay import EagerReplay
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.models.language_model import LanguageModel, StepOutput
from asyncllm.gpu.ops.base import BalancedAttention
from asyncllm.gpu.step_memory import StepMemory

Draw = Callable[[Tensor, Stages], None]
"""Draws the tokens of the first rows, from their logits ``[S, vocab_size]``."""


class GraphReplay:
    """Decode steps are one graph, or two where sampling does more than the draw or waits for masks.
    Mixed steps, those with a prefill, run op by op on the same memory.

    Nothing here waits for the device; the work is queued on the stream that is current.

    Args:
        capturer: makes a graph of a part of a decode step.
        sizes: batch sizes that get one.
        draw: the sampling of a step.

    Attributes:
        graphs: of the parts of decode steps.
    """

    description = "graphs of decode steps"
    finds_largest = False

    def __init__(
        self,
        model: LanguageModel,
        cache: KVCache,
        memory: StepMemory,
        capturer: GraphCapturer,
        sizes: Sequence[int],
        draw: Draw,
    ) -> None:
        self.model, self.cache, self.memory = model, cache, memory
        self.graphs = StepGraphs(self._run, capturer, sizes)
        self._eager = EagerReplay(model, cache, memory)
        self._draw = draw
        self._logits: Tensor | None = None
        most = memory.info.max_model_len
        # Of attention that has a form for skewed batches.
        self._skews = [
            partial(attention.is_skewed, max_len=most, window=kind.window)
            for kind, attention in model.attention.items()
            if isinstance(attention, BalancedAttention) and attention.balances(most, kind.window)
        ]

    @property
    def can_balance(self) -> bool:
        """Whether there may be a batch that takes balanced attention."""
        return bool(self._skews)

    def derives(self, step: LaunchedStep) -> bool:
        return step.is_decode

    def forward(self, step: LaunchedStep) -> StepOutput:
        if not step.is_decode:
            return self._eager.forward(step)
        count, part = len(step.rows), Part.STEP if step.is_whole else Part.FORWARD
        # Not before a step needs them, and not inside a capture.
        logits = self._static_logits() if part is Part.FORWARD else self.memory.sampled[:0]
        self.graphs.run(count, part, balanced=self._is_skewed(step))
        return StepOutput(logits[:count], logits[:0])

    def sample(self, step: LaunchedStep) -> bool:
        if not step.is_decode:
            return False
        if not step.is_whole:
            self.graphs.run(len(step.rows), Part.SAMPLE, step.stages)
        return True

    def close(self) -> None:
        """Drops the graphs, and with them what they run: it refers to the memory of steps, whose
        owner refers to them."""
        self.graphs.close()
        self._draw = _closed

    def run_padding(self, key: GraphKey) -> None:
        """Queues the work of a graph eagerly, on the rows that the memory has."""
        if key.part is not Part.STEP:
            self._static_logits()
        self._run(key)

    def _run(self, key: GraphKey) -> None:
        """The part of a decode step that a graph holds."""
        if key.part is Part.SAMPLE:
            self._draw(self._static_logits()[: key.bucket], key.stages)
            return
        inputs = self.memory.decode_inputs(key.bucket, balanced=key.balanced)
        self.memory.derive_decodes(inputs)
        logits = self.model.forward(inputs, self.cache).logits
        if key.part is Part.STEP:
            self._draw(logits, key.stages)
        else:
            self._static_logits()[: key.bucket].copy_(logits)

    def _static_logits(self) -> Tensor:
        """``[N, vocab_size]``, between the two halves of a step."""
        if self._logits is None:
            info, dtype = self.memory.info, self.model.embedding.dtype
            shape = info.max_num_seqs, info.vocab_size
            self._logits = torch.zeros(shape, dtype=dtype, device=self.memory.device)
        return self._logits

    def _is_skewed(self, step: LaunchedStep) -> bool:
        """Whether some attention would wait for the longest of the step's sequences."""
        if not self._skews:
            return False
        batch = self.graphs.bucket(len(step.rows)) or len(step.rows)
        return any(is_skewed(batch, step.positions) for is_skewed in self._skews)


def _closed(logits: Tensor, stages: Stages) -> None:
    raise RuntimeError("the graphs are closed")
