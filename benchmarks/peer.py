"""The engine beside transformers' ``generate`` on the same model, in the same process and round.

Both run greedily in float32 with the same number of threads. transformers gets a left-padded
batch, which runs until its longest output is there, of which the tokens that were asked for count;
it has no streaming, no queue and no tokenizer in this measurement, and the engine has.

    python -m benchmarks.peer --streams 16 --prompts 64 256 --outputs 16 112

has prompts and outputs of different lengths; ``--outputs 64 64``, the default, has equal ones.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from asyncllm import AsyncLLMEngine
from asyncllm.checkpoint.model_files import resolve_model
from asyncllm.gpu.threads import set_thread_count
from benchmarks import peer_checkpoint
from benchmarks.common import Report, options


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that come at once.

    Attributes:
        prompts: token ids.
        outputs: tokens of each request's output.
    """

    prompts: list[list[int]]
    outputs: list[int]

    @classmethod
    def draw(
        cls, count: int, prompt: tuple[int, int], output: tuple[int, int], vocab_size: int
    ) -> Workload:
        """The same in every run.

        Args:
            prompt, output: the fewest and the most tokens.
        """
        rng = random.Random(f"{count} prompts")
        prompts = [
            [rng.randrange(10, vocab_size) for _ in range(rng.randint(*prompt))]
            for _ in range(count)
        ]
        return cls(prompts, [rng.randint(*output) for _ in range(count)])


class Times(NamedTuple):
    """Seconds of the clock, and of CPU time of all threads, which other processes disturb less."""

    wall: float
    cpu: float


async def timed(work: Awaitable[object]) -> Times:
    wall, cpu = time.perf_counter(), time.process_time()
    await work
    return Times(time.perf_counter() - wall, time.process_time() - cpu)


def transformers_runner(path: Any, threads: int) -> Callable[[Workload], None]:
    """``generate`` of a batch."""
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def run(load: Workload) -> None:
        set_thread_count(threads)
        prompts, most = load.prompts, max(load.outputs)
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                temperature=None,
                top_p=None,
                min_new_tokens=most,
                max_new_tokens=most,
                pad_token_id=0,
            )

    return run


async def engine_run(engine: AsyncLLMEngine, load: Workload) -> None:
    """Until every stream has ended, each read token by token."""

    async def read(prompt: list[int], output: int) -> None:
        count = 0
        stream = engine.stream(prompt, temperature=0.0, max_tokens=output, ignore_eos=True)
        async for delta in stream:
            count += len(delta.token_ids)
        assert count == output

    await asyncio.gather(*map(read, load.prompts, load.outputs))


def lengths(shortest: int, longest: int) -> str:
    return str(longest) if shortest == longest else f"{shortest} to {longest}"


async def measure(report: Report, arguments: argparse.Namespace, model: str | None) -> None:
    threads, rounds = arguments.num_threads, arguments.rounds or (2 if arguments.quick else 5)
    theirs = transformers_runner(resolve_model(model, None), threads)
    async with AsyncLLMEngine(
        model,
        dtype="float32",
        device="cpu",
        num_threads=threads,
        enable_prefix_caching=False,
        attention_backend=arguments.attention_backend,
    ) as engine:
        vocab_size = engine.model_config.vocab_size
        for count in arguments.streams:
            prompt = arguments.prompts or ((64, 64) if count == 1 else (16, 128))
            load = Workload.draw(count, prompt, arguments.outputs, vocab_size)
            pairs: list[tuple[Times, Times]] = []
            warm_up = replace(load, outputs=[2] * count)
            await engine_run(engine, warm_up)
            await asyncio.to_thread(theirs, warm_up)
            for _ in range(rounds):
                ours = await timed(engine_run(engine, load))
                pairs.append((ours, await timed(asyncio.to_thread(theirs, load))))
                print(f"round {len(pairs)}: {pairs[-1]}", file=sys.stderr, flush=True)
            tell(report, load, pairs, (prompt, arguments.outputs, threads))


def tell(
    report: Report, load: Workload, pairs: Sequence[tuple[Times, Times]], conditions: Any
) -> None:
    """Medians, and the median of the ratios of each round."""
    prompt, output, threads = conditions
    tokens, count = sum(load.outputs), len(load.prompts)
    report.section(
        f"{count} streams, {lengths(*prompt)} tokens in, {lengths(*output)} out, {threads} "
        f"thread(s), median of {len(pairs)}"
    )
    names = "asyncllm", "transformers generate"
    for name, times in zip(names, zip(*pairs, strict=True), strict=True):
        report.add(name, tokens / statistics.median(each.wall for each in times), "tok/s")
    for name, kind in (("asyncllm over transformers", "wall"), ("by CPU time", "cpu")):
        ratios = [getattr(theirs, kind) / getattr(ours, kind) for ours, theirs in pairs]
        note = f"{min(ratios):.2f} to {max(ratios):.2f}"
        report.add(name, statistics.median(ratios), "×", note)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--model", default=None, help="None is the packaged model")
    parser.add_argument("--shape", choices=peer_checkpoint.SHAPES,
                        help="a random checkpoint in the place of a model")  # fmt: skip
    parser.add_argument("--layers", type=int, help="of that checkpoint, if not all of the shape's")
    parser.add_argument("--folder", type=Path, default=peer_checkpoint.FOLDER,
                        help="where that checkpoint is made, and kept")  # fmt: skip
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 16, 64), metavar="N")
    parser.add_argument("--rounds", type=int, help="5 unless given, 2 with --quick")
    parser.add_argument("--prompts", type=int, nargs=2, metavar=("LEAST", "MOST"),
                        help="tokens in; 16 to 128 unless given, 64 of one stream")  # fmt: skip
    parser.add_argument("--outputs", type=int, nargs=2, default=(64, 64), metavar=("LEAST", "MOST"),
                        help="tokens out")  # fmt: skip
    parser.add_argument("--attention-backend", default="auto", metavar="NAME",
                        help='"torch" has torch\'s ops and oneDNN\'s linear layers')  # fmt: skip
    arguments = parser.parse_args()
    model = arguments.model
    if arguments.shape is not None:
        model = str(peer_checkpoint.make(arguments.folder, arguments.shape, arguments.layers))
    report = Report("peer: transformers' generate")
    asyncio.run(measure(report, arguments, model))
    report.write(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
