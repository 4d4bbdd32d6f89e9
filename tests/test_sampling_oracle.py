"""Sampling against transformers' logits processors."""

from __future__ import annotations

from copy import copy
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from asyncllm.checkpoint.model_files import resolve_model
from asyncllm.errors import InvalidRequestError
from asyncllm.gpu.ops.gumbel import gumbel_keys, gumbel_sample
from asyncllm.sampling_params import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS_CHARACTERS,
    MAX_LOGIT_BIASES,
    MAX_STOP_IDS,
    SamplingParams,
)
from asyncllm.text.bad_words import bad_words_token_ids
from asyncllm.text.tokenizer import Tokenizer
from tests.chi_square import chi_square
from tests.native_library import CPU_OPS
from tests.refusals import refused
from tests.sampling_bench import Bench

VOCAB = 200
LARGE = 3000
PROMPT, OUTPUT = [3, 4, 5, 3], [7, 7, 9, 4]
BIAS = {3: 2.5, 7: -1.25, 150: 0.3}


def bias_of(values: dict[int, float]) -> SequenceBiasLogitsProcessor:
    return SequenceBiasLogitsProcessor([[[token], value] for token, value in values.items()])


def only(allowed: list[int]) -> SuppressTokensLogitsProcessor:
    return SuppressTokensLogitsProcessor([t for t in range(VOCAB) if t not in allowed])


RULES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "plain": ({}, []),
    "repetition": ({"repetition_penalty": 1.3}, [RepetitionPenaltyLogitsProcessor(1.3)]),
    "bias": ({"logit_bias": BIAS}, [bias_of(BIAS)]),
    "allowed": ({"allowed_token_ids": [3, 9, 60]}, [only([3, 9, 60])]),
    "bad word": (
        {"bad_words": ((7,), (60,))},
        [NoBadWordsLogitsProcessor([[7], [60]], eos_token_id=-1)],
    ),
    "bad words": (
        {"bad_words": ((9, 4, 8), (7, 8), (4, 11))},
        [NoBadWordsLogitsProcessor([[9, 4, 8], [7, 8], [4, 11]], eos_token_id=-1)],
    ),
    "min_tokens": (
        {"min_tokens": 5, "stop_token_ids": [3, 9], "eos": (10,)},
        [MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, [3, 9, 10])],
    ),
    "min_tokens reached": (
        {"min_tokens": 4, "stop_token_ids": [3, 9], "eos": (10,)},
        [MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, [3, 9, 10])],
    ),
    "all": (
        {
            "repetition_penalty": 0.7,
            "logit_bias": BIAS,
            "bad_words": ((60,), (4, 11)),
            "min_tokens": 9,
            "stop_token_ids": [12],
        },
        [
            bias_of(BIAS),
            RepetitionPenaltyLogitsProcessor(0.7),
            NoBadWordsLogitsProcessor([[60], [4, 11]], eos_token_id=-1),
            MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, [12]),
        ],
    ),
}


def enter_all(bench: Bench, rules: list[tuple[dict[str, Any], list[Any]]]) -> None:
    for req_index, (fields, _) in enumerate(rules):
        bench.enter(req_index, PROMPT, OUTPUT, **({"temperature": 1.0} | fields))


def expected_of(logits: torch.Tensor, processors: list[Any]) -> torch.Tensor:
    tokens = torch.tensor([PROMPT + OUTPUT])
    return LogitsProcessorList(processors)(tokens, logits.unsqueeze(0).clone())[0]


@pytest.mark.parametrize("ops", CPU_OPS)
@pytest.mark.parametrize("seed", [1, 2])
def test_processed_logits_equal_transformers_to_the_bit(ops: str, seed: int) -> None:
    rules = list(RULES.values())
    logits = torch.randn(len(rules), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    bench = Bench(VOCAB, ops=ops)
    enter_all(bench, rules)
    found = bench.process(logits, list(range(len(rules))))
    for row, (_, processors) in enumerate(rules):
        assert torch.equal(found[row], expected_of(logits[row], processors)), list(RULES)[row]
        alone = Bench(VOCAB, ops=ops)
        enter_all(alone, rules[row : row + 1])
        again = alone.process(logits[row : row + 1], [0])
        assert torch.equal(again[0], found[row])


@pytest.mark.parametrize("ops", CPU_OPS)
def test_the_longest_lists_of_the_device_give_the_same(ops: str) -> None:
    ids = list(range(0, LARGE, 2))
    fields = {
        "logit_bias": {token: token % 7 - 3.0 for token in ids[:MAX_LOGIT_BIASES]},
        "min_tokens": 9,
        "stop_token_ids": ids[-MAX_STOP_IDS:],
        "repetition_penalty": 1.2,
    }
    logits = torch.randn(2, LARGE, generator=torch.Generator().manual_seed(4))
    bench = Bench(LARGE, ops=ops)
    for req_index in (0, 1):
        bench.enter(req_index, PROMPT, OUTPUT, temperature=1.0, **fields)
    assert not bench.sampler.failures
    processors = [
        bias_of(fields["logit_bias"]),
        RepetitionPenaltyLogitsProcessor(1.2),
        MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, fields["stop_token_ids"]),
    ]
    found = bench.process(logits, [0, 1])
    for row in (0, 1):
        assert torch.equal(found[row], expected_of(logits[row], processors))


