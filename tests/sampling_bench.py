"""Bench: the sampling of a StepRunner, on logits that a test gives, without a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from asyncllm.core.batch import GrammarMask, SlotAssignment, StepBatch
from asyncllm.core.executor import ExecutorInfo
from asyncllm.core.in_process import UnpicklableObjects
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.core.token_rules import TokenRules
from asyncllm.gpu.batch.sampling_inputs import RowsToSample
from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.graph.streams import DeviceStream
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.models.language_model import StepOutput
from asyncllm.gpu.sample.sample_output import SampleOutput
from asyncllm.gpu.step_runner import StepRunner
from asyncllm.sampling_params import SamplingParams
from tests.native_library import cpu_ops

CPU = torch.device("cpu")


class GivenLogits:
    """In the place of a model: its logits are the ones that were given last."""

    attention: Mapping[Any, Any] = {}
    states = ()
    argmax_function = None

    def __init__(self, ops: Any) -> None:
        self.ops, self.embedding = ops, torch.empty(0)
        self.given = torch.empty(0)

    def forward(self, step: StepInputs, cache: Any) -> StepOutput:
        assert step.num_logits == len(self.given)
        return StepOutput(self.given, self.given[:, :0])


class NoCache:
    """In the place of a KV cache."""

    def __getattr__(self, name: str) -> Any:
        return lambda copies: None


class WatchedOps:
    """An op set, whose draws are noted.

    Attributes:
        drawn: by request index, the logits that its token was drawn from.
    """

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.host_rows: list[int] = []
        self.drawn: dict[int, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def sample(self, logits: Tensor, scalars: Any, rows: RowsToSample, out: Tensor) -> None:
        req_indices = rows.req_indices
        lines = len(scalars["temperature"])
        # Rows of the host have lines of their own, one for each and one for padding.
        indices = self.host_rows if lines == len(logits) + 1 else req_indices.tolist()
        if len(indices) != len(logits):
            indices = req_indices.tolist()
        for row, index in enumerate(indices):
            if index >= 0:
                self.drawn[index] = logits[row].clone()
        self._ops.sample(logits, scalars, rows, out)


class Bench:
    """Requests at their indices, and steps that sample one token for each of some."""

    def __init__(self, vocab_size: int, req_indices: int = 32, ops: str = "cpu") -> None:
        info = ExecutorInfo(vocab_size, 2, (KVCacheSpec((0,), 16),), 256, req_indices, req_indices)
        self.ops = WatchedOps(cpu_ops(ops))
        self.model: Any = GivenLogits(self.ops)
        cache: Any = NoCache()
        self.runner = StepRunner(
            self.model,
            cache,
            info,
            DeviceStream(),
            UnpicklableObjects(),
            on_device=False,
            num_logprobs=64,
        )
        self.input_batch, self.sampler = self.runner.input_batch, self.runner.sampler
        self.length = dict.fromkeys(range(req_indices), 0)
        self._steps = 0

    def enter(
        self,
        req_index: int,
        prompt: list[int],
        output: list[int],
        eos: tuple[int, ...] = (),
        bad_words: tuple[tuple[int, ...], ...] = (),
        **fields: Any,
    ) -> None:
        params = SamplingParams(**({"seed": 7} | fields)).resolve({}, {}, lambda: 0)
        tokens = prompt + output
        assignment = SlotAssignment(
            req_index,
            f"r{req_index}",
            tokens,
            len(prompt),
            ([1],),
            params,
            eos,
            token_rules=TokenRules.create(
                params.allowed_token_ids, bad_words, self.sampler.state.vocab_size
            ),
        )
        self.assign(assignment)
        self.length[req_index] = len(tokens)

    def assign(self, assignment: SlotAssignment) -> None:
        self.input_batch.apply_step_changes(StepBatch(0, assignments=[assignment]))
        update = self.sampler.add_request(assignment)
        if update is not None:
            update.write(self.runner.memory.tables)

    def sample(
        self, logits: Tensor, req_indices: list[int], masks: Mapping[int, bytes] | None = None
    ) -> SampleOutput:
        """A step of decode rows.

        Args:
            logits: ``[len(req_indices), vocab_size]``.
            masks: by row.
        """
        self._steps += 1
        starts, count = [self.length[index] - 1 for index in req_indices], len(req_indices)
        batch = StepBatch(
            self._steps, list(req_indices), starts, [1] * count, [True] * count, count, count
        )
        step = LaunchedStep(batch)
        if masks:
            rows = sorted(masks)
            batch.masked_rows = rows
            step.masks = GrammarMask(self._steps, rows, [masks[row] for row in rows])
        self.model.given, self.ops.drawn = logits, {}
        needing = self.sampler.rows_needing_host(step.req_indices, step.positions)
        self.ops.host_rows = step.req_indices[needing].tolist()
        with torch.no_grad():
            self.runner.begin(step, is_early=False)
            return self.runner.finish(step)

    def process(
        self, logits: Tensor, req_indices: list[int], masks: Mapping[int, bytes] | None = None
    ) -> Tensor:
        """``[len(req_indices), vocab_size]`` float32: what the tokens of such a step are drawn
        from."""
        self.sample(logits, req_indices, masks)
        return torch.stack([self.ops.drawn[index].float() for index in req_indices])

    def append(self, req_indices: list[int], tokens: list[int]) -> None:
        for req_index, token in zip(req_indices, tokens, strict=True):
            self.input_batch.token_ids[req_index, self.length[req_index]] = token
            self.length[req_index] += 1
