"""A decode step through transformers' modules, against the engine's own decoder: the same shapes of
a family with random weights, on one thread, for both op sets of a CPU.

The two run in turn, and a figure is the median of the ratios. Times are the process's CPU times, so
that what else the machine does is left out.

python -m benchmarks.model_impl [--quick] [--json FILE] [--dtype bfloat16] [--layers 12]
    [--family gemma4]
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

from asyncllm.config import Dtype, EngineConfig
from asyncllm.core.batch import SlotAssignment, StepBatch
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.transformers_model.config import read_config
from asyncllm.sampling_params import SamplingParams
from benchmarks.common import Report, options

CONTEXT = 128
BATCHES = (1, 16)
MOST_GROUPS = 8
BACKENDS = {"onednn": "torch", "native": "native"}
"""Attention backends by the op set that goes with them."""

SHAPE: dict[str, Any] = {
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

WIDE_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **WIDE_HEADS,
        "sliding_window": 512,
    },
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        **WIDE_HEADS,
        "global_head_dim": 512,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 32_000,
        "num_kv_shared_layers": 6,
        "use_double_wide_mlp": True,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "intermediate_size": 1024,
        "tie_word_embeddings": False,
    },
    "qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}
"""What a family has beside, or in place of, SHAPE; Gemma 4 needs 12 layers or more."""


class Decoding:
    """A batch that decodes."""

    def __init__(self, runner: ModelRunner, rows: int) -> None:
        self.runner, self.rows, self.length, self.steps = runner, rows, CONTEXT, 0
        widths = [-(-4 * CONTEXT // group.block_size) for group in runner.info.kv_groups]
        sampling = SamplingParams(temperature=0.0, seed=0).resolve({}, {}, lambda: 0)
        free = iter(range(1, runner.info.num_blocks))
        assignments = [
            SlotAssignment(
                row,
                f"{row}",
                [7 + row] * CONTEXT,
                CONTEXT,
                tuple(list(islice(free, width)) for width in widths),
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
        assignments: list[SlotAssignment],
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


def make(path: Path, backend: str, model_impl: str, dtype: Dtype, rows: int) -> Decoding:
    config = EngineConfig(
        device="cpu",
        dtype=dtype,
        num_threads=1,
        max_num_seqs=16,
        max_num_batched_tokens=16 * CONTEXT,
        num_blocks=MOST_GROUPS * 16 * 4 * CONTEXT // 32 + 16,
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
    parser.add_argument("--family", default="qwen3", choices=list(FAMILIES))
    arguments = parser.parse_args()
    steps = 9 if arguments.quick else 60
    conditions = {"dtype": arguments.dtype, "layers": str(arguments.layers)}
    conditions["family"] = arguments.family
    report = Report("Decode steps by model_impl", conditions)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        shape = SHAPE | FAMILIES[arguments.family] | {"num_hidden_layers": arguments.layers}
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
