"""Messages between the core and the device: StepBatch, GrammarMask and StepResult.

These are the only types that the scheduler and a model runner share: plain data that can be
pickled, none of which the core changes or keeps once a step is launched. A step is described
by parallel lists, one entry per row, because a step of 256 rows is scheduled in well under
a millisecond only if a row costs no object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncllm.outputs import TokenLogprobs
from asyncllm.sampling_params import SamplingParams
from asyncllm.validation import describe


@dataclass(slots=True)
class RequestAssignment:
    """A request as it enters a slot: at its start, or after a preemption or a pause.

    Attributes:
        req_index: index from 0 to ``max_num_seqs - 1``; the request keeps it while it runs.
        request_id: for messages only.
        token_ids: every token, prompt and output; none is in flight when a request is assigned.
        num_prompt_tokens: how many of them are the prompt.
        block_ids: per KV group the blocks it holds, this step's included, in order of
            position; the null block where it has given one back.
        sampling: resolved parameters: no None among the fields that have a neutral value,
            and ``seed`` set; without ``logits_processors``.
        eos_token_ids: what ``min_tokens`` has to suppress beside ``stop_token_ids``; empty
            with ``ignore_eos``.
        processors_key: of its logits processors, which stay with the engine
            (``InProcess.processors``); -1 if it has none.
        bad_words: token sequences that may not occur in the output, of ``sampling.bad_words``.
        claimed_by: numbers of the engine's logits processors (``InProcess.logits_processors``) that
            have a part in it.
    """

    req_index: int
    request_id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    block_ids: tuple[list[int], ...]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    processors_key: int = -1
    bad_words: tuple[tuple[int, ...], ...] = ()
    claimed_by: tuple[int, ...] = ()


class PromptSpan(NamedTuple):
    """Positions of a row that its request wants prompt log-probabilities of: the logits at a
    position say how likely the prompt's token behind it was.

    Attributes:
        first: at least the row's start.
        end: behind the last; at most the prompt's last position, and the row's end.
        num_top: most likely tokens to report at each.
    """

    first: int
    end: int
    num_top: int


@dataclass(slots=True)
class StepBatch:
    """One step: which rows compute which tokens.

    Row i computes ``counts[i]`` tokens of the request in ``req_indices[i]``, from position
    ``starts[i]`` on, after ``starts[i]`` tokens whose KV is in its blocks. Rows with
    ``samples[i]`` yield one token, which belongs at position ``starts[i] + counts[i]``, and
    up to ``ExecutorInfo.max_tokens_per_row - 1`` more behind it; the runner keeps them,
    because the next step may be launched before the core has seen them.
    Decode rows (one token, sampled) come first: ``num_decodes`` of them.

    Attributes:
        step: number of the step, from 0.
        released: slots given up since the last step.
        assignments: requests that enter slots, to be applied after ``released``.
        new_blocks: ``(req_index, block ids per KV group)`` appended to tables of requests that
            had a slot.
        trimmed: ``(req_index, KV group, first, end)``: entries of tables of requests that had a
            slot that are the null block from this step on. Their tokens lie before the window of
            every query to come, and their blocks may have a new owner in this very step.
        state_loads: ``(req_index, snapshot)``: a request enters a slot behind a cached prefix;
            its recurrent state is copied from there before the step runs.
        state_saves: ``(req_index, snapshot)``: the state that the request has behind the step is
            copied there, before a later one runs. Snapshots are counted from 1.
        num_tokens: sum of ``counts``.
        masked_rows: sampling rows, in ascending order, whose tokens a grammar restricts. The
            step is sampled once ``Executor.sample`` brings their masks, and not before.
        prompt_logprobs: row to the span that it wants prompt log-probabilities of. No decode row
            is among them.
    """

    step: int
    req_indices: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    num_decodes: int = 0
    num_tokens: int = 0
    released: list[int] = field(default_factory=list)
    assignments: list[RequestAssignment] = field(default_factory=list)
    new_blocks: list[tuple[int, tuple[list[int], ...]]] = field(default_factory=list)
    trimmed: list[tuple[int, int, int, int]] = field(default_factory=list)
    state_loads: list[tuple[int, int]] = field(default_factory=list)
    state_saves: list[tuple[int, int]] = field(default_factory=list)
    masked_rows: list[int] = field(default_factory=list)
    prompt_logprobs: dict[int, PromptSpan] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.req_indices)


@dataclass(slots=True)
class GrammarMask:
    """The tokens that grammars allow in a step's ``masked_rows``.

    A mask is ``ceil(vocab_size / 32)`` words of 32 bits, little-endian: token t is allowed if
    bit ``t % 32`` of word ``t // 32`` is set. Bits past the vocabulary do not matter.

    Attributes:
        step: number of the StepBatch.
        rows: of its ``masked_rows``, each at most once. A row that is left out is sampled
            without a mask: its request has ended meanwhile, and its token is void.
        masks: the mask of each of ``rows``, as bytes. One of another length, or one that allows
            nothing, is an error of its row alone.
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
        step: number of that StepBatch. Results come in the order of the launches, and one
            that is out of order would give every request another's tokens.
        token_ids: sampled tokens of all rows, row after row.
        counts: tokens of each row: none for a row that does not sample or is in ``errors``,
            else 1 to ``max_tokens_per_row``. The KV of all of them but the last is written.
        logprobs: row to log-probabilities of each of its tokens, for rows whose request asked
            for them.
        prompt_logprobs: row to those of the tokens behind the positions of its ``PromptSpan``, in
            order; of all rows that wanted them and are not in ``errors``.
        errors: row to the error that ends this row's request and no other (a logits
            processor that raised, logits that are not numbers). An executor in the engine's
            process leaves the exceptions in ``InProcess.errors``.
    """

    step: int
    token_ids: list[int]
    counts: list[int]
    logprobs: dict[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, Sequence[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[int, RowError] = field(default_factory=dict)
