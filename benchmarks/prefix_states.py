"""A prefix that prompts share, in a model with recurrent layers: what is found of it, the memory of
the states that are kept, and the CPU time of a request beside an engine that caches none; the same
for prompts that share nothing, which end a row early for a state that no other request needs.

A hybrid of random weights, three gated-delta layers to one of attention, on one thread. Each prompt
is sent after the first token of the one before.

python -m benchmarks.prefix_states [--quick] [--json FILE] [--prefix 512] [--requests 64]
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import asyncllm
from asyncllm import AsyncLLMEngine, Usage
from asyncllm.outputs import EngineStats
from benchmarks.common import Report, options

OWN_TOKENS, OUTPUT_TOKENS = 48, 8
APART = 16
GOAL = 0.9
"""Of the prefix's tokens, found from the third request on."""

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


async def converse(
    path: Path, num_requests: int, num_shared: int, *, caching: bool, shares: bool = True
) -> tuple[list[Usage], EngineStats, float]:
    """What each request took, the engine's figures at the end, and CPU seconds of a request, from
    the third on."""
    rng = random.Random(0)
    shared = [rng.randrange(1, 4096) for _ in range(num_shared)]
    engine = AsyncLLMEngine(
        path,
        tokenizer=Path(asyncllm.__file__).parent / "demo_model",
        load_format="dummy",
        dtype="float32",
        device="cpu",
        max_num_seqs=16,
        max_model_len=num_shared + OWN_TOKENS + OUTPUT_TOKENS,
        max_num_batched_tokens=256,
        num_threads=1,
        enable_prefix_caching=caching,
    )
    streams, began = [], 0.0
    async with engine:
        for i in range(num_requests):
            if i == 2:
                await asyncio.gather(*(stream.result() for stream in streams))
                began = time.process_time()
            own = [rng.randrange(1, 4096) for _ in range(OWN_TOKENS)]
            if not shares:
                shared = [rng.randrange(1, 4096) for _ in range(num_shared)]
            settings = {"temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
            streams.append(engine.stream(shared + own, **settings))
            await anext(streams[-1])
        completions = [await stream.result() for stream in streams]
        seconds = (time.process_time() - began) / (num_requests - 2)
        return [completion.usage for completion in completions], engine.stats(), seconds


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--prefix", type=int, default=512, help="tokens that all prompts share")
    parser.add_argument("--requests", type=int, default=64)
    arguments = parser.parse_args()
    count = 16 if arguments.quick else arguments.requests
    conditions = {"prefix": str(arguments.prefix), "own": str(OWN_TOKENS), "requests": str(count)}
    report = Report("Shared prefixes of a model with recurrent layers", conditions)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        (usages, stats, ours), (_, _, theirs) = (
            asyncio.run(converse(path, count, arguments.prefix, caching=caching))
            for caching in (True, False)
        )
        apart = [
            asyncio.run(converse(path, APART, arguments.prefix, caching=caching, shares=False))[2]
            for caching in (True, False)
        ]
    hits = [usage.cached_tokens / arguments.prefix for usage in usages]
    report.section("tokens of the prefix that were found")
    for i in range(2):
        report.add(f"request {i + 1}", hits[i], "")
    share = statistics.mean(hits[2:])
    report.add("from the third on", share, "", f"goal: at least {GOAL}")
    report.section("states")
    report.add("snapshots", stats.num_state_snapshots, "")
    report.add("of them in use", stats.num_cached_states, "")
    report.add("memory of snapshots", stats.state_snapshot_bytes / 2**20, "MiB")
    report.section("CPU time of a request, from the third on")
    report.add("with states of prefixes", ours, "ms")
    report.add("without", theirs, "ms")
    report.add("without / with", theirs / ours, "×")
    report.add("sharing nothing: without / with", apart[1] / apart[0], "×", f"{APART} requests")
    report.write(arguments.json)
    assert share >= GOAL, f"{share:.1%} of the prefix's tokens were found"


if __name__ == "__main__":
    main()
