"""What routing finds of conversations' prefixes, and what it costs in time to the first token: on
many replicas, simulated with their real step loops, schedulers and statistics on virtual time.

A step takes a time of its own, one for each prompt token and one for each running request.
Conversations begin with one of a few prompts that they share, the first far more often than the
last. Every turn adds to the prompt before it. Four routers are compared:

- round robin;
- load alone: statistics of a second ago, nothing of prefixes;
- routed: the same statistics, and an index of what was sent;
- all-knowing: reads each engine's statistics and cache at the moment of the choice.

python -m benchmarks.routing [--quick] [--json FILE] [--replicas 1000] [--conversations 1000]
"""

from __future__ import annotations

import functools
import gc
import heapq
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from asyncllm.core.admission import Admission
from asyncllm.core.batch import StepBatch, StepResult
from asyncllm.core.engine_core import EngineCore
from asyncllm.core.executor import ExecutorInfo
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.core.output_processor import DetokenizerState
from asyncllm.core.request import Request, RequestGroup
from asyncllm.core.scheduler import Scheduler
from asyncllm.outputs import Usage
from asyncllm.routing import Candidate, PrefixIndex, Route, Router, SentPrompt
from asyncllm.sampling_params import SamplingParams
from asyncllm.testing import FakeExecutor
from asyncllm.text.detokenizer import NullDetokenizer
from benchmarks.common import Report, cpu_time_of, options, percentile

BLOCK_SIZE = 64
STEP_SECONDS, PROMPT_TOKEN_SECONDS, RUNNING_SECONDS = 0.010, 0.00005, 0.0002
MAIL_SECONDS = 1.0
TURNS, QUESTION_TOKENS, ANSWER_TOKENS = 43, (48, 176), 8
NUM_SHARED, SHARED_TOKENS = 50, (512, 2048)
THINKING_SECONDS = 0.25

INFO = ExecutorInfo(
    vocab_size=50_000,
    num_blocks=257,
    kv_groups=(KVCacheSpec((0,), BLOCK_SIZE),),
    max_model_len=256 * BLOCK_SIZE,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
)


class TimedExecutor(FakeExecutor):
    """FakeExecutor whose steps take virtual time, and that computes no digests."""

    def __init__(self, info: ExecutorInfo) -> None:
        super().__init__(info)
        self._kv_digests.clear()
        self.now = 0.0

    def _execute(self, batch: StepBatch) -> StepResult:
        self.now += STEP_SECONDS + RUNNING_SECONDS * batch.num_decodes
        self.now += PROMPT_TOKEN_SECONDS * (batch.num_tokens - batch.num_decodes)
        counts = [int(samples) for samples in batch.samples]
        return StepResult(batch.step, [7] * sum(counts), counts)


class Replica:
    """Engine on virtual time."""

    def __init__(self, key: int, info: ExecutorInfo = INFO) -> None:
        self.executor = executor = TimedExecutor(info)
        admission = Admission(1 << 20, 1 << 40, self.clock)
        self.core = EngineCore(executor, Scheduler(info), admission, clock=self.clock)
        self.candidate = Candidate(key, self.core.stats())
        self.is_busy = False

    def clock(self) -> float:
        return self.executor.now

    def add(self, request: Request) -> None:
        self.core.admission.reserve(request.group, request.num_prompt_tokens)
        self.core.send(self.core.on_add, request.group)

    def has_work(self) -> bool:
        return self.core.scheduler.has_work() or not self.core.inbox.empty()


class RoundRobin:
    """Router that knows nothing."""

    def __init__(self, replicas: list[Replica], changed: set[Replica]) -> None:
        self._keys = itertools.cycle(range(len(replicas)))

    def choose(self, request: Request, now: float) -> int:
        return next(self._keys)

    def started(self, request: Request) -> None: ...

    def finished(self, request: Request, cached_tokens: int) -> None: ...


