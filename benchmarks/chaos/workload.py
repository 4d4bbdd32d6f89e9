"""What the clients ask for, and what the answers must be: each request run alone first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncllm import AsyncLLMEngine


@dataclass(frozen=True)
class Task:
    """A request and the tokens it gives when it runs alone."""

    prompt: Sequence[int]
    options: dict[str, Any]
    expected: tuple[int, ...] = field(repr=False)


def draw_requests(
    rng: random.Random, count: int, vocab_size: int, longest_prompt: int, longest_output: int
) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of random lengths, half of which share prefixes, sampled in several ways."""
    shared = [[rng.randrange(vocab_size) for _ in range(longest_prompt)] for _ in range(3)]
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 30, "repetition_penalty": 1.1},
    ]
    made = []
    for _ in range(count):
        prompt = rng.choice(shared)[: rng.randint(0, longest_prompt // 2)]
        prompt = prompt + [
            rng.randrange(vocab_size) for _ in range(rng.randint(1, longest_prompt // 2))
        ]
        options = {"seed": rng.getrandbits(63), "max_tokens": rng.randint(1, longest_output)}
        made.append((prompt, options | rng.choice(ways)))
    return made


async def run_alone(
    engine: AsyncLLMEngine, requests: Sequence[tuple[list[int], dict[str, Any]]]
) -> list[Task]:
    """One after the other on an engine that caches nothing."""
    tasks = []
    for prompt, options in requests:
        result = await engine.generate(prompt, **options)
        tasks.append(Task(prompt, options, result.token_ids))
    return tasks
