"""Workload: prompts and output lengths, drawn from a fixed seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests; ``max_tokens[i]`` tokens follow ``prompts[i]``."""

    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def num_output_tokens(self) -> int:
        return sum(self.max_tokens)


def mixed_lengths(
    count: int = 256,
    *,
    shortest: int = 100,
    longest: int = 1024,
    highest_token: int = 10_000,
    seed: int = 0,
) -> Workload:
    """Prompts and outputs of ``shortest`` to ``longest`` random tokens.

    The defaults draw nano-vllm's benchmark, number by number: 133,966 output tokens.
    """
    draw = Random(seed)
    prompts = [
        [draw.randint(0, highest_token) for _ in range(draw.randint(shortest, longest))]
        for _ in range(count)
    ]
    return Workload(prompts, [draw.randint(shortest, longest) for _ in range(count)])


def equal_lengths(
    count: int, length: int, max_tokens: int, *, vocab: int, seed: int = 1
) -> Workload:
    """``count`` prompts of ``length`` random tokens, which share no prefix."""
    draw = Random(seed)
    prompts = [[draw.randrange(vocab) for _ in range(length)] for _ in range(count)]
    return Workload(prompts, [max_tokens] * count)
