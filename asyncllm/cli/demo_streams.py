"""DemoStream and Demo: the streams of ``asyncllm demo``, with their texts and times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncllm.cli.measure import percentile
from asyncllm.cli.prompts import Prompt
from asyncllm.cli.session import model_name
from asyncllm.cli.text import format_rate, format_seconds, strip_control_characters
from asyncllm.engine import AsyncLLMEngine
from asyncllm.errors import AsyncLLMError
from asyncllm.outputs import EngineStats, FinishReason
from asyncllm.stream import TokenStream

_REFRESH_SECONDS = 0.08


@dataclass(eq=False)
class DemoStream:
    """One stream, its text, and its timestamps by ``time.perf_counter``."""

    number: int
    prompt: Prompt
    stream: TokenStream
    began_at: float
    text: str = ""
    num_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def ttft(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.began_at

    @property
    def rate_text(self) -> str:
        """Tokens per second after the first token."""
        if self.first_token_at is None or self.last_token_at is None:
            return "–"
        return format_rate(self.num_tokens - 1, self.last_token_at - self.first_token_at)

    async def follow_stream(self) -> None:
        try:
            async for delta in self.stream:
                self.last_token_at = time.perf_counter()
                if self.first_token_at is None and delta.token_ids:
                    self.first_token_at = self.last_token_at
                self.text += strip_control_characters(delta.text)
                self.num_tokens += len(delta.token_ids)
                self.finish_reason = delta.finish_reason
        except AsyncLLMError as error:
            self.error = str(error)


@dataclass
class Demo:
    """All streams of one demo."""

    engine: AsyncLLMEngine
    streams: list[DemoStream]
    began_at: float
    ended_at: float | None = None
    stats: EngineStats = field(default_factory=EngineStats)

    @property
    def title(self) -> str:
        return model_name(self.engine)

    @property
    def num_streams_text(self) -> str:
        return "1 stream" if len(self.streams) == 1 else f"{len(self.streams)} streams"

    @property
    def elapsed(self) -> float:
        return (self.ended_at or time.perf_counter()) - self.began_at

    @property
    def num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def max_streams(self) -> int:
        """Maximum number of streams that generated tokens at the same time."""
        spans = [
            (stream.first_token_at, stream.last_token_at)
            for stream in self.streams
            if stream.first_token_at and stream.last_token_at
        ]
        return max((sum(begin <= at <= end for begin, end in spans) for at, _ in spans), default=0)

    @property
    def prefix_hit_rate(self) -> float:
        return self.stats.prefix_cache_hits / max(self.stats.prefix_cache_queries, 1)

    def totals_text(self) -> str:
        """Summary of the demo in one line."""
        ttfts = [stream.ttft for stream in self.streams if stream.ttft is not None]
        median = format_seconds(percentile(ttfts, 0.5))
        return (
            f"{self.num_streams_text}, {self.num_tokens} tokens in {format_seconds(self.elapsed)}: "
            f"{format_rate(self.num_tokens, self.elapsed)} together, first token after {median} "
            f"(median), up to {self.max_streams} at once, {self.prefix_hit_rate:.0%} of the prompt "
            "from the prefix cache"
        )


async def follow_streams(demo: Demo, refresh: Callable[[], None]) -> None:
    """Read every stream to its end, and call ``refresh`` about ten times a second."""
    readers = [asyncio.create_task(stream.follow_stream()) for stream in demo.streams]
    try:
        pending = set(readers)
        while pending:
            _, pending = await asyncio.wait(pending, timeout=_REFRESH_SECONDS)
            demo.stats = demo.engine.stats()
            refresh()
    finally:
        for reader in readers:
            reader.cancel()
    demo.ended_at = time.perf_counter()
