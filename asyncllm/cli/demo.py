"""``asyncllm demo``: several streams at once."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from typing import Any

from asyncllm.cli.arguments import sampling_options
from asyncllm.cli.demo_streams import Demo, DemoStream, follow_streams
from asyncllm.cli.prompts import Prompt, make_prompts
from asyncllm.cli.session import checked_config, run_async, running_engine
from asyncllm.cli.text import format_seconds, one_line
from asyncllm.engine import AsyncLLMEngine
from asyncllm.stream import TokenStream


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    return run_async(arguments, lambda: _main(arguments))


async def _main(arguments: argparse.Namespace) -> int:
    config = checked_config(arguments)
    async with running_engine(AsyncLLMEngine(config=config)) as engine:
        show = _print_when_done
        if sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
            from asyncllm.cli.demo_view import show_demo as show
        demo = _start_streams(engine, arguments)
        await show(demo)
    return 1 if any(stream.error for stream in demo.streams) else 0


def _start_streams(engine: AsyncLLMEngine, arguments: argparse.Namespace) -> Demo:
    """Submit the demo's prompts to an engine."""
    seed = arguments.seed
    options = sampling_options(arguments)
    demo = Demo(engine, [], time.perf_counter())
    rng = random.Random(0 if seed is None else seed)
    for i, prompt in enumerate(make_prompts(arguments.streams, rng)):
        sampling = dict(options) if prompt.is_long else {"temperature": 0.0, **options}
        if seed is not None:
            sampling["seed"] = (seed + i) % 2**64
        began_at = time.perf_counter()
        stream = _start_stream(engine, prompt, sampling)
        demo.streams.append(DemoStream(i + 1, prompt, stream, began_at))
    return demo


def _start_stream(engine: AsyncLLMEngine, prompt: Prompt, sampling: dict[str, Any]) -> TokenStream:
    if not engine.tokenizer.chat_template.sources:
        return engine.stream(prompt.question, **sampling)
    variables = {"tools": list(prompt.tools)} if prompt.tools else None
    return engine.chat(list(prompt.messages), chat_template_kwargs=variables, **sampling)


async def _print_when_done(demo: Demo) -> None:
    """Print each answer as a whole when it ends, for pipes and files."""
    print(f"{demo.num_streams_text} at once on {demo.title}", flush=True)
    unprinted = list(demo.streams)

    def refresh() -> None:
        for stream in [stream for stream in unprinted if stream.is_done]:
            unprinted.remove(stream)
            print(f"\n{_format_answer(stream)}", flush=True)

    await follow_streams(demo, refresh)
    refresh()
    print(f"\n{demo.totals_text()}", flush=True)


def _format_answer(stream: DemoStream) -> str:
    answer = stream.text.strip().replace("\n", "\n    ")
    lines = [f"[{stream.number}] {stream.prompt.kind}: {one_line(stream.prompt.title, 100)}"]
    if answer:
        lines.append(f"    {answer}")
    if stream.error is not None:
        lines.append(f"    failed: {one_line(stream.error, 200)}")
    lines.append(
        f"    ({stream.num_tokens} tokens, first after {format_seconds(stream.ttft)}, "
        f"{stream.rate_text}, {stream.finish_reason or 'failed'})"
    )
    return "\n".join(lines)
