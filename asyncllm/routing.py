"""Routing: which of several engines a prompt goes to.

Pure Python without a thread, event loop or clock of its own: times are arguments, and engines are
described by plain values, from the same process or from another.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from asyncllm import validation as check
from asyncllm.core.block_hashes import append_block_hashes, root_hash
from asyncllm.errors import EngineClosedError, EngineOverloadedError
from asyncllm.outputs import EngineStats

Key = Hashable
"""Name of an engine, chosen by the caller: its number or its address."""

TEXT_PIECE_CHARACTERS = 2048
"""Number of characters of each piece of a text that ``text_hashes`` hashes."""

_MAX_HASHED_TEXT_PIECES = 32
"""Maximum number of pieces of a text that ``text_hashes`` hashes: 64 KiB of text."""

_RUNNING_REQUEST_LOAD_TOKENS = 32
"""Number of prompt tokens that a running request counts as. It has one token in a step, but that
token takes as long as several prompt tokens."""

_RATE_TOLERANCE_FACTOR = 1.5
"""A token rate within this factor of the median rate counts as the median, because measured rates
of equal engines differ."""

_MAX_RATIO_TO_MEDIAN_RATE = 8.0
"""Maximum ratio between an engine's token rate and the median rate; larger ratios are clamped."""

_NUM_RECENT_ROUTES = 256
"""Number of latest routes per engine that count as recent. With fewer, prompts that are mostly a
shared prefix all go to one engine; with more, an old burst influences routing for a long time."""

_EXCESS_LOAD_FRACTION = 0.5
"""Fraction of an engine's excess that the router adds to its load. The excess is the number of
recent uncached tokens above the mean of all engines."""

_MAX_DECAY_WEIGHT = 1e6
"""Value of ``Router._decay_weight`` above which the router divides recent loads by the weight and
resets it to 1, against overflow."""

_HIT_ACCURACY_AVERAGING_REQUESTS = 8
"""Number of requests that the moving average ``_EngineLoad.hit_accuracy`` covers."""

_MAX_TIME_OR_TOKENS = 1e18
"""Largest accepted value of an argument that is a time or a number of tokens."""

_EMPTY_KEY_SET: frozenset[Key] = frozenset()


@dataclass(slots=True)
class Candidate:
    """State of one engine that a Router may choose. Candidates can be pickled.

    Attributes:
        key: the engine's name.
        stats: its latest ``EngineStats``. ``num_queued_tokens``, ``num_running``,
            ``prompt_tokens_per_second`` and ``is_paused`` are read.
        cached_tokens: how many leading tokens of the prompt it has cached.
        retry_after: seconds until its queue is likely to have room for the request; 0 if it has
            room now.
        alive: whether it accepts requests. False for an engine that starts, closes or is dead.
        missing_tokens: how many tokens of the prompt its free KV blocks cannot take: the request
            waits until others have ended.
    """

    key: Key
    stats: EngineStats
    cached_tokens: int = 0
    retry_after: float = 0.0
    alive: bool = True
    missing_tokens: int = 0


@dataclass(slots=True)
class _EngineLoad:
    """Load of one engine from the requests of one router.

    Attributes:
        num_requests: requests that have no token yet.
        num_tokens: prompt tokens of these requests.
        num_uncached: prompt tokens of these requests that are not expected to be cached.
        recent_uncached: decaying sum of the prompt tokens that were not expected to be cached, over
            all requests sent to the engine. Scaled up by ``Router._decay_weight``.
        hit_accuracy: moving average of the share of expected cached tokens that were really cached.
    """

    num_requests: int = 0
    num_tokens: int = 0
    num_uncached: int = 0
    recent_uncached: float = 0.0
    hit_accuracy: float = 1.0


@dataclass(slots=True, eq=False)
class Route:
    """Decision of a router.

    Attributes:
        key: the engine to send the prompt to.
        num_tokens: tokens of the prompt.
        cached_tokens: how many of them the engine is expected to have cached.
        seconds: expected time to the first token.
    """

    key: Key
    num_tokens: int
    cached_tokens: int
    seconds: float
    _reported_cached_tokens: int = field(repr=False)
    _load: _EngineLoad = field(repr=False)
    _is_counted: bool = field(default=True, init=False, repr=False)


