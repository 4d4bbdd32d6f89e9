"""transformers as the reference: greedy tokens and log-probabilities, and the comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from asyncllm.gpu.threads import set_thread_count
from tests.driver import Sequence

GAP = 1e-4


@dataclass
class Expected:
    """``logprobs [n, vocab_size]`` float32 at each of the n output tokens."""

    tokens: list[int]
    logprobs: torch.Tensor


@dataclass
class Tally:
    """Tokens compared, and outputs that parted at a tie of the reference."""

    tokens: int = 0
    ties: int = 0


def generate(model: Any, prompt: list[int], count: int) -> Expected:
    set_thread_count(1)  # more of them only get in each other's way on a model this small
    result = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.cat(result.logits).float()
    return Expected(result.sequences[0, len(prompt) :].tolist(), logits.log_softmax(-1))


def compare(seq: Sequence, expected: Expected, tally: Tally, tolerance: float = 1e-4) -> None:
    """Raises AssertionError unless tokens and log-probabilities agree."""
    assert seq.error is None, seq.error
    assert len(seq.outputs) == len(seq.logprobs) == seq.max_tokens
    for index, (token, entry) in enumerate(zip(seq.outputs, seq.logprobs, strict=True)):
        row = expected.logprobs[index]
        assert entry.sampled.token_id == token
        for candidate in (entry.sampled, *entry.top):
            wrong = abs(row[candidate.token_id].item() - candidate.logprob)
            assert wrong < tolerance, (index, candidate, wrong)
        tally.tokens += 1
        reference = expected.tokens[index]
        if token != reference:
            gap = abs(row[reference] - row[token]).item()
            assert gap < GAP, f"token {index}: {token}, expected {reference}, gap {gap}"
            tally.ties += 1
            return
