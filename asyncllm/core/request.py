"""Request: one sequence from prompt to last token; RequestGroup: the sequences of one call.

The submitting thread or the tokenizer's thread fills in a request. Once the request is sent to the
engine thread, that thread owns the request. The stream's reader may read the first tokens of
``token_ids``, because the engine thread only appends to this list.
"""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from asyncllm.core.block_hashes import append_block_hashes
from asyncllm.core.block_pool import Block
from asyncllm.core.channel import Channel
from asyncllm.core.reasoning import ReasoningTracker
from asyncllm.core.token_rules import TokenRules
from asyncllm.outputs import FinishReason, TokenLogprobs, Usage
from asyncllm.sampling_params import SamplingParams
from asyncllm.structured.grammar import GrammarMemoryBound

UNREACHABLE_NUM_TOKENS = sys.maxsize
"""Larger than any request's number of tokens; means "never" where a token count is expected."""


class Status(enum.IntEnum):
    """State of a request. A PAUSED request gets no tokens until its stream is read, or until its
    grammar's parser may take memory again."""

    NEW = 0
    WAITING = 1
    RUNNING = 2
    PAUSED = 3
    FINISHED = 4


class LifecycleNotifier(Protocol):
    """Protocol: notifies observers of a group's first token and of its end."""

    def notify_first_token(self) -> None: ...

    def notify_finish(self, usage: Usage, error: BaseException | None) -> None: ...


class OutputGrammar(Protocol):
    """Protocol of the grammar that a request's tokens follow; ``RequestGrammar``
    implements it."""

    num_masks_ahead: int
    awaits_mask: bool
    memory: GrammarMemoryBound

    @property
    def parser_bytes(self) -> int: ...

    @property
    def excess_parser_bytes(self) -> int: ...

    @property
    def added_automaton_bytes(self) -> int: ...

    @property
    def is_held(self) -> bool: ...

    def advance(
        self, request: Request, token_id: int, finish_reason: FinishReason | None
    ) -> FinishReason | None: ...

    def compute_mask(self, request: Request) -> bytes | None: ...

    def release(self) -> None: ...


