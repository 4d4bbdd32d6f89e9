"""Request: one sequence, from its prompt to its last token.

A request is filled in by the thread that submits it (or the tokenizer's), and is the engine
thread's from its command on. The reader of its stream reads the first tokens of ``token_ids``,
to which the engine thread only appends.
"""

from __future__ import annotations

import enum
import hashlib
from array import array
from collections.abc import Iterable
from typing import Any

from asyncllm.core.block_pool import Block
from asyncllm.core.request_group import RequestGroup
from asyncllm.outputs import FinishReason
from asyncllm.sampling_params import SamplingParams

_DIGEST_SIZE = 16


class Status(enum.IntEnum):
    """State of a request. PAUSED: it gets no tokens until its stream is read."""

    NEW = 0
    WAITING = 1
    RUNNING = 2
    PAUSED = 3
    FINISHED = 4


def root_hash(cache_salt: str | None) -> bytes:
    """Parent of a first block's hash. All else that changes the KV of equal tokens belongs
    in here; the chain carries it to every later block."""
    salt = b"" if cache_salt is None else b"salt\0" + cache_salt.encode()
    return hashlib.blake2b(salt, digest_size=_DIGEST_SIZE, person=b"asyncllm-kv").digest()


class Request:
    """One sequence of a group.

    Attributes:
        group: what it shares with the other sequences of its call.
        index: its place in the group, the ``index`` of its deltas.
        token_ids: prompt, then output; empty until the prompt is tokenised.
        sampling: resolved: every field with a neutral value is set, and ``seed``.
        arrival_index: order of submission; ties in every policy are broken by it.
        max_total_tokens: prompt and output together at most.
        num_computed_tokens: tokens whose KV is computed by steps already launched; chases
            ``len(token_ids) + num_placeholders``.
        num_placeholders: sampled tokens of steps in flight, whose values are not known yet.
        epoch: bumped when in-flight results become void, by preemption or rollback.
        blocks: per KV group the blocks held, in order of position; empty if none are. With
            the next four, the KV cache manager's.
        block_hashes: by block size, of the full blocks of ``token_ids``, as far as computed.
        num_slots: tokens that every group has blocks for.
        num_published: leading tokens whose full blocks were offered to the pool.
        publish_at: tokens with which the next block is full and can be offered.
        output: its tokens' way to text; the core only passes it along.
    """

    __slots__ = (
        "arrival_index",
        "arrived_at",
        "block_hashes",
        "blocks",
        "cache_salt",
        "eos_token_ids",
        "epoch",
        "finish_reason",
        "finished_at",
        "first_scheduled_at",
        "first_token_at",
        "group",
        "index",
        "max_model_len",
        "max_total_tokens",
        "min_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published",
        "num_slots",
        "output",
        "priority",
        "publish_at",
        "req_index",
        "request_id",
        "sampling",
        "sort_key",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        group: RequestGroup,
        sampling: SamplingParams,
        *,
        token_ids: list[int] | None = None,
        max_model_len: int,
        arrival_index: int = 0,
        priority: int = 0,
        eos_token_ids: Iterable[int] = (),
        cache_salt: str | None = None,
        output: Any = None,
    ) -> None:
        self.group = group
        self.index = len(group.members)
        group.members.append(self)
        self.request_id = group.request_id
        self.arrived_at = group.arrived_at
        self.sampling = sampling
        self.arrival_index = arrival_index
        self.priority = priority
        self.cache_salt = cache_salt
        self.eos_token_ids = () if sampling.ignore_eos else tuple(eos_token_ids)
        self.stop_token_ids = frozenset((*sampling.stop_token_ids, *self.eos_token_ids))
        self.max_model_len = max_model_len
        self.token_ids: list[int] = []
        self.num_prompt_tokens = 0
        self.min_total_tokens = 0
        self.max_total_tokens = 0
        if token_ids is not None:
            self.set_prompt(token_ids)

        self.status = Status.NEW
        self.sort_key: tuple[float, ...] = (arrival_index,)
        self.req_index = -1
        self.epoch = 0
        self.num_computed_tokens = 0
        self.num_placeholders = 0
        self.blocks: tuple[list[Block], ...] = ()
        self.block_hashes: dict[int, list[bytes]] = {}
        self.num_slots = 0
        self.num_published = 0
        self.publish_at = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.first_scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.output = output

    def set_prompt(self, token_ids: list[int]) -> None:
        """Gives the request its prompt, which may be known only after the request is, while
        a long text is being tokenised. The list is the request's own from here on."""
        self.token_ids = token_ids
        self.num_prompt_tokens = len(token_ids)
        self.min_total_tokens = self.num_prompt_tokens + self.sampling.min_tokens
        self.max_total_tokens = self.max_model_len
        if self.sampling.max_tokens is not None:
            limit = self.num_prompt_tokens + self.sampling.max_tokens
            self.max_total_tokens = min(limit, self.max_model_len)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def check_stop(self, token_id: int) -> FinishReason | None:
        """Why the request ends with ``token_id``, just appended; None if it goes on. A stop
        token on the last allowed position is a stop, not a length."""
        total = len(self.token_ids)
        if token_id in self.stop_token_ids and total >= self.min_total_tokens:
            if token_id not in self.eos_token_ids:
                self.stop_reason = token_id
            return "stop"
        if total >= self.max_total_tokens:
            return "length"
        return None

    def extend_hashes(self, block_size: int) -> list[bytes]:
        """Hashes of all full blocks of ``token_ids``, each computed once: a 128-bit BLAKE2b
        of the parent's hash and the token ids, equal in every process."""
        hashes = self.block_hashes.setdefault(block_size, [])
        num_full = len(self.token_ids) // block_size
        if len(hashes) < num_full:
            parent = hashes[-1] if hashes else root_hash(self.cache_salt)
            for i in range(len(hashes), num_full):
                tokens = array("I", self.token_ids[i * block_size : (i + 1) * block_size])
                parent = hashlib.blake2b(
                    parent + tokens.tobytes(), digest_size=_DIGEST_SIZE
                ).digest()
                hashes.append(parent)
        return hashes

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, "
            f"{self.num_computed_tokens}/{len(self.token_ids)}+{self.num_placeholders})"
        )
