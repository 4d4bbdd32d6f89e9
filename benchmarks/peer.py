"""The engine beside transformers' ``generate`` on the same model, in the same process and round.

Both run greedily in float32 with the same number of threads. transformers gets a left-padded
batch; it has no streaming, no queue and no tokenizer in this measurement, and the engine has.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncllm import AsyncLLMEngine
from asyncllm.checkpoint.model_files import resolve_model
from asyncllm.gpu.threads import set_thread_count
from benchmarks import peer_checkpoint
from benchmarks.common import Report, options

ROOT = Path(__file__).parent.parent
OUTPUT = 64


def draw_prompts(count: int, shortest: int, longest: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(f"{count} prompts")
    return [
        [rng.randrange(10, vocab_size) for _ in range(rng.randint(shortest, longest))]
        for _ in range(count)
    ]


def transformers_runner(path: Any, threads: int) -> Callable[[list[list[int]]], float]:
    """Seconds that ``generate`` takes for a batch."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def run(prompts: list[list[int]]) -> float:
        set_thread_count(threads)
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                temperature=None,
                top_p=None,
                min_new_tokens=OUTPUT,
                max_new_tokens=OUTPUT,
                pad_token_id=0,
            )
        return time.perf_counter() - began

    return run


async def engine_run(engine: AsyncLLMEngine, prompts: list[list[int]]) -> float:
    """Seconds until every stream has ended, each read token by token."""

    async def read(prompt: list[int]) -> None:
        count = 0
        stream = engine.stream(prompt, temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
        async for delta in stream:
            count += len(delta.token_ids)
        assert count == OUTPUT

    began = time.perf_counter()
    await asyncio.gather(*(read(prompt) for prompt in prompts))
    return time.perf_counter() - began


async def measure(
    report: Report,
    rounds: int,
    threads: int,
    model: str | None,
    backend: str,
    streams: Sequence[int],
) -> None:
    path = resolve_model(model, None)
    theirs = transformers_runner(path, threads)
    async with AsyncLLMEngine(
        model,
        dtype="float32",
        device="cpu",
        num_threads=threads,
        enable_prefix_caching=False,
        attention_backend=backend,
    ) as engine:
        vocab_size = engine.model_config.vocab_size
        for count in streams:
            low, high = (64, 64) if count == 1 else (16, 128)
            prompts = draw_prompts(count, low, high, vocab_size)
            name = f"{count} streams, {low} to {high} tokens in"
            ours_times, theirs_times = [], []
            for _ in range(rounds + 1):
                ours_times.append(await engine_run(engine, prompts))
                theirs_times.append(await asyncio.to_thread(theirs, prompts))
            tokens = OUTPUT * len(prompts)
            ours = statistics.median(ours_times[1:])
            transformers_time = statistics.median(theirs_times[1:])
            report.section(f"{name}, {OUTPUT} out, {threads} thread(s), median of {rounds}")
            report.add("asyncllm", tokens / ours, "tok/s")
            report.add("transformers generate", tokens / transformers_time, "tok/s")
            report.add("asyncllm over transformers", transformers_time / ours, "×")


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--model", default=None, help="None is the packaged model")
    parser.add_argument("--shape", choices=peer_checkpoint.SHAPES,
                        help="a random checkpoint in the place of a model")  # fmt: skip
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "peers",
                        help="where that checkpoint is made, and kept")  # fmt: skip
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 16, 64), metavar="N")
    parser.add_argument("--attention-backend", default="auto", metavar="NAME",
                        help='"torch" has torch\'s ops and oneDNN\'s linear layers')  # fmt: skip
    arguments = parser.parse_args()
    model = arguments.model
    if arguments.shape is not None:
        model = str(peer_checkpoint.make(arguments.folder, arguments.shape))
    report = Report("peer: transformers' generate")
    rounds = 2 if arguments.quick else 5
    threads, backend = arguments.num_threads, arguments.attention_backend
    asyncio.run(measure(report, rounds, threads, model, backend, arguments.streams))
    report.write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