TRUNCATIONS: list[tuple[dict[str, Any], list[Any]]] = [
    ({}, []),
    ({"top_k": 7}, [TopKLogitsWarper(7)]),
    ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    ({"min_p": 0.05}, [MinPLogitsWarper(0.05)]),
    ({"top_k": 20, "top_p": 0.9}, [TopKLogitsWarper(20), TopPLogitsWarper(0.9)]),
    ({"repetition_penalty": 1.5}, [RepetitionPenaltyLogitsProcessor(1.5)]),
    (
        {"temperature": 0.7, "logit_bias": BIAS, "top_k": 12},
        [bias_of(BIAS), TemperatureLogitsWarper(0.7), TopKLogitsWarper(12)],
    ),
    (
        {"allowed_token_ids": list(range(30)), "top_p": 0.7},
        [only(list(range(30))), TopPLogitsWarper(0.7)],
    ),
]


@pytest.mark.parametrize("ops", CPU_OPS[:2])
def test_draws_of_a_mixed_batch_follow_transformers(ops: str) -> None:
    rounds, kinds = 800, len(TRUNCATIONS)
    logits = torch.randn(kinds, VOCAB, generator=torch.Generator().manual_seed(11)) * 2
    counts = np.zeros((kinds, VOCAB))
    bench = Bench(VOCAB, req_indices=kinds * 50, ops=ops)
    for first in range(0, rounds, 50):
        for row in range(kinds * 50):
            fields = {"temperature": 1.0} | TRUNCATIONS[row % kinds][0]
            bench.enter(row, PROMPT, OUTPUT, **fields, seed=first * kinds + row)
        tokens = bench.sample(logits.repeat(50, 1), list(range(kinds * 50))).token_ids
        np.add.at(counts, (np.arange(kinds * 50) % kinds, tokens), 1)
    for row, (fields, processors) in enumerate(TRUNCATIONS):
        expected = expected_of(logits[row], processors).double().softmax(-1).numpy() * rounds
        assert not counts[row][expected == 0].any(), fields
        rare = expected < 8
        wanted = np.append(expected[~rare], expected[rare].sum())
        found = np.append(counts[row][~rare], counts[row][rare].sum())
        wanted, found = wanted[wanted > 0], found[wanted > 0]
        p_value = chi_square(found, wanted)
        print(fields, f"p = {p_value:.4f}")
        assert p_value > 1e-4, fields


def test_two_rounds_have_the_distribution_of_one() -> None:
    """Rows that nothing truncates race chunk by chunk: as often as any token, and independent of
    the race among all tokens, which truncated rows run."""
    count = 1500
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(3)) * 2
    states, positions = torch.arange(count) * 977, torch.arange(count)
    ones, zeros = torch.ones(count), torch.zeros(count)
    whole = gumbel_sample(
        logits.expand(count, -1), states, positions, ones, zeros.int(), ones, zeros
    )
    expected = logits[0].double().softmax(-1).numpy() * count
    found = np.bincount(whole.numpy(), minlength=700)
    rare = expected < 8
    wanted = np.append(expected[~rare], expected[rare].sum())
    assert chi_square(np.append(found[~rare], found[rare].sum()), wanted) > 1e-4
    assert len(set(gumbel_keys(states, positions).tolist())) == count


def test_bad_words_have_a_bound_on_all_of_their_characters() -> None:
    words = ["x" * MAX_BAD_WORD_LENGTH] * (MAX_BAD_WORDS_CHARACTERS // MAX_BAD_WORD_LENGTH)
    assert SamplingParams(bad_words=words).bad_words == tuple(words)
    with refused("bad_words", "at most 16384 characters in all"):
        SamplingParams(bad_words=[*words, "y"])


def test_bad_words_are_spelt_with_and_without_a_space() -> None:
    tokenizer = Tokenizer.from_directory(resolve_model(None, None))
    found = bad_words_token_ids([" house", "the"], tokenizer, 10**6)
    bare = [tuple(tokenizer.encode(w, add_special_tokens=False)) for w in ("house", "the")]
    spaced = [tuple(tokenizer.encode(f" {w}", add_special_tokens=False)) for w in ("house", "the")]
    assert set(bare) <= set(found) <= {*bare, *spaced}
    for one, other in zip(bare, spaced, strict=True):
        assert (other in found) == (len(one) == len(other) and one[0] != other[0])
    with pytest.raises(InvalidRequestError, match="tokens the model has"):
        bad_words_token_ids(["house"], tokenizer, 1)


def test_many_bad_words_are_encoded_by_one_call_that_releases_the_gil() -> None:
    tokenizer = Tokenizer.from_directory(resolve_model(None, None))
    words = [f"word{i}" for i in range(60)]
    expected = [pair for word in words for pair in bad_words_token_ids([word], tokenizer, 10**6)]
    backend, tokenizer = tokenizer.backend, copy(tokenizer)
    tokenizer.backend = Mock(wraps=backend, spec=["encode_batch_fast"])
    assert list(bad_words_token_ids(words, tokenizer, 10**6)) == expected
    assert tokenizer.backend.encode_batch_fast.call_count == 1
    # An error names its word, though one call is given all.
    tokenizer.backend = backend
    with pytest.raises(InvalidRequestError, match=r"bad_words='lone \\ud800'"):
        bad_words_token_ids([*words, "lone \ud800"], tokenizer, 10**6)
