"""``asyncllm demo``: several streams at once."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from asyncllm.cli.arguments import sampling_options
from asyncllm.cli.prompts import Prompt, prompts
from asyncllm.cli.session import checked_config, open_engine, run_async
from asyncllm.cli.text import format_seconds, one_line
from asyncllm.cli.tracked_streams import Demo, TrackedStream, follow_all
from asyncllm.engine import AsyncLLMEngine
from asyncllm.stream import TokenStream


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    return run_async(arguments, lambda: _main(arguments))


async def _main(arguments: argparse.Namespace) -> int:
    config = checked_config(arguments)
    async with open_engine(AsyncLLMEngine(config=config)) as engine:
        display = _choose_display()
        demo = _submit(engine, arguments)
        await display(demo)
    return 1 if any(tracked.error for tracked in demo.streams) else 0


def _choose_display() -> Callable[[Demo], Any]:
    if sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        from asyncllm.cli.demo_view import watch

        return watch
    return _print_when_done


def _submit(engine: AsyncLLMEngine, arguments: argparse.Namespace) -> Demo:
    """Submit every prompt. Streams run whether or not they are read."""
    seed = arguments.seed
    chosen = prompts(arguments.streams, random.Random(0 if seed is None else seed))
    given = sampling_options(arguments)
    demo = Demo(engine, [], time.perf_counter())
    for number, prompt in enumerate(chosen):
        sampling = dict(given) if prompt.long else {"temperature": 0.0, **given}
        if seed is not None:
            sampling["seed"] = (seed + number) % 2**64
        began_at = time.perf_counter()
        demo.streams.append(
            TrackedStream(number + 1, prompt, _start_stream(engine, prompt, sampling), began_at)
        )
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
        for tracked in [tracked for tracked in unprinted if tracked.done]:
            unprinted.remove(tracked)
            print(f"\n{_format_answer(tracked)}", flush=True)

    await follow_all(demo, refresh)
    refresh()
    print(f"\n{demo.totals_text()}", flush=True)


def _format_answer(tracked: TrackedStream) -> str:
    answer = tracked.text.strip().replace("\n", "\n    ")
    lines = [f"[{tracked.number}] {tracked.prompt.kind}: {one_line(tracked.prompt.title, 100)}"]
    if answer:
        lines.append(f"    {answer}")
    if tracked.error is not None:
        lines.append(f"    failed: {one_line(tracked.error, 200)}")
    lines.append(
        f"    ({tracked.num_tokens} tokens, first after {format_seconds(tracked.ttft)}, "
        f"{tracked.speed}, {tracked.finish_reason or 'failed'})"
    )
    return "\n".join(lines)