class Routed:
    """The package's router. Each replica's statistics come once a second.

    Args:
        changed: replicas that have run since it was last cleared.
        uses_prefixes: keep an index of what was sent.
    """

    def __init__(
        self, replicas: list[Replica], changed: set[Replica], uses_prefixes: bool = True
    ) -> None:
        self.router = Router()
        self.index = PrefixIndex(INFO.num_blocks - 1) if uses_prefixes else None
        self.replicas, self.changed = replicas, changed
        self.candidates = [replica.candidate for replica in replicas]
        self._num_mails = 0
        self._routes: dict[Request, Route] = {}
        self._sent: dict[Request, SentPrompt] = {}

    def choose(self, request: Request, now: float) -> int:
        self.read_statistics(now)
        hits = self.find(request, now)
        for key, cached_tokens in hits.items():
            self.candidates[key].cached_tokens = cached_tokens
        for one in self.candidates:
            free_tokens = one.stats.num_free_blocks * BLOCK_SIZE
            lacking = request.num_prompt_tokens - one.cached_tokens
            one.missing_tokens = lacking - free_tokens if lacking > free_tokens else 0
        route = self.router.choose(self.candidates, request.num_prompt_tokens)
        for key in hits:
            self.candidates[key].cached_tokens = 0
        self._routes[request] = route
        if self.index is not None:
            hashes = request.extend_hashes(BLOCK_SIZE)
            self._sent[request] = self.index.add(route.key, hashes, now)
        assert isinstance(route.key, int)
        return route.key

    def read_statistics(self, now: float) -> None:
        count = len(self.replicas)
        due = int(now / MAIL_SECONDS * count)
        for i in range(max(self._num_mails, due - count), due):
            replica = self.replicas[i % count]
            replica.candidate.stats = replica.core.stats()
        self._num_mails = due

    def find(self, request: Request, now: float) -> dict[int, int]:
        if self.index is None:
            return {}
        hashes = request.extend_hashes(BLOCK_SIZE)
        return {
            key: blocks * BLOCK_SIZE
            for key, blocks in self.index.find(hashes, now).items()
            if isinstance(key, int)
        }

    def started(self, request: Request) -> None:
        self.router.settle(self._routes.pop(request), request.num_cached_tokens)

    def finished(self, request: Request, cached_tokens: int) -> None:
        if self.index is not None:
            self.index.correct(self._sent.pop(request), cached_tokens // BLOCK_SIZE)


class AllKnowing(Routed):
    """The package's router with each engine's statistics and cache as they are."""

    def __init__(self, replicas: list[Replica], changed: set[Replica]) -> None:
        super().__init__(replicas, changed)
        # What was ever sent: an engine that was not sent a block does not have it.
        self.index = PrefixIndex(1 << 40)

    def read_statistics(self, now: float) -> None:
        for replica in self.changed:
            replica.candidate.stats = replica.core.stats()
        self.changed.clear()

    def find(self, request: Request, now: float) -> dict[int, int]:
        found = super().find(request, now)
        return {key: self.replicas[key].core.num_cached_tokens(request) for key in found}

    def finished(self, request: Request, cached_tokens: int) -> None:
        del self._sent[request]


ROUTERS: dict[str, Callable[[list[Replica], set[Replica]], Any]] = {
    "round robin": RoundRobin,
    "load alone": functools.partial(Routed, uses_prefixes=False),
    "routed": Routed,
    "all-knowing": AllKnowing,
}


def make_request(name: str, token_ids: list[int], now: float = 0.0) -> Request:
    return Request(
        RequestGroup(name, arrived_at=now),
        SamplingParams(seed=0, temperature=0.0, ignore_eos=True, max_tokens=ANSWER_TOKENS),
        token_ids=token_ids,
        max_model_len=INFO.max_model_len,
        output=DetokenizerState(str, NullDetokenizer()),
    )


@dataclass
class Conversation:
    """Conversation of a user who reads each answer and asks again."""

    rng: random.Random
    token_ids: list[int]
    num_turns: int


@dataclass
class Turn:
    """Notifier of one request."""

    simulation: Simulation
    conversation: Conversation
    replica: Replica
    request: Request

    def notify_first_token(self) -> None:
        simulation, now = self.simulation, self.replica.executor.now
        simulation.waits.append(now - self.request.arrived_at)
        simulation.at(now, simulation.router.started, self.request)

    def notify_finish(self, usage: Usage, error: BaseException | None) -> None:
        assert error is None, error
        simulation, now = self.simulation, self.replica.executor.now
        simulation.num_prompt_tokens += usage.prompt_tokens
        simulation.num_cached_tokens += usage.cached_tokens
        simulation.at(now, simulation.router.finished, self.request, usage.cached_tokens)
        one = self.conversation
        one.num_turns -= 1
        if one.num_turns:
            one.token_ids = list(self.request.token_ids)
            thinking = one.rng.expovariate(1 / THINKING_SECONDS)
            simulation.at(now + thinking, simulation.ask, one)


@dataclass
class Simulation:
    """Replicas, conversations and a router on virtual time.

    Attributes:
        waits: seconds to the first token of each request.
        seconds: CPU seconds that each choice took, the prompt's hashes excepted.
    """

    router_name: str
    num_replicas: int
    num_conversations: int
    num_turns: int = TURNS
    waits: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    now: float = 0.0
    _events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = field(
        default_factory=list
    )

    def __post_init__(self) -> None:
        self.replicas = [Replica(i) for i in range(self.num_replicas)]
        self._changed: set[Replica] = set()
        self.router = ROUTERS[self.router_name](self.replicas, self._changed)
        self._serial = itertools.count()
        rng = random.Random(0)
        shared = [
            [rng.randrange(INFO.vocab_size) for _ in range(rng.randint(*SHARED_TOKENS))]
            for _ in range(NUM_SHARED)
        ]
        weights = [1 / (rank + 1) for rank in range(NUM_SHARED)]
        for i in range(self.num_conversations):
            own = random.Random(i)
            (begin,) = own.choices(shared, weights)
            begins_at = own.uniform(0.0, self.num_turns * 4 * THINKING_SECONDS)
            self.at(begins_at, self.ask, Conversation(own, begin, self.num_turns))

    def at(self, when: float, run: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (when, next(self._serial), run, args))

    def run(self) -> None:
        while self._events:
            self.now, _, run, args = heapq.heappop(self._events)
            run(*args)

    def ask(self, conversation: Conversation) -> None:
        rng = conversation.rng
        question = [rng.randrange(INFO.vocab_size) for _ in range(rng.randint(*QUESTION_TOKENS))]
        name = f"r{next(self._serial)}"
        request = make_request(name, conversation.token_ids + question, self.now)
        request.extend_hashes(BLOCK_SIZE)
        began = time.thread_time()
        key = self.router.choose(request, self.now)
        self.seconds.append(time.thread_time() - began)
        replica = self.replicas[key]
        request.group.notifier = Turn(self, conversation, replica, request)
        replica.add(request)
        self._changed.add(replica)
        if not replica.is_busy:
            replica.is_busy = True
            replica.executor.now = self.now
            self.at(self.now, self.step, replica)

    def step(self, replica: Replica) -> None:
        replica.core.step()
        self._changed.add(replica)
        if replica.has_work():
            self.at(replica.executor.now, self.step, replica)
        else:
            replica.is_busy = False

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were cached."""
        return self.num_cached_tokens / self.num_prompt_tokens

    @property
    def p99(self) -> float:
        """99th percentile of the seconds to the first token."""
        found = percentile(self.waits, 0.99)
        assert found is not None
        return found

    @property
    def load_ratio(self) -> float:
        """Most tokens that a replica computed, by the mean of all."""
        loads = [
            stats.prompt_tokens - stats.prefix_cache_hits
            for stats in (replica.core.stats() for replica in self.replicas)
        ]
        return max(loads) * len(loads) / sum(loads)


def simulate(report: Report, name: str, size: tuple[int, int, int]) -> Simulation:
    gc.collect()
    simulation = Simulation(name, *size)
    seconds = cpu_time_of(simulation.run)
    report.section(f"{name}: {len(simulation.waits)} requests")
    report.add("prompt tokens found", simulation.hit_rate, "")
    report.add("to the first token, median", percentile(simulation.waits, 0.5), "ms")
    report.add("to the first token, p99", simulation.p99, "ms")
    report.add("largest load / mean", simulation.load_ratio, "×", "prompt tokens computed")
    report.add("a choice", percentile(simulation.seconds, 0.5), "ms", "CPU, statistics included")
    report.add("virtual time", simulation.now, "s", f"{seconds:.0f} s of CPU")
    return simulation


def measure_choices(report: Report, count: int) -> None:
    """CPU time of a choice for a hashed prompt of 4,096 tokens in blocks of 16: among 8 engines in
    reach that have all of it, whose statistics and caches are read; and among 1,000 by an index in
    which each of them has its beginning, and 50 have all of it."""
    info = replace(INFO, num_blocks=1000, kv_groups=(KVCacheSpec((0,), 16),))
    rng = random.Random(0)
    prompt = [rng.randrange(INFO.vocab_size) for _ in range(4096)]
    replicas = [Replica(i, info) for i in range(8)]
    for replica in replicas:
        replica.add(make_request("r", list(prompt)))
        while replica.has_work():
            replica.core.step()
    router, hashed = Router(), make_request("r", list(prompt))
    hashes = hashed.extend_hashes(16)

    def ask() -> Route:
        return router.choose(
            [
                Candidate(i, replica.core.stats(), replica.core.num_cached_tokens(hashed))
                for i, replica in enumerate(replicas)
            ],
            len(prompt),
        )

    assert ask().cached_tokens == 4080
    report.add_times("among 8 in reach", [cpu_time_of(ask) for _ in range(count)], "ms")
    index, router = PrefixIndex(info.num_blocks), Router()
    for i in range(1000):
        index.add(i, hashes if i % 20 == 0 else hashes[: 1 + i % 200], 0.0)
    stats = replicas[0].core.stats()
    candidates = [Candidate(i, stats) for i in range(1000)]

    def find() -> Route:
        for key, blocks in index.find(hashes, 0.0).items():
            assert isinstance(key, int)
            candidates[key].cached_tokens = 16 * blocks
        return router.choose(candidates, len(prompt))

    assert find().cached_tokens == 4095
    report.add_times("among 1,000 by the index", [cpu_time_of(find) for _ in range(count)], "ms")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--conversations", type=int, default=1000)
    arguments = parser.parse_args()
    size = arguments.replicas, arguments.conversations, TURNS
    if arguments.quick:
        size = 16, 48, 8
    report = Report("routing", {"replicas": str(size[0]), "conversations": str(size[1])})
    report.section("a choice for 4,096 tokens, CPU")
    measure_choices(report, 50 if arguments.quick else 1000)
    done = {name: simulate(report, name, size) for name in ROUTERS}
    ours, best = done["routed"], done["all-knowing"]
    report.section("routed / all-knowing")
    report.add("prompt tokens found", ours.hit_rate / best.hit_rate, "×", "goal: at least 0.9")
    report.add("to the first token, p99", ours.p99 / best.p99, "×", "goal: at most 1.2")
    report.write(arguments.json)


if __name__ == "__main__":
    main()
