"""What the scheduler costs in Python, on a device that takes no time.

All times are CPU times of the one thread that works.

python -m benchmarks.scheduler [--quick] [--json FILE]
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from dataclasses import dataclass, field

from asyncllm.core.admission import Admission
from asyncllm.core.batch import StepResult
from asyncllm.core.executor import ExecutorInfo
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.core.request import Request, RequestGroup
from asyncllm.core.scheduled_step import ScheduledStep
from asyncllm.core.scheduler import Scheduler
from asyncllm.sampling_params import SamplingParams
from benchmarks.common import Report, cpu_time_of, options
from tests.integrity import check_scheduler

BLOCK_SIZE = 16
VOCAB_SIZE = 50_000
RUNNING = 256
WAITING = 10_000
OWNERS = 1_000


def make_scheduler(
    *, num_blocks: int = 60_000, max_num_seqs: int = RUNNING, budget: int = 8192, depth: int = 1
) -> Scheduler:
    info = ExecutorInfo(
        vocab_size=VOCAB_SIZE,
        num_blocks=num_blocks,
        kv_groups=(KVCacheSpec((0,), BLOCK_SIZE),),
        max_model_len=1 << 20,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        pipeline_depth=depth,
    )
    return Scheduler(info)


def make_request(
    rank: int,
    length: int,
    rng: random.Random,
    *,
    owner: str | None = None,
    max_tokens: int = 100_000,
) -> Request:
    sampling = SamplingParams(seed=0, ignore_eos=True, max_tokens=max_tokens)
    tokens = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
    return Request(
        RequestGroup(f"r{rank}"),
        sampling.resolve({}, {}, lambda: 0),
        token_ids=tokens,
        max_model_len=1 << 20,
        arrival_index=rank,
        owner=owner,
    )


def result_of(step: ScheduledStep) -> StepResult:
    counts = [int(samples) for samples in step.batch.samples]
    return StepResult(step.batch.step, [7] * sum(counts), counts)


@dataclass
class Steps:
    """Times of many steps."""

    schedule: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)

    @property
    def both(self) -> list[float]:
        return [a + b for a, b in zip(self.schedule, self.update, strict=True)]


def decode(scheduler: Scheduler, count: int, depth: int) -> Steps:
    """Runs ``count`` steps with ``depth`` in flight and times each half."""
    steps = Steps()
    in_flight: deque[ScheduledStep] = deque()
    clock = time.thread_time
    while len(steps.update) < count:
        began = clock()
        step = scheduler.schedule()
        scheduled = clock()
        assert step is not None
        in_flight.append(step)
        if len(in_flight) < depth:
            continue
        oldest = in_flight.popleft()
        result = result_of(oldest)
        started = clock()
        deque(scheduler.update(oldest, result), maxlen=0)
        steps.update.append(clock() - started)
        steps.schedule.append(scheduled - began)
    while in_flight:
        oldest = in_flight.popleft()
        deque(scheduler.update(oldest, result_of(oldest)), maxlen=0)
    return steps


def measure_decode(report: Report, count: int, *, waiting: int, depth: int) -> float:
    """Decode steps of 256 requests; their prompts differ in length, so that their blocks
    fill up at different times."""
    rng = random.Random(0)
    scheduler = make_scheduler(depth=depth)
    for rank in range(RUNNING + waiting):
        scheduler.add(make_request(rank, rng.randint(48, 80), rng))
    decode(scheduler, 20, depth)
    steps = decode(scheduler, count, depth)
    assert len(scheduler.running) == RUNNING
    assert len(scheduler.waiting) == waiting
    name = f"{RUNNING} decoding, {waiting} waiting, {depth} in flight"
    report.add_times(f"{name}: schedule", steps.schedule, "ms")
    report.add_times(f"{name}: update", steps.update, "ms")
    report.add_times(f"{name}: both", steps.both, "ms")
    check_scheduler(scheduler)
    return statistics.median(steps.both)


@dataclass
class Crowd:
    """A scheduler whose requests end after 128 to 384 tokens, each of them replaced by a new one.

    Attributes:
        owners: number of owners, to which requests belong by chance.
        spent: seconds in the scheduler.
    """

    owners: int
    scheduler: Scheduler = field(default_factory=make_scheduler)
    rng: random.Random = field(default_factory=lambda: random.Random(3))
    arrived: int = 0
    spent: float = 0.0
    _made: list[Request] = field(default_factory=list)

    def arrive(self) -> None:
        if not self._made:
            self._made = [self._make() for _ in range(RUNNING + WAITING)]
            # Requests that were made together are neighbours in memory, which makes a batch of them
            # faster; whom turns bring together are none.
            self.rng.shuffle(self._made)
        request = self._made.pop()
        request.arrival_index = self.arrived
        self.arrived += 1
        began = time.thread_time()
        self.scheduler.add(request)
        self.spent += time.thread_time() - began

    def _make(self) -> Request:
        rng = self.rng
        length, max_tokens = rng.randint(24, 40), rng.randint(128, 384)
        owner = f"owner {rng.randrange(self.owners)}"
        return make_request(0, length, rng, owner=owner, max_tokens=max_tokens)

    def run(self, count: int) -> float:
        """Seconds that ``count`` steps take in the scheduler, arrivals included."""
        self.spent = 0.0
        for _ in range(count):
            while len(self.scheduler.running) + len(self.scheduler.waiting) < RUNNING + WAITING:
                self.arrive()
            steps = decode(self.scheduler, 1, 1)
            self.spent += sum(steps.both)
        return self.spent


def measure_owners(report: Report, rounds: int) -> None:
    """Steps in which about one of 256 requests ends, with 10,000 waiting, of 1,000 owners and of
    one. Both run in turns, so that the machine's noise falls on both."""
    many, one = Crowd(OWNERS), Crowd(1)
    for crowd in (many, one):
        crowd.run(100)
    pairs = [(many.run(20), one.run(20)) for _ in range(rounds)]
    for crowd in (many, one):
        check_scheduler(crowd.scheduler)
    of_many, of_one = zip(*pairs, strict=True)
    name = f"{RUNNING} decoding, one ending, {WAITING} waiting"
    report.add_times(f"{name} of {OWNERS} owners", [one / 20 for one in of_many], "ms")
    report.add_times(f"{name} of one owner", [one / 20 for one in of_one], "ms")
    report.add(f"{OWNERS} owners against one", statistics.median(a / b for a, b in pairs), "×")


