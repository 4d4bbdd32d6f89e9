"""``asyncllm demo``: several streams at once."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asyncllm.cli.arguments import sampling_options
from asyncllm.cli.prompts import Prompt, prompts
from asyncllm.cli.session import checked_config, model_name, open_engine, run_async
from asyncllm.cli.text import one_line, printable, rate, seconds
from asyncllm.engine import AsyncLLMEngine
from asyncllm.errors import AsyncLLMError
from asyncllm.outputs import EngineStats, FinishReason
from asyncllm.stream import TokenStream

_REFRESH_SECONDS = 0.08


@dataclass(eq=False)
class Track:
    """One stream and what is known of it. Times are those of ``time.perf_counter``."""

    number: int
    prompt: Prompt
    stream: TokenStream
    began_at: float
    text: str = ""
    num_tokens: int = 0
    first_at: float | None = None
    last_at: float | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def ttft(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.began_at

    @property
    def speed(self) -> str:
        """Tokens per second after the first token."""
        if self.first_at is None or self.last_at is None:
            return "–"
        return rate(self.num_tokens - 1, self.last_at - self.first_at)

    async def follow(self) -> None:
        try:
            async for delta in self.stream:
                self.last_at = time.perf_counter()
                if self.first_at is None and delta.token_ids:
                    self.first_at = self.last_at
                self.text += printable(delta.text)
                self.num_tokens += len(delta.token_ids)
                self.finish_reason = delta.finish_reason
        except AsyncLLMError as error:
            self.error = str(error)


@dataclass
class Show:
    """All streams of one demonstration."""

    engine: AsyncLLMEngine
    tracks: list[Track]
    began_at: float
    ended_at: float | None = None
    stats: EngineStats = field(default_factory=EngineStats)

    def sample(self) -> None:
        """Takes the engine's figures of this moment."""
        self.stats = self.engine.stats()

    @property
    def title(self) -> str:
        return model_name(self.engine)

    @property
    def count(self) -> str:
        return "1 stream" if len(self.tracks) == 1 else f"{len(self.tracks)} streams"

    @property
    def elapsed(self) -> float:
        return (self.ended_at or time.perf_counter()) - self.began_at

    @property
    def num_tokens(self) -> int:
        return sum(track.num_tokens for track in self.tracks)

    @property
    def num_at_once(self) -> int:
        """Streams that were between their first and last token at the same moment, at most."""
        spans = [(t.first_at, t.last_at) for t in self.tracks if t.first_at and t.last_at]
        return max((sum(a <= at <= b for a, b in spans) for at, _ in spans), default=0)

    @property
    def hit_share(self) -> float:
        return self.stats.prefix_cache_hits / max(self.stats.prefix_cache_queries, 1)

    def totals(self) -> str:
        """The whole demonstration in a line."""
        first = sorted(track.ttft for track in self.tracks if track.ttft is not None)
        median = seconds(first[len(first) // 2]) if first else "–"
        return (
            f"{self.count}, {self.num_tokens} tokens in {seconds(self.elapsed)}: "
            f"{rate(self.num_tokens, self.elapsed)} together, first token after {median} "
            f"(median), up to {self.num_at_once} at once, {self.hit_share:.0%} of the prompt "
            "from the prefix cache"
        )


def run(arguments: argparse.Namespace) -> int:
    """The command."""
    return run_async(arguments, lambda: _main(arguments))


async def _main(arguments: argparse.Namespace) -> int:
    config = checked_config(arguments)
    async with open_engine(config) as engine:
        display = _display()
        show = _submit(engine, arguments)
        await display(show)
    return 1 if any(track.error for track in show.tracks) else 0


def _display() -> Callable[[Show], Any]:
    if sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        from asyncllm.cli.demo_view import watch

        return watch
    return _print_when_done


def _submit(engine: AsyncLLMEngine, arguments: argparse.Namespace) -> Show:
    """Starts every stream. None of them has to be read for the others to run."""
    seed = arguments.seed
    chosen = prompts(arguments.streams, random.Random(0 if seed is None else seed))
    given = sampling_options(arguments)
    show = Show(engine, [], time.perf_counter())
    for number, prompt in enumerate(chosen):
        sampling = dict(given) if prompt.long else {"temperature": 0.0, **given}
        if seed is not None:
            sampling["seed"] = (seed + number) % 2**64
        began_at = time.perf_counter()
        show.tracks.append(Track(number + 1, prompt, _start(engine, prompt, sampling), began_at))
    return show


def _start(engine: AsyncLLMEngine, prompt: Prompt, sampling: dict[str, Any]) -> TokenStream:
    if not engine.tokenizer.chat_template.sources:
        return engine.stream(prompt.question, **sampling)
    variables = {"tools": list(prompt.tools)} if prompt.tools else None
    return engine.chat(list(prompt.messages), chat_template_kwargs=variables, **sampling)


async def follow_all(show: Show, refresh: Callable[[], None]) -> None:
    """Reads every stream to its end and calls ``refresh`` about ten times a second."""
    readers = [asyncio.create_task(track.follow()) for track in show.tracks]
    try:
        pending = set(readers)
        while pending:
            _, pending = await asyncio.wait(pending, timeout=_REFRESH_SECONDS)
            show.sample()
            refresh()
    finally:
        for reader in readers:
            reader.cancel()
    show.ended_at = time.perf_counter()


async def _print_when_done(show: Show) -> None:
    """For pipes and files: every answer in one piece, in the order in which they end."""
    print(f"{show.count} at once on {show.title}", flush=True)
    unprinted = list(show.tracks)

    def refresh() -> None:
        for track in [track for track in unprinted if track.done]:
            unprinted.remove(track)
            print(f"\n{_plain(track)}", flush=True)

    await follow_all(show, refresh)
    refresh()
    print(f"\n{show.totals()}", flush=True)


def _plain(track: Track) -> str:
    answer = track.text.strip().replace("\n", "\n    ")
    lines = [f"[{track.number}] {track.prompt.kind}: {one_line(track.prompt.title, 100)}"]
    if answer:
        lines.append(f"    {answer}")
    if track.error is not None:
        lines.append(f"    failed: {one_line(track.error, 200)}")
    lines.append(
        f"    ({track.num_tokens} tokens, first after {seconds(track.ttft)}, "
        f"{track.speed}, {track.finish_reason or 'failed'})"
    )
    return "\n".join(lines)
