"""What a decode step on a CPU takes of the engine thread, recorded and op by op in turns.

Times are CPU times of the calling thread, medians; with several threads it works beside the
others, and waits for them in spinning.

python -m benchmarks.cpu_step [--model DIR] [--dtype D] [--threads N] [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import asyncllm
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.config import EngineConfig
from asyncllm.core.batch import SlotAssignment, StepBatch
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.calibration import make_prefill_batch
from asyncllm.gpu.graph.forward_pass import ForwardPass
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.sampling_params import SamplingParams
from benchmarks.common import Report, cpu_time_of, options

PROMPT = 32
ROWS = (1, 4, 16)
PARTS = ("native calls", "the model's Python", "sampling", "the rest", "all of it")


class Clock:
    """CPU time of this thread in methods that it is put around, since the last ``take``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, owner: Any, name: str, part: str) -> None:
        own = getattr(owner, name)

        def timed(*args: Any) -> Any:
            found: list[Any] = []
            spent = cpu_time_of(lambda: found.append(own(*args)))
            self.seconds[part] = self.seconds.get(part, 0.0) + spent
            return found[0]

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, {}
        return taken


def prompts(rows: int, block_size: int, steps: int) -> StepBatch:
    """The step that prefills ``rows`` prompts, with the blocks of all steps behind it."""
    sampling = SamplingParams(temperature=0.0, seed=0).resolve({}, {}, lambda: 0)
    each = -(-(PROMPT + steps + 1) // block_size)
    return make_prefill_batch(
        [
            SlotAssignment(
                row, f"row-{row}", list(range(1 + row, 1 + row + PROMPT)), PROMPT,
                (list(range(1 + row * each, 1 + (row + 1) * each)),), sampling,
            )
            for row in range(rows)
        ]
    )  # fmt: skip


def step_times(
    runner: ModelRunner,
    replays: tuple[ForwardPass, ForwardPass],
    clock: Clock,
    rows: int,
    count: int,
) -> dict[bool, list[dict]]:
    """The parts of ``count`` decode steps of either kind, by whether they are recorded."""
    state = runner._require_runner()
    recorded, eager = replays
    found: dict[bool, list[dict]] = {True: [], False: []}
    runner.launch(prompts(rows, runner.info.block_size, 2 * count + 10))
    runner.collect()
    indices, ones = list(range(rows)), [1] * rows
    for step in range(2 * count + 10):
        state.forward_pass = recorded if step % 2 else eager
        starts = [PROMPT + step] * rows
        batch = StepBatch(
            step + 1, indices, starts, ones, [True] * rows, num_decodes=rows, num_tokens=rows
        )
        clock.take()
        began = time.thread_time()
        runner.launch(batch)
        runner.collect()
        total, parts = time.thread_time() - began, clock.take()
        # A recorded step is one native call, sampling included.
        native, sampling = parts["native"], parts.get("sampling", 0.0)
        forward = parts.get("forward", native)
        values = native, forward - native, sampling, total - forward - sampling
        if step >= 10:
            found[bool(step % 2)].append(dict(zip(PARTS, (*values, total), strict=True)))
    state.forward_pass = recorded
    runner.launch(StepBatch(2 * count + 11, released_indices=indices))
    runner.collect()
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", metavar="DIR", help="the packaged model unless given")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    path = Path(arguments.model or Path(asyncllm.__file__).parent / "demo_model")
    config = EngineConfig(
        device="cpu", attention_backend="native", num_threads=arguments.threads,
        dtype=arguments.dtype, max_num_batched_tokens=max(ROWS) * PROMPT, max_model_len=256,
        max_num_seqs=max(ROWS), num_blocks=256, async_scheduling=False,
    )  # fmt: skip
    runner = build_model_runner(config, ModelConfig.from_directory(path))
    conditions = {"model": path.name, "dtype": str(runner.dtype), "threads": str(arguments.threads)}
    report = Report("the parts of a decode step on a CPU", conditions)
    state, clock = runner._require_runner(), Clock()
    library: Any = vars(state.model.ops)["context"].functions
    clock.watch(library, "run", "native")
    clock.watch(library, "run_job", "native")
    replays = state.forward_pass, ForwardPass(state.model, state.cache, state.memory)
    clock.watch(replays[1], "forward", "forward")
    clock.watch(state, "_sample_rows", "sampling")
    for rows in ROWS:
        found = step_times(runner, replays, clock, rows, 10 if arguments.quick else 30)
        for recorded, times in found.items():
            report.section(f"{rows} rows, {'recorded' if recorded else 'op by op'}")
            for part in PARTS:
                report.add(part, statistics.median(each[part] for each in times), "ms")
    runner.close()
    report.write(arguments.json)


if __name__ == "__main__":
    main()