class Router:
    """Chooses the engine with the least expected time to a prompt's first token.

    That time is the number of tokens that the engine computes before the first token, divided by
    the engine's rate. The tokens are those of the prompt that the engine has not cached, those of
    earlier prompts that wait, and some for each running request, which takes its part of every
    step.

    If an engine was lately sent more tokens to compute than the mean of all engines, half of the
    excess is added to its tokens. So a prefix that many prompts share gets a copy on further
    engines before queues grow, while a single conversation stays on its engine.

    A router keeps count of the requests that it sent and that have no token yet, so that a burst
    spreads even where statistics arrive late. Any thread may call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: dict[Key, _EngineLoad] = {}
        # Exponential decay: instead of scaling all recent loads down, scale new entries up.
        self._decay_weight = 1.0

    def choose(self, candidates: Sequence[Candidate], num_tokens: int) -> Route:
        """Choose an engine, and count the prompt as sent to it until ``settle``.

        Engines that are not alive or are full are excluded, and so are paused engines unless all
        are paused. Equal engines are chosen in turn, because requests sent to an engine count as
        load. Statistics may be old or wrong; impossible numbers are ignored.

        Args:
            candidates: all engines.
            num_tokens: tokens of the prompt, or an estimate until it is tokenised; at least 1.

        Raises:
            InvalidRequestError: for an argument of a wrong type or out of range, such as a number
                that is negative or NaN; ``param`` names it, as in "candidates[3].retry_after".
            EngineOverloadedError: if all are full, with the least ``retry_after``.
            EngineClosedError: if none is alive.
        """
        num_tokens = check.integer("num_tokens", num_tokens, 1)
        _check_candidates(candidates)
        alive = [candidate for candidate in candidates if candidate.alive]
        if not alive:
            raise EngineClosedError(
                f"none of {len(candidates)} engines accepts requests; expected one that runs"
            )
        usable = [candidate for candidate in alive if not candidate.stats.is_paused] or alive
        ready = [candidate for candidate in usable if candidate.retry_after <= 0.0]
        if not ready:
            wait = min(candidate.retry_after for candidate in usable)
            message = f"the queues of {len(usable)} engines are full; try again in {wait:.2f} s"
            raise EngineOverloadedError(message, retry_after=wait)
        with self._lock:
            return self._choose_engine(ready, num_tokens)

    def settle(self, route: Route, cached_tokens: int | None = None) -> None:
        """Stop counting a request in its engine's load: it has its first token, has ended, or was
        not accepted. Later calls for the same route do nothing.

        Args:
            cached_tokens: how many tokens were cached in the end, as ``usage.cached_tokens`` says;
                None if the request had no token. If the engine's candidate promised more, the
                router scales down ``cached_tokens`` of the engine's later candidates.

        Raises:
            InvalidRequestError: for anything but a Route and a number of tokens.
        """
        if not isinstance(route, Route):
            raise check.value_error("route", route, "a Route, as choose() returns it")
        cached_tokens = check.integer("cached_tokens", cached_tokens, 0, optional=True)
        with self._lock:
            if not route._is_counted:
                return
            load, route._is_counted = route._load, False
            load.num_requests -= 1
            load.num_tokens -= route.num_tokens
            load.num_uncached -= route.num_tokens - route.cached_tokens
            if cached_tokens is not None and route._reported_cached_tokens > 0:
                share = min(cached_tokens / route._reported_cached_tokens, 1.0)
                load.hit_accuracy += (share - load.hit_accuracy) / _HIT_ACCURACY_AVERAGING_REQUESTS

    def forget(self, key: Key) -> None:
        """Forget an engine that was removed or has died, and the requests sent to it."""
        with self._lock:
            self._loads.pop(key, None)

    def _choose_engine(self, candidates: Sequence[Candidate], num_tokens: int) -> Route:
        median_rate = _median_token_rate(candidates)
        loads = [load for candidate in candidates if (load := self._loads.get(candidate.key))]
        mean = sum(load.recent_uncached for load in loads) / max(len(loads), 1)
        if len(loads) < len(candidates):
            # A new engine starts with the mean load, so that the mean does not change.
            loads = [
                self._loads.setdefault(one.key, _EngineLoad(recent_uncached=mean))
                for one in candidates
            ]
        excess_weight = _EXCESS_LOAD_FRACTION / self._decay_weight
        best_index, least_seconds = 0, math.inf
        for i, (candidate, load) in enumerate(zip(candidates, loads, strict=True)):
            stats = candidate.stats
            num_work_tokens = num_tokens + load.num_uncached
            num_work_tokens += candidate.missing_tokens
            if candidate.cached_tokens > 0:
                num_work_tokens -= _expected_cached_tokens(candidate, load, num_tokens)
            if stats.num_queued_tokens > load.num_tokens:
                num_work_tokens += stats.num_queued_tokens - load.num_tokens
            num_running = load.num_requests
            if stats.num_running > num_running:
                num_running = stats.num_running
            num_work_tokens += _RUNNING_REQUEST_LOAD_TOKENS * num_running
            if load.recent_uncached > mean:
                num_work_tokens += excess_weight * (load.recent_uncached - mean)
            rate = stats.prompt_tokens_per_second
            if rate != median_rate:
                rate = _clamp_rate(rate, median_rate)
            if num_work_tokens < least_seconds * rate:
                best_index, least_seconds = i, num_work_tokens / rate
        candidate, load = candidates[best_index], loads[best_index]
        num_cached = _expected_cached_tokens(candidate, load, num_tokens)
        route = Route(
            candidate.key, num_tokens, num_cached, least_seconds, candidate.cached_tokens, load
        )
        self._add_to_load(route, len(candidates))
        return route

    def _add_to_load(self, route: Route, num_engines: int) -> None:
        """Add a route to the load of its engine, until ``settle``."""
        load, num_uncached = route._load, route.num_tokens - route.cached_tokens
        load.num_requests += 1
        load.num_tokens += route.num_tokens
        load.num_uncached += num_uncached
        self._decay_weight *= 1.0 + 1.0 / (_NUM_RECENT_ROUTES * num_engines)
        load.recent_uncached += num_uncached * self._decay_weight
        if self._decay_weight > _MAX_DECAY_WEIGHT:
            for other in self._loads.values():
                other.recent_uncached /= self._decay_weight
            self._decay_weight = 1.0


def _check_candidates(candidates: Sequence[Candidate]) -> None:
    """Raise InvalidRequestError for malformed candidates or repeated keys."""
    candidate_tuple = check.bounded_tuple("candidates", candidates, "a list of candidates")
    for i, candidate in enumerate(candidate_tuple):
        try:
            if (
                type(candidate) is Candidate
                and isinstance(candidate.stats, EngineStats)
                and 0 <= candidate.cached_tokens < math.inf
                and 0 <= candidate.missing_tokens < math.inf
                and 0 <= candidate.retry_after < math.inf
            ):
                continue
        except TypeError:
            pass
        name = f"candidates[{i}]"
        if not isinstance(candidate, Candidate):
            raise check.value_error(name, candidate, "a Candidate")
        if not isinstance(candidate.stats, EngineStats):
            raise check.value_error(f"{name}.stats", candidate.stats, "EngineStats")
        for field_name in ("cached_tokens", "missing_tokens", "retry_after"):
            check.number(
                f"{name}.{field_name}", getattr(candidate, field_name), 0, _MAX_TIME_OR_TOKENS
            )
    keys = [candidate.key for candidate in candidate_tuple]
    try:
        if len(set(keys)) == len(keys):
            return
    except TypeError:
        raise check.value_error("candidates", keys, "keys that can be hashed") from None
    raise check.value_error("candidates", keys, "each key once")


def _expected_cached_tokens(candidate: Candidate, load: _EngineLoad, num_tokens: int) -> int:
    """Tokens of a prompt that are expected to be cached; the last token is always computed."""
    return min(int(candidate.cached_tokens * load.hit_accuracy), num_tokens - 1)


def _clamp_rate(rate: float, median: float) -> float:
    """Rate of an engine, clamped to within a factor of the median rate."""
    if not rate > 0.0 or median / _RATE_TOLERANCE_FACTOR < rate < median * _RATE_TOLERANCE_FACTOR:
        return median
    return min(max(rate, median / _MAX_RATIO_TO_MEDIAN_RATE), median * _MAX_RATIO_TO_MEDIAN_RATE)


def _median_token_rate(candidates: Iterable[Candidate]) -> float:
    """Median of the known rates in tokens a second; 1.0 if none is known."""
    rates = [candidate.stats.prompt_tokens_per_second for candidate in candidates]
    known = [rate for rate in rates if 0.0 < rate < math.inf]
    return statistics.median(known) if known else 1.0


def block_hashes(
    token_ids: Sequence[int], block_size: int, cache_salt: str | None = None
) -> list[bytes]:
    """Hashes of a prompt's full blocks, equal in every process.

    Args:
        token_ids: the prompt.
        block_size: tokens of a block.
        cache_salt: prompts with different salts have no hash in common.

    Raises:
        InvalidRequestError: for an argument of a wrong type, or a ``block_size`` below 1.
    """
    block_size = check.integer("block_size", block_size, 1)
    cache_salt = check.string("cache_salt", cache_salt, allow_empty=True, optional=True)
    hashes: list[bytes] = []
    try:
        append_block_hashes(hashes, token_ids, block_size, cache_salt)
    except (TypeError, OverflowError):
        raise check.value_error("token_ids", token_ids, "integers from 0 to 2**32 - 1") from None
    return hashes


def text_hashes(text: str, cache_salt: str | None = None) -> list[bytes]:
    """Hashes of the pieces of a text that is not tokenised yet. A piece has 2048 characters, and
    its hash covers the text up to the end of the piece. Only the first 32 pieces have hashes. A
    shorter piece at the end has none, because the text may grow.

    Args:
        text: the beginning of the prompt, or all of it.
        cache_salt: texts with different salts have no hash in common.

    Raises:
        InvalidRequestError: for an argument of a wrong type.
    """
    if not isinstance(text, str):
        raise check.value_error("text", text, "a string")
    cache_salt = check.string("cache_salt", cache_salt, allow_empty=True, optional=True)
    hashes, parent = [], root_hash(cache_salt)
    for i in range(min(len(text) // TEXT_PIECE_CHARACTERS, _MAX_HASHED_TEXT_PIECES)):
        piece = text[i * TEXT_PIECE_CHARACTERS : (i + 1) * TEXT_PIECE_CHARACTERS].encode(
            "utf-8", "surrogatepass"
        )
        parent = hashlib.blake2b(parent + piece, digest_size=len(parent)).digest()
        hashes.append(parent)
    return hashes


@dataclass(slots=True, eq=False)
class SentPrompt:
    """Record of a prompt that was added to a PrefixIndex.

    Attributes:
        key: the engine that it was sent to.
        hashes: its block hashes.
        known_stamps: for each leading block that the index already had, the stamp of the latest
            prompt with that block; 0 if that prompt is still being computed.
        stamp: serial number of the prompt in the index.
    """

    key: Key
    hashes: Sequence[bytes]
    known_stamps: list[int]
    stamp: int


class PrefixIndex:
    """Index of the prefixes that remote engines are expected to have cached.

    The index records the prompts sent to each engine. Like an engine, it evicts the least recently
    used blocks, tails before heads, so it keeps whole prefixes. Any thread may call its methods.

    Args:
        max_blocks: blocks to remember of each engine: as many as its KV cache has.
        max_age: seconds after which a block that was not sent again is forgotten.

    Raises:
        InvalidRequestError: for an argument of a wrong type or out of range, here and in every
            method; ``param`` names it.
    """

    def __init__(self, max_blocks: int, max_age: float = math.inf) -> None:
        self.max_blocks = check.integer("max_blocks", max_blocks, 1)
        description = "a number of seconds"
        self.max_age = check.number(
            "max_age", max_age, 0, math.inf, exclusive_low=True, description=description
        )
        self._lock = threading.Lock()
        self._keys_by_block: dict[bytes, set[Key]] = {}
        self._blocks: dict[Key, OrderedDict[bytes, tuple[int, float]]] = {}
        self._stamp = 0
        self._pending_stamps: set[int] = set()

    def find(self, hashes: Sequence[bytes], now: float) -> dict[Key, int]:
        """For each engine, the number of the prompt's leading blocks that the engine is expected to
        have cached. Engines without any are left out.

        Args:
            hashes: the prompt's block hashes.
            now: the time in seconds, by the clock of ``add``.
        """
        _check_hashes_and_time(hashes, now)
        with self._lock:
            num_blocks_by_key: dict[Key, int] = {}
            # Bisect: engines in ``keys`` have at least ``low`` and at most ``high`` leading blocks.
            ranges: list[tuple[Set[Key], int, int]] = [(self._blocks.keys(), 0, len(hashes))]
            while ranges:
                keys, low, high = ranges.pop()
                if low == high:
                    num_blocks_by_key.update(dict.fromkeys(keys, low))
                    continue
                middle = (low + high + 1) // 2
                longer_keys = keys & self._keys_by_block.get(hashes[middle - 1], _EMPTY_KEY_SET)
                if longer_keys:
                    ranges.append((longer_keys, middle, high))
                if middle > 1 and len(longer_keys) < len(keys):
                    ranges.append((keys - longer_keys, low, middle - 1))
            if self.max_age < math.inf:
                for key, count in num_blocks_by_key.items():
                    blocks = self._blocks[key]
                    while count and now - blocks[hashes[count - 1]][1] > self.max_age:
                        count -= 1
                    num_blocks_by_key[key] = count
            return {key: count for key, count in num_blocks_by_key.items() if count}

    def add(self, key: Key, hashes: Sequence[bytes], now: float) -> SentPrompt:
        """Add a prompt that is sent to an engine. The prompt counts as being computed until
        ``correct`` or ``withdraw``, one of which has to follow.

        Args:
            key: the engine.
            hashes: the prompt's block hashes.
            now: the time in seconds.
        """
        _check_hashes_and_time(hashes, now)
        with self._lock:
            self._stamp += 1
            blocks = self._blocks.setdefault(key, OrderedDict())
            while blocks and now - next(iter(blocks.values()))[1] > self.max_age:
                self._evict_oldest_block(key, blocks)
            indexed = hashes[: self.max_blocks]
            stamps = []
            for block_hash in indexed:
                entry = blocks.get(block_hash)
                if entry is None:
                    break
                stamps.append(0 if entry[0] in self._pending_stamps else entry[0])
            for block_hash in reversed(indexed):
                blocks[block_hash] = self._stamp, now
                blocks.move_to_end(block_hash)
            for block_hash in indexed[len(stamps) :]:
                self._keys_by_block.setdefault(block_hash, set()).add(key)
            while len(blocks) > self.max_blocks:
                self._evict_oldest_block(key, blocks)
            self._pending_stamps.add(self._stamp)
            return SentPrompt(key, indexed, stamps, self._stamp)

    def correct(self, sent: SentPrompt, num_blocks: int) -> None:
        """Correct the index after a prompt was computed: ``num_blocks`` of its blocks were cached.
        If that is less than expected, the engine has evicted the missing blocks and all less
        recently used blocks, unless another prompt was still computing the first missing block.

        Args:
            num_blocks: leading blocks that were cached: ``usage.cached_tokens // block_size``.
        """
        _check_sent_prompt(sent)
        num_blocks = check.integer("num_blocks", num_blocks, 0)
        with self._lock:
            self._pending_stamps.discard(sent.stamp)
            if num_blocks >= len(sent.known_stamps):
                return
            evicted = sent.known_stamps[num_blocks]
            blocks = self._blocks.get(sent.key, OrderedDict())
            while blocks and next(iter(blocks.values()))[0] <= evicted:
                self._evict_oldest_block(sent.key, blocks)

    def withdraw(self, sent: SentPrompt) -> None:
        """Forget a prompt that the engine did not compute: it was refused, or ended before its
        first token. Blocks that a later prompt shares are kept."""
        _check_sent_prompt(sent)
        with self._lock:
            self._pending_stamps.discard(sent.stamp)
            blocks = self._blocks.get(sent.key, OrderedDict())
            for block_hash in sent.hashes[len(sent.known_stamps) :]:
                if block_hash in blocks and blocks[block_hash][0] == sent.stamp:
                    del blocks[block_hash]
                    self._forget_cached_block(sent.key, block_hash)

    def forget(self, key: Key) -> None:
        """Forget an engine that died, was closed or has emptied its cache."""
        with self._lock:
            for block_hash in self._blocks.pop(key, ()):
                self._forget_cached_block(key, block_hash)

    def _evict_oldest_block(self, key: Key, blocks: OrderedDict[bytes, tuple[int, float]]) -> None:
        oldest, _ = blocks.popitem(last=False)
        self._forget_cached_block(key, oldest)

    def _forget_cached_block(self, key: Key, block_hash: bytes) -> None:
        keys = self._keys_by_block[block_hash]
        keys.remove(key)
        if not keys:
            del self._keys_by_block[block_hash]


def _check_hashes_and_time(hashes: Any, now: Any) -> None:
    check.number("now", now, -_MAX_TIME_OR_TOKENS, _MAX_TIME_OR_TOKENS)
    if not isinstance(hashes, Sequence) or set(map(type, hashes)) - {bytes}:
        raise check.value_error("hashes", hashes, "a list of block hashes")


def _check_sent_prompt(value: Any) -> None:
    if not isinstance(value, SentPrompt):
        raise check.value_error("sent", value, "what add() returned")
