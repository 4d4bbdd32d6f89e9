"""DeviceSteps: steps whose state between them is on the device."""

from __future__ import annotations

import numpy as np

from asyncllm.gpu.batch.input_batch import PLACEHOLDER_TOKEN, InputBatch
from asyncllm.gpu.batch.sampling_inputs import Stages
from asyncllm.gpu.batch.step_buffers import PinnedStepBuffer
from asyncllm.gpu.batch.step_inputs import ModelInputs
from asyncllm.gpu.graph.decode_runner import DecodeRunner
from asyncllm.gpu.graph.streams import Stream
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.models.language_model import LanguageModel
from asyncllm.gpu.sample.host_rows import HostRows
from asyncllm.gpu.sample.prompt_logprobs import prompt_tokens
from asyncllm.gpu.sample.sampler import SampleOutput, Sampler
from asyncllm.gpu.step_runner import StepRunner


class DeviceSteps(StepRunner):
    """Queues steps on a stream, each behind the one before, whose tokens it finds on the device.

    Attributes:
        decode: the state between steps.
    """

    def __init__(
        self,
        decoder: LanguageModel,
        cache: KVCache,
        inputs: InputBatch,
        sampler: Sampler,
        decode: DecodeRunner,
        stream: Stream,
    ) -> None:
        super().__init__(decoder, cache, inputs, sampler)
        self.decode, self.stream = decode, stream

    def queue_step(self, step: LaunchedStep) -> None:
        """Queues the step: whole, or up to its logits if it awaits masks."""
        if not len(step.batch):
            return
        host, inputs = self._stage(step)
        step.host, host.host_rows, host.prompt_hidden = host, None, None
        places = self.sampler.state.needing_host(step.req_indices)
        if len(places):
            at = step.req_indices[places], step.positions[places]
            step.host_rows = host.host_rows = HostRows(self.sampler, places, *at)
        if step.batch.prompt_logprobs:
            step.prompt_tokens = prompt_tokens(step.batch, self.inputs)
        # From here on only the device knows these tokens.
        self.inputs.token_ids[step.req_indices, step.positions] = PLACEHOLDER_TOKEN
        host.stages = Stages(int(np.bitwise_or.reduce(step.row_stages, initial=0)))
        self.decode.prepare_host(host)
        if not step.batch.masked_rows:
            self.decode.run(host, len(step.rows), inputs)
            step.event = self.stream.record()
            return
        self.decode.forward(host, len(step.rows), inputs)
        if step.masks is not None:
            self.sample_ahead(step)

    def sample_ahead(self, step: LaunchedStep) -> None:
        """Queues the sampling of a step whose masks have come."""
        decode, host = self.decode, step.host
        assert host is not None
        host.stages |= Stages.MASKS
        decode.prepare_host(host)
        assert host.masks is not None
        errors = host.masks.set(step.masks_by_place())
        step.failures |= {int(step.rows[place]): error for place, error in errors.items()}
        decode.sample(host, len(step.rows))
        step.event = self.stream.record()

    def run(self, step: LaunchedStep) -> SampleOutput:
        """Waits for a step's tokens, and draws those of its host rows. Queues it first unless it
        runs ahead."""
        if step.event is None:
            self.queue_step(step)
        assert step.event is not None
        assert step.host is not None
        step.event.synchronize()
        output = step.fused_output(step.host)
        if step.host_rows is not None or step.prompt_tokens:
            with self.stream.aside():
                if step.host_rows is not None:
                    output.take_in(step.host_rows.places, step.host_rows.sample())
                if step.host.prompt_hidden is not None:
                    self.gather_prompt_logprobs(step, step.host.prompt_hidden, output)
            step.host.host_rows = step.host.prompt_hidden = None
        return output

    def _stage(self, step: LaunchedStep) -> tuple[PinnedStepBuffer, tuple[ModelInputs, ...] | None]:
        """Writes the step to a host buffer, and prepares the inputs of a mixed one."""
        decode, inputs, before = self.decode, self.inputs, step.positions - 1
        host = next(decode.host_buffers)
        host.set_rows(step.req_indices, inputs.token_ids[step.req_indices, before], before)
        host.set_sampling(self.sampler.state)
        host.updates = self.sampler.take_updates()
        host.set_table_changes([table.take_changes() for table in inputs.tables])
        host.blocks_to_zero = step.blocks_to_zero
        host.state_loads, host.state_saves = step.batch.state_loads, step.batch.state_saves
        if step.is_decode:
            return host, None
        return host, inputs.prepare(step.batch, self.device, decode.block_tables)
