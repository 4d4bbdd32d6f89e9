"""HostSteps: steps whose state between them is the host's."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from asyncllm.core.executor import ExecutorInfo
from asyncllm.errors import EngineError
from asyncllm.gpu.graph.recorded_step import (
    NO_TOKENS,
    RecordedStep,
    RowOrder,
    StepOutput,
    record_step,
)
from asyncllm.gpu.graph.step_queue import StepQueue
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.sample.prompt_logprobs import prompt_tokens
from asyncllm.gpu.sample.sampler import SampleOutput, greedy_output
from asyncllm.gpu.step_runner import StepRunner


class HostSteps(StepRunner):
    """Runs steps synchronously: as one native program where they can be recorded, else op by op.

    Attributes:
        recorded, queue: the program, and the steps of it that run ahead; None where steps cannot be
            recorded.
    """

    recorded: RecordedStep | None = None
    queue: StepQueue | None = None

    def record(self, info: ExecutorInfo) -> str:
        """Records the step where all of it can be; else its ops are called one by one. Returns
        which of them, in words.

        Raises:
            EngineError: there is no memory for the largest step.
        """
        self.recorded = self.queue = None
        limits = {"max_tokens": info.max_num_batched_tokens, "max_rows": info.max_num_seqs}
        try:
            found = record_step(self.decoder, self.cache, self.inputs, **limits)
            if isinstance(found, str):
                return f"ops called one by one: {found}"
            found.load()
        except MemoryError as error:
            raise EngineError(
                f"max_num_batched_tokens={info.max_num_batched_tokens}: the activations of such a "
                "step cannot be allocated, lower it or max_num_seqs"
            ) from error
        self.recorded = found
        self.queue = StepQueue(found, self.inputs, self.sampler)
        return f"one native program of {len(found.program.names)} ops"

    def run(self, step: LaunchedStep) -> SampleOutput:
        """Runs a step, or waits for one in the queue."""
        queued, count = step.queued, len(step.rows)
        if queued is None:
            order = self._order(step)
            found = self.forward(step, order)
        else:
            order, found = queued.order, queued.wait()
        places = np.arange(count) if order.places is None else order.places
        drawn = order.num_logits if queued is None or not queued.samples else 0
        output = SampleOutput(np.empty(count, dtype=np.int64))
        if drawn:
            chosen = places[:drawn]
            output.take_in(chosen, self._draw(step, found.logits, chosen))
        if drawn < count:
            output.take_in(places[drawn:], greedy_output(found.tokens))
        if step.batch.prompt_logprobs:
            step.prompt_tokens = prompt_tokens(step.batch, self.inputs)
            self.gather_prompt_logprobs(step, found.hidden[count:], output)
        return output

    def _order(self, step: LaunchedStep) -> RowOrder:
        """The order of its sampled rows."""
        needed = self.sampler.needing_logits(step.req_indices, step.masked_places)
        if self.recorded is not None:
            return self.recorded.order(needed)
        some = self.decoder.argmax is None or needed.any()
        return RowOrder(None, len(needed) if some else 0)

    def _draw(self, step: LaunchedStep, logits: Tensor, places: np.ndarray) -> SampleOutput:
        """Samples the rows at ``places``, whose logits these are."""
        masks = step.masks_by_place()
        if masks:
            rows = enumerate(places.tolist())
            masks = {row: masks[place] for row, place in rows if place in masks}
        at = step.req_indices[places], step.positions[places]
        return self.sampler.sample(logits, self.sampler.host_step(*at, masks))

    def forward(self, step: LaunchedStep, order: RowOrder) -> StepOutput:
        """The model's part of a step, between the copies of its states."""
        self.cache.clear(step.blocks_to_zero)
        self.cache.load_states(step.batch.state_loads)
        output = self._compute(step, order)
        self.cache.save_states(step.batch.state_saves)
        return output

    def _compute(self, step: LaunchedStep, order: RowOrder) -> StepOutput:
        if self.recorded is not None:
            return self.recorded.run(step.batch, step.rows, order)
        hidden = self.decoder.forward(self.inputs.prepare(step.batch, self.device), self.cache)
        count, tokens = len(step.rows), NO_TOKENS
        if order.num_logits < count:
            assert self.decoder.argmax is not None
            tokens = self.decoder.argmax(hidden[:count])
        return StepOutput(self.decoder.logits(hidden[: order.num_logits]), hidden, tokens)
