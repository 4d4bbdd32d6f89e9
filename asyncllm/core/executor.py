"""Executor: the protocol between the engine core and a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from asyncllm.core.batch import GrammarMask, StepBatch, StepResult
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.core.token_rules import TokenRules
from asyncllm.sampling_params import SamplingParams


class StepOutOfMemoryError(Exception):
    """The device ran out of memory in a step. The scheduler rolls the step back and tries a smaller
    one."""


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """Limits within which an executor samples a request on the device alone.

    Attributes:
        max_logprobs: largest ``logprobs``.
    """

    max_logprobs: int

    def exceeded_by(self, sampling: SamplingParams, token_rules: TokenRules | None = None) -> bool:
        """Whether a request must be sampled on the host, because it exceeds a limit, has its own
        logits processors, or has ``bad_words`` of several tokens.

        Args:
            token_rules: rules that ``sampling`` sets for single tokens and bad words.
        """
        logprobs = sampling.logprobs
        return (
            bool(sampling.logits_processors)
            or (logprobs is not None and not 0 <= logprobs <= self.max_logprobs)
            or (token_rules is not None and token_rules.bad_words is not None)
        )


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """Limits of a device with a loaded model, for the scheduler.

    Attributes:
        vocab_size: tokens are 0 to ``vocab_size - 1``.
        num_blocks: KV blocks including the null block 0, which is never allocated.
        kv_groups: groups of layers; each group has its own block table.
        max_model_len: longest sequence, prompt and output, in tokens.
        max_num_seqs: number of slots, one per running request.
        max_num_batched_tokens: token budget of a step.
        pipeline_depth: steps that may be in flight at once, 1 or 2.
        max_tokens_per_row: maximum number of tokens that a sampling row yields in a step. All but
            the first are drafts that the executor made and verified itself. The scheduler reserves
            blocks for the KV of ``max_tokens_per_row - 1`` of them, within ``max_model_len``
            (vLLM's lookahead slots). ``max_num_batched_tokens`` does not count them.
        sampling_limits: limits of sampling on the device, if steps are launched before earlier ones
            are sampled. A request beyond them is not scheduled while it has a token in flight. None
            if no request has to wait.
        step_timeout: seconds after which a step counts as hung, unless the application sets
            ``EngineConfig.step_timeout``.
        has_states: the model is recurrent: each slot has a recurrent state of the tokens computed
            so far. A request that loses its slot computes its tokens again, from position 0 or from
            a snapshot.
        num_state_snapshots: number of further states that the executor keeps, each for a cached
            prefix, numbered from 1. With 0, a recurrent model has no prefix cache.
        state_bytes: size of one recurrent state in bytes.

    Raises:
        ValueError: for several tokens per row with two steps in flight (only the device would know
            where the second step begins); for several tokens per row with states (a state would
            include rejected drafts); for snapshots without states.
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
        """Maximum number of tokens that a step computes of one sequence, drafts included."""
        return self.max_num_batched_tokens + self.max_tokens_per_row - 1

    @property
    def block_size(self) -> int:
        """Tokens per block of the first KV group."""
        return self.kv_groups[0].block_size


@runtime_checkable
class Executor(Protocol):
    """Runs steps on a device. Every method is called on the engine thread.

    ``launch`` starts a step and returns; ``collect`` waits for the oldest step launched and returns
    its result, with the GIL released while it waits. Up to ``info.pipeline_depth`` steps are in
    flight. A step with ``masked_rows`` has two halves: its forward pass begins with ``launch``, and
    ``sample``, which comes before its ``collect``, brings the masks for its sampling (vLLM's
    ``execute_model`` and ``sample_tokens``). The next step may be launched before ``sample``, and
    runs after it. If the device does not run by itself (the CPU), the executor does the work in
    ``collect``. An executor in the engine's process has an attribute ``in_process``, an
    ``UnpicklableObjects``. The method ``report() -> ExecutionReport`` is optional.

    Raises:
        StepOutOfMemoryError: from ``launch`` or ``collect``. Every step in flight is void, and the
            engine calls ``discard``.
        BaseException: anything else kills the engine.
    """

    info: ExecutorInfo

    def launch(self, batch: StepBatch) -> None: ...

    def sample(self, masks: GrammarMask) -> None:
        """Sample the oldest step that awaits masks, step ``masks.step``. ``collect`` raises the
        errors of sampling.

        Raises:
            RuntimeError: if step ``masks.step`` is not the oldest step that awaits masks.
        """

    def collect(self) -> StepResult: ...

    def discard(self) -> None:
        """Wait for the steps that the device has begun, and drop all steps in flight. Slots and
        block tables are void: the next steps assign them anew."""

    def close(self) -> None:
        """Release all memory and threads. Idempotent."""
