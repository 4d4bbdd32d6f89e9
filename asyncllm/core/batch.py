"""Messages between the core and the device: StepBatch, GrammarMask and StepResult.

The scheduler and a model runner share only these types. They are plain data that can be pickled,
and the core neither changes nor keeps them once a step is launched. A step has parallel lists with
one entry per row: an object per row would make a step of 256 rows take more than a millisecond to
schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncllm.core.token_rules import TokenRules
from asyncllm.outputs import TokenLogprobs
from asyncllm.sampling_params import SamplingParams
from asyncllm.validation import describe


@dataclass(slots=True)
class SlotAssignment:
    """State of a request that enters a slot: at its start, or after a preemption or a pause.

    Attributes:
        req_index: index from 0 to ``max_num_seqs - 1``; the request keeps it while it
            runs, and while it is paused and no other request needs it.
        request_id: id of the request, only for error messages.
        token_ids: every token, prompt and output; none is in flight when a request is assigned.
        num_prompt_tokens: number of prompt tokens in ``token_ids``.
        block_ids: per KV group the ids of its blocks, including those added for this step, in order
            of position; the null block in place of blocks that it has freed.
        sampling: resolved parameters: fields with a neutral value are not None, ``seed`` is set,
            and there are no ``logits_processors``.
        eos_token_ids: EOS token ids, which ``min_tokens`` suppresses together with
            ``stop_token_ids``; empty with ``ignore_eos``.
        processors_key: key of the request's own logits processors in
            ``UnpicklableObjects.processors``; -1 if it has none.
        token_rules: rules of ``allowed_token_ids`` and ``bad_words``; None without them.
        claiming_processors: indices into ``UnpicklableObjects.logits_processors`` of the engine's
            processors that apply to the request.
    """

    req_index: int
    request_id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    block_ids: tuple[list[int], ...]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    processors_key: int = -1
    token_rules: TokenRules | None = None
    claiming_processors: tuple[int, ...] = ()


class PromptLogprobSpan(NamedTuple):
    """Positions of a row at which prompt log-probabilities are computed. The logits at a position
    give the log-probability of the prompt's next token.

    Attributes:
        first: the first position; at least the row's start.
        end: one past the last position; at most the prompt's last position and the row's end.
        num_top: how many of the most likely tokens to report at each position.
    """

    first: int
    end: int
    num_top: int


@dataclass(slots=True)
class StepBatch:
    """One step: its rows, and the tokens that each row computes.

    Row i computes ``counts[i]`` tokens of the request in ``req_indices[i]``, from position
    ``starts[i]`` on; the KV of earlier tokens is in the request's blocks. A row with ``samples[i]``
    yields one token, at position ``starts[i] + counts[i]``, and up to
    ``ExecutorInfo.max_tokens_per_row - 1`` more after it. The runner keeps these tokens, because
    the next step may be launched before the core has seen them. Decode rows (one token, sampled)
    come first: ``num_decodes`` of them.

    Attributes:
        step: number of the step, from 0.
        released_indices: slots given up since the last step.
        assignments: requests that enter slots, to be applied after ``released_indices``.
        new_blocks: ``(req_index, block ids per KV group)`` appended to tables of requests that
            had a slot.
        freed_entries: ``(req_index, KV group, first, end)``: table entries that become the null
            block with this step, because every later query's window begins after the tokens of
            these entries. Their blocks may have a new owner in this very step.
        block_copies: ``(source, target)``: block ids. The blocks are copied before the step runs,
            and all are read before the first is written.
        state_loads: ``(req_index, snapshot)``: a request continues a cached prefix; the snapshot is
            copied into its slot before the step runs.
        state_saves: ``(req_index, snapshot)``: the request's state after this step is copied to the
            snapshot before a later step runs. Snapshots are numbered from 1.
        num_tokens: sum of ``counts``.
        masked_rows: sampling rows, in ascending order, whose tokens a grammar restricts. The step
            is not sampled before ``Executor.sample`` brings their masks.
        prompt_logprobs: map from row to PromptLogprobSpan, for rows whose request asks for prompt
            log-probabilities; never a decode row.
    """

    step: int
    req_indices: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    num_decodes: int = 0
    num_tokens: int = 0
    released_indices: list[int] = field(default_factory=list)
    assignments: list[SlotAssignment] = field(default_factory=list)
    new_blocks: list[tuple[int, tuple[list[int], ...]]] = field(default_factory=list)
    freed_entries: list[tuple[int, int, int, int]] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    state_loads: list[tuple[int, int]] = field(default_factory=list)
    state_saves: list[tuple[int, int]] = field(default_factory=list)
    masked_rows: list[int] = field(default_factory=list)
    prompt_logprobs: dict[int, PromptLogprobSpan] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.req_indices)


@dataclass(slots=True)
class GrammarMask:
    """The tokens that grammars allow in a step's ``masked_rows``.

    A mask is ``ceil(vocab_size / 32)`` words of 32 bits, little-endian: token t is allowed if
    bit ``t % 32`` of word ``t // 32`` is set. Bits past the vocabulary do not matter.

    Attributes:
        step: number of the StepBatch.
        rows: a subset of the step's ``masked_rows``. A row that is missing is sampled without a
            mask: its request has ended, and its token is discarded.
        masks: the mask of each of ``rows``, as bytes. A mask of the wrong length, or one that
            allows no token, is an error of its row alone.
    """

    step: int
    rows: list[int] = field(default_factory=list)
    masks: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RowError:
    """An exception as data: the name of its type, and a short ``repr`` of it."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> RowError:
        return cls(type(error).__name__, describe(error))


@dataclass(slots=True)
class StepResult:
    """Tokens of a step, row by row in the order of its StepBatch.

    Attributes:
        step: number of the StepBatch. Results come in the order of the launches; otherwise requests
            would get each other's tokens.
        token_ids: sampled tokens of all rows, row after row.
        counts: number of tokens of each row: 0 for a row that does not sample or is in ``errors``,
            else 1 to ``max_tokens_per_row``. The KV of all its tokens but the last is written.
        logprobs: map from row to the log-probabilities of each of its tokens, for rows whose
            request asked for them.
        prompt_logprobs: map from row to prompt log-probabilities, one for each position of its
            ``PromptLogprobSpan``, in order; for every row that has a span and no error.
        errors: map from row to the error that ends only this row's request (a logits processor that
            raised, logits that are NaN or infinite). An executor in the engine's process leaves the
            exceptions in ``UnpicklableObjects.errors``.
    """

    step: int
    token_ids: list[int]
    counts: list[int]
    logprobs: dict[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[int, RowError] = field(default_factory=dict)
