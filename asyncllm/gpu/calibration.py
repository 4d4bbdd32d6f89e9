"""calibrate_scheduler: chooses the token budget and the pipeline depth by timing steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from asyncllm.config import EngineConfig
from asyncllm.core.batch import SlotAssignment, StepBatch
from asyncllm.gpu.batch.step_buffer import make_dummy_batch
from asyncllm.gpu.execution_mode import ExecutionMode
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.packed.packed_store import PackedStore
from asyncllm.gpu.threads import available_cpus, cpu_model, cpu_wait_seconds
from asyncllm.logger import get_logger
from asyncllm.sampling_params import SamplingParams

logger = get_logger(__name__)

CPU_STEP_TARGET_SECONDS = 0.2
"""Target duration of a full step on a CPU."""

GPU_STEP_TARGET_SECONDS = 0.05
"""Target duration of a full step on a GPU: while a prompt is prefilled, the tokens of every running
stream are that far apart."""

MIN_TOKEN_BUDGET = 64
MAX_CPU_TOKEN_BUDGET = 2048
"""Largest token budget that is tried on a CPU; on a GPU it is the device's default."""

TOKEN_BUDGET_MULTIPLE = 32

MAX_ASYNC_STEP_SECONDS = 0.01
"""Maximum duration of a full decode step with which the pipeline depth may be 2. At that depth an
abort or a first token waits for two steps."""

MIN_ASYNC_STEP_SECONDS = 0.0005
"""Minimum duration of a step that is worth starting right after the previous step, without waiting
for the host."""

MAX_CPU_WAIT_FRACTION = 0.2
"""Maximum fraction of a calibration's time that is spent waiting for a CPU. The result of a
calibration that waited longer is not stored for later starts."""

_INITIAL_STEP_TOKENS = 8, 32
"""Token counts of the first two timed steps. If the first of them takes half of the target or more,
the budget is MIN_TOKEN_BUDGET and the second is not timed."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Settings that were chosen by timing steps; None leaves a setting unchanged.

    Attributes:
        token_budget: maximum number of tokens of a step.
        min_async_tokens: see ``ModelRunner.enable_async_scheduling``.
    """

    token_budget: int | None = None
    min_async_tokens: int | None = None

    @classmethod
    def from_json(cls, fields: Any) -> Calibration | None:
        """Makes a Calibration from parsed JSON; None if a field or value is invalid."""
        values = tuple(fields.values()) if isinstance(fields, dict) else ("",)
        are_counts = all(
            one is None or (type(one) is int and 0 < one <= MAX_CPU_TOKEN_BUDGET) for one in values
        )
        return cls(**fields) if are_counts and set(fields) == set(cls.__slots__) else None

    def apply(self, runner: ModelRunner) -> None:
        if self.token_budget is not None:
            runner.set_token_budget(self.token_budget)
            logger.info("a step has at most %d tokens", self.token_budget)
        if self.min_async_tokens is not None:
            runner.enable_async_scheduling(self.min_async_tokens)


def calibrate_scheduler(
    runner: ModelRunner, config: EngineConfig, mode: ExecutionMode
) -> Calibration:
    """Times steps to choose the token budget and, on a CPU, the smallest step that begins early.

    It chooses only settings that the configuration leaves open, and applies them. Call it once the
    kernels are compiled.
    """
    seconds_by_tokens: dict[int, float] = {}

    def time_step(num_tokens: int) -> float:
        seconds_by_tokens[num_tokens] = seconds = time_prefill(runner, num_tokens)
        return seconds

    info, budget, min_async_tokens = runner.info, None, None
    if config.max_num_batched_tokens == "auto":
        options: dict[str, Any] = {}
        if mode.stream.is_async:
            most = info.max_num_batched_tokens
            options = {"target_seconds": GPU_STEP_TARGET_SECONDS, "max_budget": most, "repeats": 2}
        budget = calibrate_token_budget(time_step, **options)
    if config.async_scheduling is None and runner.can_schedule_async:
        most = min(info.max_num_seqs, budget or info.max_num_batched_tokens)
        min_async_tokens = find_min_async_tokens(time_step, most, seconds_by_tokens)
    found = Calibration(budget, min_async_tokens)
    found.apply(runner)
    return found


def load_or_calibrate(
    runner: ModelRunner, config: EngineConfig, mode: ExecutionMode, store: PackedStore
) -> dict[str, Any]:
    """Applies the calibration of an earlier start, or calibrates.

    A stored calibration is valid for the same weights, processor, numbers of threads and cores, and
    settings that affect a step's time. A calibration that waited long for a core is not stored.

    Returns:
        ``{file name: calibration}``, which the store writes; empty if no file is to be written.
    """
    name = store.calibration_name(
        {
            "processor": cpu_model(),
            "threads": store.num_threads,
            "cores": available_cpus(),
            "max_num_seqs": runner.info.max_num_seqs,
            "max_model_len": runner.info.max_model_len,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "async_scheduling": config.async_scheduling,
        }
    )
    kept = Calibration.from_json(store.read_sidecar(name))
    if kept is not None:
        kept.apply(runner)
        return {}
    began, before = time.perf_counter(), cpu_wait_seconds()
    found = calibrate_scheduler(runner, config, mode)
    seconds, waited = time.perf_counter() - began, cpu_wait_seconds() - before
    may_keep = found != Calibration() and waited <= MAX_CPU_WAIT_FRACTION * seconds
    return {name: asdict(found)} if may_keep else {}


