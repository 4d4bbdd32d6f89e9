"""MixedSteps: the model's part of steps with a prefill, as a program of launches if it can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asyncllm.gpu.batch.step_inputs import ModelInputs
from asyncllm.gpu.kv_cache import KVCache, KVGroup
from asyncllm.gpu.models.language_model import LanguageModel
from asyncllm.gpu.state_cache import StateCache
from asyncllm.logger import get_logger
from asyncllm.validation import explain

logger = get_logger(__name__)

PROGRAM_TOKENS = 2048
"""Of the largest step that runs as a program. A larger one keeps the device busy for longer than
the host takes to launch its ops one by one, and its activations would take memory that the KV
cache has better use for."""

ONE_BY_ONE = "mixed steps are launched op by op: %s"


class MixedSteps:
    """Steps of a decoder on a cache.

    Not thread-safe. The program is made at the first step, with the memory of its activations.

    Args:
        max_tokens: of the largest step.
        record: make a program; False runs all steps op by op.

    Attributes:
        program: of steps up to its capacity; None where it cannot be recorded, and before the first
            step.
    """

    def __init__(
        self, decoder: LanguageModel, cache: KVCache, max_tokens: int, *, record: bool = True
    ) -> None:
        self.decoder, self.cache = decoder, cache
        self.capacity = min(max_tokens, PROGRAM_TOKENS)
        self.program: Any = None
        self._is_recorded = not record

    def forward(self, inputs: Sequence[ModelInputs]) -> Tensor:
        """As ``LanguageModel.forward``; the result is valid until the next step."""
        if not self._is_recorded:
            self._record([each.block_size for each in inputs])
        program, wanted = self.program, inputs[0].logits_indices
        largest = 0 if wanted is None else max(inputs[0].num_tokens, len(wanted))
        if program is None or wanted is None or largest > program.capacity:
            return self.decoder.forward(inputs, self.cache)
        plans = [
            attention.plan(inputs[kind.kv_group], kind.window)
            for kind, attention in self.decoder.attention.items()
        ]
        slots = (each.slot_mapping for each in inputs)
        return program.run((inputs[0].token_ids, inputs[0].positions, wanted, *slots), plans)

    def _record(self, block_sizes: Sequence[int]) -> None:
        self._is_recorded = True
        found = record(self.decoder, self.cache, block_sizes)
        if isinstance(found, str):
            logger.info(ONE_BY_ONE, found)
            return
        try:
            device = self.decoder.embedding.device
            self.program = self.decoder.ops.load_launches(found, self.capacity, device)
        except torch.OutOfMemoryError as error:
            logger.warning(ONE_BY_ONE, explain(error))


def record(decoder: LanguageModel, cache: KVCache, block_sizes: Sequence[int]) -> Any:
    """What its steps launch, as ``ops.record_launches`` has it, or why that is no program."""

    def run(inputs: Sequence[ModelInputs]) -> Tensor:
        return decoder.record(inputs, cache)

    try:
        found = decoder.ops.record_launches(run, block_sizes)
    # Layers may do anything with what stands for tensors; they run as they are then.
    except Exception as reason:
        return explain(reason)
    return found or f"the op set {decoder.ops.name!r} has no programs of launches"


def program_bytes(
    decoder: LanguageModel,
    groups: Sequence[KVGroup],
    max_tokens: int,
    states: StateCache | None = None,
) -> int:
    """Bytes of the activations of such a program, for steps of ``max_tokens`` at most; 0 without
    one."""
    decoder.set_max_positions(1)
    weight = decoder.embedding
    cache = KVCache(groups, 1, weight.dtype, weight.device, states)
    found = record(decoder, cache, [group.spec.block_size for group in groups])
    return 0 if isinstance(found, str) else found.num_bytes(min(max_tokens, PROGRAM_TOKENS))
