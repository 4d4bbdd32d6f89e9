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

    Not thread-safe. Programs are made at the first step, with the memory of their activations:
    one, or one for each range of tokens in which experts have kernels of their own.

    Args:
        max_tokens: of the largest step.
        record: make a program; False runs all steps op by op.

    Attributes:
        programs: each of steps up to its capacity, the smallest first; none where the model
            cannot be recorded, and before the first step.
    """

    def __init__(
        self, decoder: LanguageModel, cache: KVCache, max_tokens: int, *, record: bool = True
    ) -> None:
        self.decoder, self.cache = decoder, cache
        self.capacity = min(max_tokens, PROGRAM_TOKENS)
        self.programs: Sequence[Any] = ()
        self._is_recorded = not record

    def forward(self, inputs: Sequence[ModelInputs]) -> Tensor:
        """As ``LanguageModel.forward``; the result is valid until the next step."""
        if not self._is_recorded:
            self._record([each.block_size for each in inputs])
        wanted = inputs[0].logits_indices
        if wanted is None:
            return self.decoder.forward(inputs, self.cache)
        largest = max(inputs[0].num_tokens, len(wanted))
        program = next((each for each in self.programs if largest <= each.capacity), None)
        if program is None:
            return self.decoder.forward(inputs, self.cache)
        plans = [
            attention.plan(inputs[kind.kv_group], kind.window)
            for kind, attention in self.decoder.attention.items()
        ]
        rows = self.decoder.ops.state_rows(inputs[0]) if self.decoder.states else None
        slots = (each.slot_mapping for each in inputs)
        return program.run((inputs[0].token_ids, inputs[0].positions, wanted, *slots), plans, rows)

    def _record(self, block_sizes: Sequence[int]) -> None:
        self._is_recorded = True
        found = record(self.decoder, self.cache, block_sizes, self.capacity)
        if isinstance(found, str):
            logger.info(ONE_BY_ONE, found)
            return
        ops, device, programs = self.decoder.ops, self.decoder.embedding.device, []
        try:
            # One runs at a time: they share the memory of the largest.
            for capacity, recording in reversed(found.items()):
                memory = programs[0].memory if programs else None
                programs.insert(0, ops.load_launches(recording, capacity, device, memory))
        except torch.OutOfMemoryError as error:
            logger.warning(ONE_BY_ONE, explain(error))
            return
        self.programs = programs


def expert_changes(decoder: LanguageModel) -> tuple[int, ...]:
    """Numbers of tokens from which on experts have kernels that smaller steps do not."""
    experts = getattr(decoder.model, "experts", None)
    if experts is None:
        return ()
    return decoder.ops.expert_tokens(experts.routing.num_experts, experts.routing.top_k)


def record(
    decoder: LanguageModel, cache: KVCache, block_sizes: Sequence[int], capacity: int
) -> dict[int, Any] | str:
    """What its steps launch, as ``ops.record_launches`` has it, by the tokens of the largest that
    launches so; or why they are no program."""

    def run(inputs: Sequence[ModelInputs]) -> Tensor:
        return decoder.record(inputs, cache)

    try:
        capacities = sorted({*(c - 1 for c in expert_changes(decoder) if c <= capacity), capacity})
        found = {most: decoder.ops.record_launches(run, block_sizes, most) for most in capacities}
    # Layers may do anything with what stands for tensors; they run as they are then.
    except Exception as reason:
        return explain(reason)
    if None in found.values():
        return f"the op set {decoder.ops.name!r} has no programs of launches"
    return found


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
    capacity = min(max_tokens, PROGRAM_TOKENS)
    found = record(decoder, cache, [group.spec.block_size for group in groups], capacity)
    return 0 if isinstance(found, str) else found[capacity].num_bytes(capacity)