def measure_lengths(report: Report, repeats: int) -> None:
    """Prompts of growing length: hashing and allocating, and finding all of it again."""
    rng = random.Random(1)
    for length in (1_000, 4_000, 16_000, 64_000):
        cold, warm, freed = [], [], []
        for i in range(repeats):
            scheduler = make_scheduler(num_blocks=10_000, budget=1 << 20)
            first = make_request(2 * i, length, rng)
            second = make_request(2 * i + 1, length, rng)
            second.token_ids[:] = first.token_ids
            for request, times in ((first, cold), (second, warm)):
                scheduler.add(request)
                times.append(cpu_time_of(scheduler.schedule))
                freed.append(cpu_time_of(lambda r=request, s=scheduler: s.finish(r, "abort")))
            check_scheduler(scheduler)
        for what, times in (("first time", cold), ("cached", warm), ("freed", freed)):
            per_token = statistics.median(times) / length
            total = statistics.median(times) * 1e3
            report.add(f"{length} tokens, {what}", per_token, "ns", f"a token; {total:.2f} ms")


def measure_admission(report: Report, repeats: int) -> None:
    """1,000 requests at once: the places they take in the queue, and the step that lets them
    all in."""
    rng = random.Random(2)
    reserving, entering, leaving = [], [], []
    for _ in range(repeats):
        scheduler = make_scheduler(max_num_seqs=1024, budget=1 << 20)
        requests = [make_request(rank, 64, rng) for rank in range(1000)]
        admission = Admission(2000, 1 << 30, time.monotonic)

        def reserve(admission: Admission = admission, requests=requests) -> None:
            for request in requests:
                admission.reserve(request.group, 64)

        def enter(scheduler: Scheduler = scheduler, requests=requests) -> None:
            for request in requests:
                scheduler.add(request)
            step = scheduler.schedule()
            assert step is not None
            assert len(step.admitted) == 1000

        def leave(scheduler: Scheduler = scheduler, requests=requests) -> None:
            for request in requests:
                scheduler.finish(request, "abort")

        reserving.append(cpu_time_of(reserve))
        entering.append(cpu_time_of(enter))
        leaving.append(cpu_time_of(leave))
    report.add_times("1,000 places in the queue", reserving, "ms")
    report.add_times("1,000 prompts of 64 tokens into one step", entering, "ms")
    report.add_times("1,000 running requests aborted", leaving, "ms")


def main() -> None:
    arguments = options(__doc__).parse_args()
    count, repeats = (100, 3) if arguments.quick else (1000, 15)
    report = Report("scheduler")
    report.section("a decode step")
    alone = measure_decode(report, count, waiting=0, depth=1)
    crowded = measure_decode(report, count, waiting=WAITING, depth=1)
    report.add("10,000 waiting against none", crowded / alone, "×")
    measure_decode(report, count, waiting=0, depth=2)
    measure_owners(report, count // 10)
    report.section("prompts: hashing, allocating, finding")
    measure_lengths(report, repeats)
    report.section("admission")
    measure_admission(report, repeats)
    report.write(arguments.json)


if __name__ == "__main__":
    main()