def time_prefill(runner: ModelRunner, num_tokens: int) -> float:
    """Seconds of one step that prefills ``num_tokens`` tokens.

    No row is longer than ``max_model_len``. All rows write the same blocks, which are not read
    afterwards.
    """
    info = runner.info
    rows = -(-num_tokens // info.max_model_len)
    count = num_tokens // rows
    blocks = tuple(list(range(1, -(-count // g.block_size) + 1)) for g in info.kv_groups)
    sampling = SamplingParams(temperature=0.0, seed=0).resolve({}, {}, lambda: 0)
    batch = make_prefill_batch(
        [
            SlotAssignment(req_index, "warm-up", [0] * count, count, blocks, sampling)
            for req_index in range(min(rows, info.max_num_seqs))
        ]
    )
    start = time.perf_counter()
    runner.launch(batch)
    runner.collect()
    return time.perf_counter() - start


def make_prefill_batch(assignments: list[SlotAssignment]) -> StepBatch:
    """Makes a batch that prefills whole prompts and samples a token after each."""
    counts = [assignment.num_prompt_tokens for assignment in assignments]
    batch = make_dummy_batch([0] * len(counts), counts)
    batch.req_indices = [assignment.req_index for assignment in assignments]
    batch.assignments = assignments
    return batch


def calibrate_token_budget(
    time_step: Callable[[int], float],
    *,
    target_seconds: float = CPU_STEP_TARGET_SECONDS,
    max_budget: int = MAX_CPU_TOKEN_BUDGET,
    repeats: int = 1,
) -> int:
    """Finds the token count of a prefill step that takes about ``target_seconds``.

    The timed steps have short contexts; attention over a long context makes a full step at most a
    quarter longer.

    Steps of 8 and 32 tokens, and then of doubling size, are timed until one takes half of
    ``target_seconds``. Shorter steps predict a full step badly: most of their time goes into
    reading the weights, which takes no longer in a larger step. A step of one token runs
    first as a warm-up, and is not timed.

    Args:
        time_step: runs a step of the given number of tokens and returns its seconds.
        max_budget: largest budget in tokens, at least MIN_TOKEN_BUDGET.
        repeats: number of steps timed per size. The shortest time counts, because the first step
            of a size may have to load kernels.

    Returns:
        A multiple of 32 from 64 to ``max_budget``, or ``max_budget`` itself.
    """

    def shortest_step_seconds(num_tokens: int) -> float:
        return min(time_step(num_tokens) for _ in range(repeats))

    size, second = _INITIAL_STEP_TOKENS
    time_step(1)
    seconds = shortest_step_seconds(size)
    while seconds < target_seconds / 2 and size * 2 <= max_budget:
        size = max(second, size * 2)
        seconds = shortest_step_seconds(size)
    tokens = int(size * target_seconds / max(seconds, 1e-9))
    return max(
        MIN_TOKEN_BUDGET, min(max_budget, tokens // TOKEN_BUDGET_MULTIPLE * TOKEN_BUDGET_MULTIPLE)
    )


def find_min_async_tokens(
    time_step: Callable[[int], float],
    max_num_seqs: int,
    seconds_by_tokens: Mapping[int, float],
) -> int | None:
    """Finds the smallest step, in tokens, that is worth starting before the host asks for it.

    Such a step starts on the native library's thread, right after the previous step.

    It has to take at least half a millisecond. A shorter step takes less time than the Python code
    of the engine thread and the event loop, so that the library's thread would only wait for the
    GIL.

    After a warm-up step of one token, a step of eight tokens is timed. If it takes too long, no
    larger step runs, so that the start of a large, slow model is delayed little.

    Args:
        time_step: runs a step of the given number of tokens and returns its seconds.
        seconds_by_tokens: seconds of steps that were timed before, by token count. If it has the
            step of eight tokens, that step is not run again.

    Returns:
        None if no second step should be in flight: a step of eight tokens takes more than 10 ms,
        or a step of one token per sequence takes more than 20 ms the first time or more than 10 ms
        in the best of three runs.
    """
    few = min(_INITIAL_STEP_TOKENS[0], max_num_seqs)
    seconds = seconds_by_tokens.get(few)
    if seconds is None:
        time_step(1)
        seconds = time_step(few)
    if seconds > MAX_ASYNC_STEP_SECONDS:
        return None
    seconds = time_step(max_num_seqs)
    if seconds < 2 * MAX_ASYNC_STEP_SECONDS:
        seconds = min(seconds, time_step(max_num_seqs), time_step(max_num_seqs))
    if seconds > MAX_ASYNC_STEP_SECONDS:
        return None
    return max(1, round(max_num_seqs * MIN_ASYNC_STEP_SECONDS / max(seconds, 1e-9)))
