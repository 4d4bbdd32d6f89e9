"""calibrate: chooses settings by timing steps."""

from __future__ import annotations

import time
from typing import Any

from asyncllm.config import EngineConfig
from asyncllm.core.batch import RequestAssignment, StepBatch
from asyncllm.gpu.batch.step_buffer import plain_batch
from asyncllm.gpu.execution_mode import ExecutionMode
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.token_budget import GPU_TARGET_SECONDS, calibrate_token_budget, min_tokens_ahead
from asyncllm.logger import get_logger
from asyncllm.sampling_params import SamplingParams

logger = get_logger(__name__)


def calibrate(runner: ModelRunner, config: EngineConfig, mode: ExecutionMode) -> None:
    """Times steps to choose the token budget and, on a CPU, run-ahead.

    It chooses only settings that the configuration leaves open. Compile the kernels first.
    """
    known: dict[int, float] = {}

    def time_step(count: int) -> float:
        known[count] = seconds = time_prefill(runner, count)
        return seconds

    if config.max_num_batched_tokens == "auto":
        options: dict[str, Any] = {}
        if mode.stream.is_async:
            most = runner.info.max_num_batched_tokens
            options = {"target": GPU_TARGET_SECONDS, "highest": most, "repeats": 2}
        measured = calibrate_token_budget(time_step, **options)
        runner.set_token_budget(measured)
        logger.info("a step has at most %d tokens", measured)
    if config.async_scheduling is None and runner.can_run_ahead:
        most = min(runner.info.max_num_seqs, runner.info.max_num_batched_tokens)
        found = min_tokens_ahead(time_step, most, known)
        if found is not None:
            runner.run_ahead(found)


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
    batch = prefill_step(
        [
            RequestAssignment(req_index, "warm-up", [0] * count, count, blocks, sampling)
            for req_index in range(min(rows, info.max_num_seqs))
        ]
    )
    start = time.perf_counter()
    runner.launch(batch)
    runner.collect()
    return time.perf_counter() - start


def prefill_step(assignments: list[RequestAssignment]) -> StepBatch:
    """Makes a first step that computes whole prompts and samples a token after each."""
    counts = [assignment.num_prompt_tokens for assignment in assignments]
    batch = plain_batch([0] * len(counts), counts)
    batch.req_indices = [assignment.req_index for assignment in assignments]
    batch.assignments = assignments
    return batch