@dataclass(slots=True, eq=False)
class RequestGroup:
    """The sequences of one call, which share an id, a channel, a deadline and an end.

    A group ends when its last member has ended. All its members end at once when the group is
    aborted, its deadline passes or a member fails: a member's exception ends the channel that all
    members share. Observers are called with the group's first member.

    Attributes:
        channel: carries all members' output to the reader.
        members: requests in order of index; added before the group is submitted, and dropped when
            it ends.
        num_outputs: number of members that the group will have; 0 if all are added at once.
        num_prompt_tokens: number of tokens of the members' prompt; 0 until it is tokenised.
        num_ended: number of members that have ended while others went on.
        cancelled: whether the group has ended, or any thread has sent an abort command for it.
        aborted: whether a caller aborted the group.
        notifier: calls the observers; None without any.
        num_truncated_tokens: tokens cut from the prompt's start.
        engine: number of its engine in an EngineGroup; None without an EngineGroup.
        raw_prompt: RawPrompt of a prompt that is not tokenised yet. None once it is tokenised, and
            once the group has ended, unless its engine died.
        num_text_bytes: memory of the texts and messages of ``raw_prompt``.
        param_bytes: bytes of the grammar's text, of the token rules, and of each list and dict in
            ``sampling``, by object id.
            Several groups may share an object.
    """

    request_id: str
    channel: Channel = field(default_factory=Channel)
    arrived_at: float = 0.0
    deadline: float = math.inf
    members: list[Request] = field(default_factory=list)
    num_outputs: int = 0
    num_prompt_tokens: int = 0
    num_ended: int = 0
    cancelled: bool = False
    aborted: bool = False
    notifier: LifecycleNotifier | None = None
    num_truncated_tokens: int = 0
    engine: int | None = None
    raw_prompt: Any = None
    num_text_bytes: int = 0
    param_bytes: Mapping[int, int] = field(default_factory=dict)

    @property
    def num_members(self) -> int:
        """Number of members, those included that are not made yet."""
        return max(self.num_outputs, len(self.members))

    def restart_timeout(self, now: float) -> None:
        """Restart the timeout at ``now``, which also becomes the arrival time, after a wait for a
        place in the queue. Call this before the group is sent to the engine thread."""
        self.deadline += now - self.arrived_at
        self.arrived_at = now
        for member in self.members:
            member.arrived_at = now

    @property
    def unfinished_requests(self) -> list[Request]:
        return [member for member in self.members if not member.is_finished]


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One sequence of a RequestGroup, from its prompt to its last token.

    Attributes:
        group: its group, shared with the other sequences of its call.
        index: its place in the group, the ``index`` of its deltas.
        token_ids: prompt, then output; empty until the prompt is tokenised.
        sampling: resolved parameters: fields with a neutral value are not None, ``seed`` is set.
        arrival_index: order of submission; breaks ties in every policy.
        owner: name of the user that the request is for; requests of equal rank are admitted in
            turns by owner.
        max_total_tokens: maximum number of tokens of prompt and output together.
        run_ahead_end: number of tokens, placeholders included, below which the request may be
            scheduled while one of its tokens is in flight: ``max_total_tokens``; 0 with
            ``needs_host``, or while its grammar masks are made ahead of their steps.
        num_computed_tokens: tokens whose KV is computed by steps already launched; at most
            ``len(token_ids) + num_placeholders``.
        budget_cost_per_token: how many tokens of a step's budget each token of its next chunk
            takes; see ``prompt_logprobs.budget_cost_per_token``.
        num_placeholders: number of sampled tokens of steps in flight, whose values are not known
            yet. Also 1 while the next grammar mask is made ahead, so that the request is not
            scheduled.
        epoch: incremented when in-flight results become void, by preemption or rollback.
        is_evicted: whether it lost its blocks without running, and is not to be admitted yet.
        blocks: per KV group the blocks held, in order of position; empty if it holds none. The KV
            cache manager owns this attribute and the next five.
        num_out_of_window: per KV group the number of leading entries of ``blocks`` that are the
            null block, because their tokens lie before the group's window.
        block_hashes: by block size, hashes of the full blocks of ``token_ids`` computed so far.
        num_covered_tokens: number of tokens up to which the block tables need no change: every
            group has blocks for them, and at most one block that has left the group's window.
        num_tokens_in_prefix_cache: leading tokens whose full blocks were entered into the prefix
            cache, unless the cache had an equal block.
        cache_blocks_at: number of tokens at which the next block is full and can be cached.
        snapshot_at: number of tokens at which its recurrent state is saved; without states,
            UNREACHABLE_NUM_TOKENS. StateSnapshots owns this attribute and the next two.
        num_shared_tokens: leading tokens whose KV was cached at the last look-up, whether or not a
            snapshot reached that far.
        newest_output_snapshot: the newest snapshot of its output, and that snapshot's hash.
        token_rules: rules of ``allowed_token_ids`` and ``bad_words``; None without them.
        claiming_processors: indices of the engine's logits processors that apply to it.
        needs_host: whether it is sampled on the host, so that its next step waits until its last
            token is known; see SamplingLimits.
        output: state of its detokenisation; the core only passes it along.
        reasoning: tracker of the model's reasoning, set with the prompt; None if the output has no
            reasoning.
        first_member: first member of its group, whose prompt and block hashes it shares; None for
            the first itself.
        structured_output: the grammar that its tokens follow, or None.
        prompt_logprobs: log-probabilities of the prompt's tokens from the second on, as far as
            computed; None if ``sampling`` does not ask for them. Only the engine thread appends to
            it. Once it is complete, the reader may drop it at any time by setting None, which the
            engine thread treats as complete.
    """

    group: RequestGroup
    sampling: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    max_model_len: int = field(kw_only=True)
    arrival_index: int = 0
    priority: int = 0
    owner: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    cache_salt: str | None = None
    output: Any = None
    reasoning: ReasoningTracker | None = None
    first_member: Request | None = None
    structured_output: OutputGrammar | None = None
    token_rules: TokenRules | None = None
    claiming_processors: tuple[int, ...] = ()
    needs_host: bool = False
    index: int = field(init=False)
    request_id: str = field(init=False)
    arrived_at: float = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    num_prompt_tokens: int = field(init=False, default=0)
    min_total_tokens: int = field(init=False, default=0)
    max_total_tokens: int = field(init=False, default=0)
    run_ahead_end: int = field(init=False, default=0)
    status: Status = field(init=False, default=Status.NEW)
    sort_key: tuple[float, ...] = field(init=False)
    req_index: int = field(init=False, default=-1)
    epoch: int = field(init=False, default=0)
    is_evicted: bool = field(init=False, default=False)
    num_computed_tokens: int = field(init=False, default=0)
    budget_cost_per_token: int = field(init=False, default=1)
    num_placeholders: int = field(init=False, default=0)
    blocks: tuple[list[Block], ...] = field(init=False, default=())
    num_out_of_window: list[int] = field(init=False, default_factory=list)
    block_hashes: dict[int, list[bytes]] = field(init=False, default_factory=dict)
    num_covered_tokens: int = field(init=False, default=0)
    num_tokens_in_prefix_cache: int = field(init=False, default=0)
    cache_blocks_at: int = field(init=False, default=0)
    snapshot_at: int = field(init=False, default=UNREACHABLE_NUM_TOKENS)
    num_shared_tokens: int = field(init=False, default=0)
    newest_output_snapshot: tuple[Block, bytes] | None = field(init=False, default=None)
    num_cached_tokens: int = field(init=False, default=0)
    num_preemptions: int = field(init=False, default=0)
    first_scheduled_at: float | None = field(init=False, default=None)
    first_token_at: float | None = field(init=False, default=None)
    finish_reason: FinishReason | None = field(init=False, default=None)
    stop_reason: str | int | None = field(init=False, default=None)
    prompt_logprobs: list[TokenLogprobs] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        group, sampling = self.group, self.sampling
        self.index = len(group.members)
        group.members.append(self)
        self.request_id = group.request_id
        self.arrived_at = group.arrived_at
        self.sort_key = (self.arrival_index,)
        if sampling.ignore_eos:
            self.eos_token_ids = ()
        if self.first_member is None:
            self.stop_token_ids = frozenset((*sampling.stop_token_ids, *self.eos_token_ids))
        else:  # Share the set among the outputs: it may be as large as the vocabulary.
            self.stop_token_ids = self.first_member.stop_token_ids
        if sampling.prompt_logprobs is not None and self.first_member is None:
            self.prompt_logprobs = []
        if self.token_ids:
            self.set_prompt(self.token_ids)

    def set_prompt(self, token_ids: list[int]) -> None:
        """Set the prompt's token ids; the request then owns the list. A request with a long text is
        queued first, and gets its token ids later."""
        self.token_ids = token_ids
        self.num_prompt_tokens = self.group.num_prompt_tokens = len(token_ids)
        self.min_total_tokens = self.num_prompt_tokens + self.sampling.min_tokens
        self.max_total_tokens = self.max_model_len
        if self.sampling.max_tokens is not None:
            limit = self.num_prompt_tokens + self.sampling.max_tokens
            self.max_total_tokens = min(limit, self.max_model_len)
        self.run_ahead_end = 0 if self.needs_host else self.max_total_tokens

    def begin(self) -> None:
        """Make the request's own parameters and its own copy of the prompt, at its first admission.
        Until then it shares those of its group's first member: an output may end before it runs."""
        first = self.first_member
        if first is not None and self.sampling is first.sampling:
            self.sampling = first.sampling.of_output(self.index)
            self.token_ids = self.token_ids.copy()

    def drop_long_params(self, short: SamplingParams) -> None:
        """Free the long parameters of an ended request: lists, dicts and texts, and the token rules
        and detokenizer made from them.

        Args:
            short: parameters to keep instead. The reader still needs ``logprobs``.
        """
        self.sampling = short
        self.stop_token_ids, self.token_rules, self.output = frozenset(), None, None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def max_cached_tokens(self) -> int:
        """Maximum number of leading tokens whose KV may come from the prefix cache. It excludes the
        last token, whose logits are sampled, and tokens whose prompt log-probability is still
        missing."""
        if not self.lacks_prompt_logprobs:
            return len(self.token_ids) - 1
        return len(self.prompt_logprobs or ())

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether requested prompt log-probabilities are not all computed yet."""
        logprobs = self.prompt_logprobs
        return logprobs is not None and len(logprobs) < self.num_prompt_tokens - 1

    @property
    def whole_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Log-probabilities of every prompt token, with None for the first token. Returns None
        while some are not computed yet, and if the request does not ask for them."""
        logprobs = self.prompt_logprobs
        if logprobs is None or len(logprobs) != self.num_prompt_tokens - 1:
            return None
        return None, *logprobs

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED

    def check_stop(self, token_id: int) -> FinishReason | None:
        """Finish reason if ``token_id``, just appended, ends the request; else None. A stop token
        at the last allowed position counts as "stop", not "length"."""
        total = len(self.token_ids)
        if token_id in self.stop_token_ids and total >= self.min_total_tokens:
            if token_id not in self.eos_token_ids:
                self.stop_reason = token_id
            return "stop"
        if total >= self.max_total_tokens:
            return "length"
        return None

    def extend_hashes(self, block_size: int) -> list[bytes]:
        """Hashes of all full blocks of ``token_ids``; each is computed once."""
        hashes = self.block_hashes.get(block_size)
        if hashes is None:
            shared: list[bytes] = []
            if self.first_member is not None:
                shared = self.first_member.block_hashes.get(block_size, [])
            hashes = shared[: self.num_prompt_tokens // block_size]
            self.block_hashes[block_size] = hashes
        append_block_hashes(hashes, self.token_ids, block_size, self.cache_salt)
        return hashes

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, "
            f"{self.num_computed_tokens}/{len(self.token_ids)}+{self.num_placeholders})"
        )
