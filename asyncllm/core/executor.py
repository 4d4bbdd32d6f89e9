"""Executor: the protocol between the engine core and a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from asyncllm.core.batch import GrammarMask, StepBatch, StepResult
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.sampling_params import SamplingParams


class StepOutOfMemoryError(Exception):
    """The device ran out of memory in a step. Nothing of the step counts; the scheduler
    takes it back and tries a smaller one."""


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """Limits of sampling on an executor's device, without the host.

    Attributes:
        max_logprobs: ``logprobs``.
    """

    max_logprobs: int

    def exceeded_by(
        self, sampling: SamplingParams, bad_words: Sequence[Sequence[int]] = ()
    ) -> bool:
        """Whether a request needs the host: for more log-probabilities, for processors of its own,
        or for ``bad_words`` of several tokens.

        Args:
            bad_words: as token sequences.
        """
        logprobs = sampling.logprobs
        return (
            bool(sampling.logits_processors)
            or (logprobs is not None and not 0 <= logprobs <= self.max_logprobs)
            or any(len(words) > 1 for words in bad_words)
        )


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """Limits of a device with a loaded model, for the scheduler.

    Attributes:
        vocab_size: tokens are 0 to ``vocab_size - 1``.
        num_blocks: KV blocks including the null block 0, which is never allocated.
        kv_groups: the groups of layers that have a block table each.
        max_model_len: longest sequence, prompt and output, in tokens.
        max_num_seqs: slots.
        max_num_batched_tokens: token budget of a step.
        pipeline_depth: steps that may be in flight at once, 1 or 2.
        max_tokens_per_row: the most tokens that a sampling row yields in a step. All but the
            first are drafts that the executor made and verified itself. The scheduler
            reserves blocks for the KV of ``max_tokens_per_row - 1`` of them, within
            ``max_model_len`` (vLLM's lookahead slots). ``max_num_batched_tokens`` does not
            count them.
        sampling_limits: of an executor that runs ahead. A request beyond them is left out of a
            step while one in flight has yet to give its token, and the others are not. None
            where a step can always be launched before the one ahead of it is sampled.
        step_timeout: seconds after which a step counts as hung, where the application has not
            said.
        has_states: the executor keeps a recurrent state per request index, of all tokens computed
            there. A request that leaves its index computes its tokens again, from position 0 or
            from a snapshot.
        num_state_snapshots: states that the executor keeps beside those, 1 to this, each of a
            prefix. With 0 prefixes are not cached where there are states.
        state_bytes: of one state.

    Raises:
        ValueError: for several tokens per row with steps in flight. A second step starts
            where the first one ends, which would be known on the device alone. Likewise with
            states, which would have taken in the drafts that are rejected. For snapshots
            without states.
    """

    vocab_size: int
    num_blocks: int
    kv_groups: tuple[KVCacheSpec, ...]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    pipeline_depth: int = 1
    max_tokens_per_row: int = 1
    sampling_limits: SamplingLimits | None = None
    step_timeout: float = 600.0
    has_states: bool = False
    num_state_snapshots: int = 0
    state_bytes: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens_per_row > 1 and self.pipeline_depth > 1:
            raise ValueError(
                f"max_tokens_per_row={self.max_tokens_per_row} with pipeline_depth="
                f"{self.pipeline_depth}: expected pipeline_depth=1"
            )
        if self.max_tokens_per_row > 1 and self.has_states:
            raise ValueError(
                f"max_tokens_per_row={self.max_tokens_per_row} with has_states: expected 1"
            )
        if self.num_state_snapshots and not self.has_states:
            raise ValueError(
                f"num_state_snapshots={self.num_state_snapshots} without has_states: expected 0"
            )

    @property
    def max_step_tokens(self) -> int:
        """Tokens that a step computes of one sequence at most, drafts included."""
        return self.max_num_batched_tokens + self.max_tokens_per_row - 1

    @property
    def block_size(self) -> int:
        """Tokens per block of the first group."""
        return self.kv_groups[0].block_size


@runtime_checkable
class Executor(Protocol):
    """Runs steps on a device. Every method is called on the engine thread.

    ``launch`` starts a step and returns; ``collect`` waits for the oldest step launched and
    returns its result, with the GIL released while it waits. Up to
    ``info.pipeline_depth`` steps are in flight. A step with ``masked_rows`` has two halves: its
    forward pass begins with ``launch``, and ``sample``, which comes before its ``collect``,
    brings the masks that its tokens are drawn under (vLLM's ``execute_model`` and
    ``sample_tokens``). Its successor may be launched before that, and begins behind it.
    An executor that has no device of its own
    to run ahead (the CPU) does the work in ``collect``. One in the engine's process has an
    ``InProcess`` as its attribute ``in_process``. A method ``report() -> ExecutionReport`` is
    optional.

    Raises:
        StepOutOfMemoryError: from ``launch`` or ``collect``; the step left nothing behind that
            counts. Every step in flight is void then: ``discard`` follows.
        BaseException: anything else kills the engine.
    """

    info: ExecutorInfo

    def launch(self, batch: StepBatch) -> None: ...

    def sample(self, masks: GrammarMask) -> None:
        """Draws the tokens of the oldest step that awaits masks, which ``masks`` names. What
        fails in it is raised by ``collect``.

        Raises:
            RuntimeError: no step awaits masks, or another one does.
        """

    def collect(self) -> StepResult: ...

    def discard(self) -> None:
        """Drops every step in flight, after waiting for the device where it has begun.
        Slots and block tables are void: the next steps assign them anew."""

    def close(self) -> None:
        """Gives back all memory and threads. Idempotent."""
