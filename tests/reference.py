"""transformers as the reference: greedy tokens and log-probabilities, and the comparison."""

from __future__ import annotations

import copy
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from asyncllm.gpu.threads import set_thread_count
from tests.driver import Sequence

MARGIN = 8.0
"""Bound of a difference, in units of the noise of float32 that is measured in the same run: two
orders of summation differ by a small multiple of what one of them differs from float64."""
SMALL = 1e-2
"""Of how much log-probabilities vary: what the bound may come to. Until then a model amplifies
noise and a mistake alike, so that a mistake shows in any of them."""


@dataclass
class Expected:
    """Greedy outputs of a model that computes in float64.

    Attributes:
        logprobs: ``[n, vocab_size]`` at each of the n output tokens.
        noise: what float32 changes log-probabilities by, at most.
    """

    tokens: list[int]
    logprobs: torch.Tensor
    noise: float

    @property
    def limit(self) -> float:
        """What log-probabilities of a sound float32 model may differ by."""
        return MARGIN * self.noise

    @property
    def num_ties(self) -> int:
        """Tokens that noise may decide: two are so near that each may be the largest."""
        first, second = self.logprobs.topk(2).values.unbind(-1)
        return int((first - second < 2 * self.limit).sum())

    def first(self, count: int) -> Expected:
        """The same, of so many tokens."""
        return replace(self, tokens=self.tokens[:count], logprobs=self.logprobs[:count])


@dataclass
class Tally:
    """Tokens compared, and outputs of the reference up to ties where others parted from it."""

    tokens: int = 0
    ties: set[tuple[int, ...]] = field(default_factory=set)


def score(model: Any, tokens: list[int]) -> tuple[torch.Tensor, float]:
    """What a float32 ``model`` makes of a sequence in float64, and the noise of float32 in it.

    Returns:
        Log-probabilities ``[n, vocab_size]`` behind each of n tokens, and what float32 changes
        them by, at most.

    Raises:
        AssertionError: the noise is such that a mistake might hide in it.
    """
    set_thread_count(1)  # more of them only get in each other's way on a model this small
    models, ids = (copy.deepcopy(model).double(), model), torch.tensor([tokens])
    with torch.no_grad():
        exact, rounded = (each(ids).logits[0].double().log_softmax(-1) for each in models)
    noise = float((rounded - exact).abs().max())
    assert noise * MARGIN < SMALL * float(exact.std())
    return exact, noise


def generate(model: Any, prompt: list[int], count: int) -> Expected:
    """The greedy continuation by ``count`` tokens, of a float32 ``model`` in float64."""
    set_thread_count(1)
    result = (
        copy.deepcopy(model)
        .double()
        .generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    )
    logprobs = torch.cat(result.logits).double().log_softmax(-1)
    tokens = result.sequences[0].tolist()
    return Expected(tokens[len(prompt) :], logprobs, score(model, tokens)[1])


def check_tokens(outputs: Tokens[int], expected: Expected) -> int:
    """Compares tokens; returns how many are equal, which are all unless a tie parts them.

    Raises:
        AssertionError: they part where the reference is decided, by more than noise.
    """
    for index, (token, reference) in enumerate(zip(outputs, expected.tokens, strict=True)):
        if token != reference:
            row = expected.logprobs[index]
            gap = float(row[reference] - row[token])
            assert gap < 2 * expected.limit, (
                f"token {index}: {token}, expected {reference}, gap {gap}"
            )
            return index
    return len(outputs)


def compare(seq: Sequence, expected: Expected, tally: Tally) -> None:
    """Raises AssertionError unless tokens and log-probabilities agree."""
    assert seq.error is None, seq.error
    assert len(seq.outputs) == len(seq.logprobs) == seq.max_tokens
    equal = check_tokens(seq.outputs, expected.first(seq.max_tokens))
    for index, (token, entry) in enumerate(zip(seq.outputs, seq.logprobs, strict=True)):
        row = expected.logprobs[index]
        assert entry.sampled.token_id == token
        for candidate in (entry.sampled, *entry.top):
            wrong = abs(row[candidate.token_id].item() - candidate.logprob)
            assert wrong < expected.limit, (index, candidate, wrong, expected.limit)
        tally.tokens += 1
        if index == equal:
            tally.ties.add(tuple(expected.tokens[: index + 1]))
            return
