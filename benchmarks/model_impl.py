"""A decode step through transformers' modules, against the engine's own decoder: the same Qwen3,
Qwen3-MoE or Qwen3.5 shapes with random weights, on one thread, for both op sets of a CPU.

The two run in turn, and a figure is the median of the ratios. Times are the process's CPU times, so
that what else the machine does is left out.

python -m benchmarks.model_impl [--quick] [--json FILE] [--dtype bfloat16] [--layers 12] [--experts]
    [--linear-attention]
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from asyncllm.config import EngineConfig
from asyncllm.core.batch import RequestAssignment, StepBatch
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.transformers_model.config import read_config
from asyncllm.sampling_params import SamplingParams
from benchmarks.common import Report, options

CONTEXT = 128
BATCHES = (1, 16)
BACKENDS = {"onednn": "torch", "native": "native"}
"""Attention backends by the op set that goes with them."""

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}

EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}
"""In place of the MLP of every layer."""


LINEAR_ATTENTION: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""Three layers of a gated delta rule to one of attention."""


class Decoding:
    """A batch that decodes."""

    def __init__(self, runner: ModelRunner, rows: int) -> None:
        self.runner, self.rows, self.length, self.steps = runner, rows, CONTEXT, 0
        width = -(-4 * CONTEXT // runner.info.kv_groups[0].block_size)
        sampling = SamplingParams(temperature=0.0, seed=0).resolve({}, {}, lambda: 0)
        assignments = [
            RequestAssignment(
                row,
                f"{row}",
                [7 + row] * CONTEXT,
                CONTEXT,
                (list(range(1 + row * width, 1 + (row + 1) * width)),),
                sampling,
            )
            for row in range(rows)
        ]
        self._run([0] * rows, [CONTEXT] * rows, 0, assignments)

    def step(self) -> float:
        """CPU seconds of one step."""
        began = time.process_time()
        self._run([self.length] * self.rows, [1] * self.rows, self.rows, [])
        self.length += 1
        return time.process_time() - began

    def _run(
        self,
        starts: list[int],
        counts: list[int],
        num_decodes: int,
        assignments: list[RequestAssignment],
    ) -> None:
        indices = list(range(self.rows))
        self.runner.launch(
            StepBatch(
                step=self.steps,
                req_indices=indices,
                starts=starts,
                counts=counts,
                samples=[True] * self.rows,
                num_decodes=num_decodes,
                num_tokens=sum(counts),
                assignments=assignments,
            )
        )
        self.runner.collect()
        self.steps += 1


def make(path: Path, backend: str, model_impl: str, dtype: str, rows: int) -> Decoding:
    config = EngineConfig(
        device="cpu",
        dtype=dtype,  # type: ignore[arg-type]
        num_threads=1,
        max_num_seqs=16,
        max_num_batched_tokens=16 * CONTEXT,
        num_blocks=16 * 4 * CONTEXT // 32 + 16,
        block_size=32,
        attention_backend=backend,
        load_format="dummy",
    )
    runner = build_model_runner(config, read_config(path, model_impl))
    return Decoding(runner, rows)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int, default=12)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--experts", action="store_true")
    kinds.add_argument("--linear-attention", action="store_true")
    arguments = parser.parse_args()
    steps = 9 if arguments.quick else 60
    conditions = {"dtype": arguments.dtype, "layers": str(arguments.layers)}
    conditions["mlp"] = "64 experts of 512, 8 a token" if arguments.experts else "dense"
    conditions["mixers"] = (
        "3 gated delta rules of 16 heads of 128 x 128 to 1 attention"
        if arguments.linear_attention
        else "attention"
    )
    report = Report("Decode steps by model_impl", conditions)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        shape = SHAPE | {"num_hidden_layers": arguments.layers}
        shape |= EXPERTS if arguments.experts else {}
        shape |= LINEAR_ATTENTION if arguments.linear_attention else {}
        (path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        for name, backend in BACKENDS.items():
            for rows in BATCHES:
                report.section(f"op set {name}, {rows} rows")
                pair = [
                    make(path, backend, impl, arguments.dtype, rows)
                    for impl in ("native", "transformers")
                ]
                for each in pair:
                    each.step()
                times = [[each.step() for each in pair] for _ in range(steps)]
                ours, theirs = zip(*times, strict=True)
                report.add("native", statistics.median(ours), "ms")
                report.add("transformers", statistics.median(theirs), "ms")
                ratios = [theirs / ours for ours, theirs in times]
                report.add("transformers / native", statistics.median(ratios), "")
    report.write(arguments.json)


if __name__ == "__main__":
    main()
