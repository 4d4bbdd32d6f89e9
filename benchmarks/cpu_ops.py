"""Where a step on a CPU spends its time, op by op, beside what its bytes and its products take.

Each op is called alone (the step is not recorded), and timed by the clock; what lies between is the
model's Python, which a recorded step does without. Its floor is the greater of two: the bytes that
it reads over the bandwidth that the engine's own threads measure, and its multiplications over the
rate of the fastest linear layer of 256 rows.

python -m benchmarks.cpu_ops [--model DIR] [--dtype D] [--threads N] [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

import asyncllm
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.config import EngineConfig
from asyncllm.core.batch import SlotAssignment, StepBatch
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.execution_report import measure_memory_bandwidth
from asyncllm.gpu.graph.forward_pass import ForwardPass
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.native.interface import OP_KINDS
from asyncllm.sampling_params import SamplingParams
from benchmarks.common import Report, options

OPS = {
    "linear": "linear layers", "argmax": "output head", "attention": "attention",
    "rms_norm": "norms", "rope_and_cache": "RoPE and KV write", "gated_mul": "activation",
    "gather": "embedding", "select": "picking rows",
}  # fmt: skip


class Kind(NamedTuple):
    """A step: ``rows`` sequences of ``before`` computed tokens, and ``tokens`` more of each."""

    name: str
    rows: int
    before: int
    tokens: int


KINDS = [
    Kind("decode, 1 row behind 128 tokens", 1, 128, 1),
    Kind("decode, 16 rows behind 192 tokens", 16, 192, 1),
    Kind("256 tokens of a prompt, from its start", 1, 0, 256),
    Kind("256 tokens of a prompt, behind 1,792", 1, 1792, 256),
]


class Clock:
    """Seconds in a library's runs of single ops, by the op's name."""

    def __init__(self, library: Any) -> None:
        self.functions, self.seconds = library, {}

    @contextmanager
    def watching(self) -> Iterator[dict[str, float]]:
        run, self.seconds = self.functions.run, dict.fromkeys(OPS, 0.0)

        def timed(context: Any, program: Any, *sizes: Any) -> int:
            began = time.perf_counter()
            status = run(context, program, *sizes)
            name = OP_KINDS[program.ops[0].kind]
            if name in self.seconds:
                self.seconds[name] += time.perf_counter() - began
            return status

        self.functions.run = timed
        try:
            yield self.seconds
        finally:
            self.functions.run = run


def step_of(runner: ModelRunner, kind: Kind, number: int) -> StepBatch:
    """A step of new requests whose first ``before`` tokens count as computed."""
    length, size = kind.before + kind.tokens, runner.info.block_size
    each = -(-(length + 1) // size)
    sampling = SamplingParams(temperature=0.0, seed=0).resolve({}, {}, lambda: 0)
    rows = range(kind.rows)
    return StepBatch(
        number, list(rows), [kind.before] * kind.rows, [kind.tokens] * kind.rows,
        [True] * kind.rows, num_decodes=kind.rows if kind.tokens == 1 else 0,
        num_tokens=kind.rows * kind.tokens, released_indices=list(rows) if number else [],
        assignments=[
            SlotAssignment(
                row, f"{number}-{row}", [7] * length, length,
                (list(range(1 + row * each, 1 + (row + 1) * each)),), sampling,
            )
            for row in rows
        ],
    )  # fmt: skip


def step_times(runner: ModelRunner, clock: Clock, kind: Kind, count: int) -> dict[str, float]:
    """Median seconds by op, and of the step as one program."""
    state: Any = runner._require_runner()
    recorded, times, whole = state.forward_pass, [], []
    eager = ForwardPass(state.model, state.cache, state.memory)
    for number in range(2 * count + 2):
        state.forward_pass = eager if number % 2 else recorded
        runner.launch(step_of(runner, kind, number))
        began = time.perf_counter()
        with clock.watching() as seconds:
            runner.collect()
        if number < 2:
            continue
        if number % 2:
            times.append(seconds)
        else:
            whole.append(time.perf_counter() - began)
    state.forward_pass = recorded
    runner.launch(StepBatch(2 * count + 2, released_indices=list(range(kind.rows))))
    runner.collect()
    found = {name: statistics.median(each[name] for each in times) for name in OPS}
    return found | {"recorded": statistics.median(whole)}


def products_per_second(ops: Any, dtype: torch.dtype) -> float:
    """Multiplications of the fastest of ten calls of a linear layer whose weights stay in the
    cache."""
    from asyncllm.gpu.ops.linear_weights import LinearWeights

    linear, x = (
        ops.make_linear(LinearWeights(torch.randn(256, 512).to(dtype))),
        torch.randn(256, 512),
    )
    times = []
    for _ in range(10):
        began = time.perf_counter()
        linear(x.to(dtype))
        times.append(time.perf_counter() - began)
    return 256 * 256 * 512 / min(times)


def floors(runner: ModelRunner, kind: Kind) -> dict[str, tuple[float, float]]:
    """Bytes and multiplications by op, of those that have many."""
    state: Any = runner._require_runner()
    model, ops, size = state.model.model, state.model.ops, runner.dtype.itemsize
    head = model.vocab_size * model.hidden_size * size
    linear, tokens = ops.linear_bytes - head, kind.rows * kind.tokens
    width = model.num_heads * model.head_dim
    seen = kind.rows * sum(kind.before + i + 1 for i in range(kind.tokens))
    kv = 2 * model.num_layers * model.num_kv_heads * model.head_dim * size
    return {
        "linear": (linear, linear / size * tokens),
        "argmax": (head, head / size * kind.rows),
        "attention": (kv * kind.rows * (kind.before + kind.tokens),
                      2.0 * seen * width * model.num_layers),
    }  # fmt: skip


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", metavar="DIR", help="the packaged model unless given")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    path = Path(arguments.model or Path(asyncllm.__file__).parent / "demo_model")
    model = ModelConfig.from_directory(path)
    kinds = [kind for kind in KINDS if kind.before + kind.tokens < model.max_position_embeddings]
    config = EngineConfig(
        device="cpu", attention_backend="native", num_threads=arguments.threads,
        dtype=arguments.dtype, max_num_batched_tokens=256, async_scheduling=False,
        max_model_len=max(kind.before + kind.tokens for kind in kinds) + 1, max_num_seqs=16,
        num_blocks=256,
    )  # fmt: skip
    runner = build_model_runner(config, model)
    state: Any = runner._require_runner()
    ops = state.model.ops
    conditions = {"model": path.name, "dtype": str(runner.dtype), "threads": str(arguments.threads)}
    report = Report("a step on a CPU, op by op", conditions)
    clock = Clock(ops.context.functions)
    for kind in kinds:
        bandwidth, rate = measure_memory_bandwidth(ops), products_per_second(ops, runner.dtype)
        report.section(f"{kind.name}; {bandwidth / 1e9:.3g} GB/s, {rate / 1e9:.3g} G products/s")
        found, least = (
            step_times(runner, clock, kind, 2 if arguments.quick else 5),
            floors(runner, kind),
        )
        total = 0.0
        for name, title in OPS.items():
            note = ""
            if name in least:
                num_bytes, products = least[name]
                floor = max(num_bytes / bandwidth, products / rate)
                total += floor
                by = "products" if products / rate > num_bytes / bandwidth else "bytes"
                note = f"floor {floor * 1e3:.3g} ms, by {by}"
            report.add(title, found[name], "ms", note)
        report.add("as one program", found["recorded"], "ms", f"floor {total * 1e3:.3g} ms")
    runner.close()
    report.write(arguments.json)


if __name__ == "__main__":
    main()
