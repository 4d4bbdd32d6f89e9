"""What sampling takes of a CPU step: 64 rows, a vocabulary of 152k tokens, each feature by itself.

The step beside it is a decode step of the 0.6B shape (28 layers of 1024, an MLP of 3072) without
its attention: its matrix products, of which one layer and the head are measured. All times are
CPU times of one thread, so that neighbours on the machine do not count.

python -m benchmarks.sampling [--ops onednn|native] [--quick] [--json FILE]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from asyncllm.core.batch import GrammarMask, SlotAssignment, StepBatch
from asyncllm.core.executor import ExecutorInfo
from asyncllm.core.in_process import UnpicklableObjects
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.core.token_rules import TokenRules
from asyncllm.gpu.graph.streams import DeviceStream
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.models.language_model import StepOutput
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.native_ops import NativeOps
from asyncllm.gpu.ops.onednn_ops import OneDNNOps
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.step_runner import StepRunner
from asyncllm.native.context import NativeContext
from asyncllm.native.shared_library import Library
from asyncllm.sampling_params import SamplingParams
from benchmarks.common import Report, options

ROWS, VOCAB, HIDDEN, MLP, LAYERS = 64, 151_936, 1024, 3072, 28
QKV, ATTENTION = 4096, 2048

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "top_k=50": {"top_k": 50},
    "top_p=0.9": {"top_p": 0.9},
    "top_k=20, top_p=0.95": {"top_k": 20, "top_p": 0.95},
    "min_p=0.05": {"min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "presence and frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {100: 1.0, 200: -1.0}},
    "allowed_token_ids": {"allowed_token_ids": range(0, VOCAB, 2)},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": [5]},
    "logprobs=5": {"logprobs": 5},
}
MASKED = "grammar's mask"


def cpu_time(run: Callable[[], object], rounds: int) -> float:
    """The least of ``rounds``, after one that warms up."""
    run()
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        run()
        times.append(time.thread_time() - began)
    return min(times)


def step_time(ops: TorchOps, rounds: int) -> float:
    shapes = [(QKV, HIDDEN), (HIDDEN, ATTENTION), (2 * MLP, HIDDEN), (HIDDEN, MLP)]

    def product(shape: tuple[int, int]) -> float:
        weight = torch.randn(shape, dtype=torch.bfloat16) * 0.02
        linear = ops.linear(LinearWeights(weight))
        x = torch.randn(ROWS, shape[1], dtype=torch.bfloat16)
        return cpu_time(lambda: linear(x), rounds)

    return LAYERS * sum(map(product, shapes)) + product((VOCAB, HIDDEN))


def make_logits() -> torch.Tensor:
    """As a model's: fifty likely tokens in each row above a wide remainder."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, VOCAB, generator=generator) * 2
    likely = torch.randint(0, VOCAB, (ROWS, 50), generator=generator)
    logits.scatter_add_(1, likely, torch.full((ROWS, 50), 12.0))
    return logits.to(torch.bfloat16)


class GivenLogits:
    """In the place of a model."""

    attention: Mapping[Any, Any] = MappingProxyType({})
    states = ()
    argmax_function = None

    def __init__(self, ops: TorchOps, logits: torch.Tensor) -> None:
        self.ops, self.embedding, self._logits = ops, torch.empty(0), logits

    def forward(self, step: Any, cache: Any) -> StepOutput:
        return StepOutput(self._logits, self._logits[:, :0])


class NoCache:
    """In the place of a KV cache."""

    def __getattr__(self, name: str) -> Any:
        return lambda copies: None


def sampling_time(
    ops: TorchOps, fields: dict[str, Any], rounds: int, masked: bool = False
) -> float:
    info = ExecutorInfo(VOCAB, 2, (KVCacheSpec((0,), 32),), 256, ROWS, ROWS)
    model: Any = GivenLogits(ops, make_logits())
    cache: Any = NoCache()
    runner = StepRunner(
        model, cache, info, DeviceStream(), UnpicklableObjects(), on_device=False, num_logprobs=20
    )
    params = SamplingParams(**({"temperature": 1.0, "seed": 1} | fields)).resolve({}, {}, int)
    rows = list(range(ROWS))
    for row in rows:
        rules = TokenRules.create(params.allowed_token_ids, (), VOCAB)
        assignment = SlotAssignment(row, "r", [1] * 100, 50, ([1],), params, token_rules=rules)
        runner.input_batch.apply_step_changes(StepBatch(0, assignments=[assignment]))
        update = runner.sampler.add_request(assignment)
        if update is not None:
            update.write(runner.memory.tables)
    batch = StepBatch(0, rows, [99] * ROWS, [1] * ROWS, [True] * ROWS, ROWS, ROWS)
    if masked:
        batch.masked_rows = rows

    def step() -> None:
        launched = LaunchedStep(batch)
        if masked:
            launched.masks = GrammarMask(0, rows, [b"\x7f" * (VOCAB // 8)] * ROWS)
        runner.begin(launched, is_early=False)
        runner.finish(launched)

    with torch.inference_mode():
        return cpu_time(step, rounds)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--ops", choices=("onednn", "native"), default="native")
    arguments = parser.parse_args()
    ops = NativeOps(NativeContext(Library(), 1)) if arguments.ops == "native" else OneDNNOps()
    rounds = 1 if arguments.quick else 5
    torch.set_num_threads(1)
    report = Report(f"sampling, 64 rows of 152k tokens, one thread, ops {arguments.ops}")
    with torch.inference_mode():
        step = step_time(ops, rounds)
        report.add("matrix products of a step", step, "ms")
        measured = {name: sampling_time(ops, fields, rounds) for name, fields in FEATURES.items()}
        measured[MASKED] = sampling_time(ops, {}, rounds, masked=True)
    for name, seconds in measured.items():
        report.add(name, seconds, "ms", f"{seconds / (step + seconds):.1%} of the step")
    report.write(arguments.json)


if __name__ == "__main__":
    main()
