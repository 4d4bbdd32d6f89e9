"""beam_search against transformers and against exhaustive search."""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import random

import pytest
import torch

from asyncllm import (
    LLM,
    AsyncLLMEngine,
    DeadlineExceededError,
    EngineClosedError,
    EngineOverloadedError,
    InvalidRequestError,
    RequestError,
    beam_search,
)
from asyncllm.beams import BeamSearch
from asyncllm.outputs import Logprob
from asyncllm.testing import fake_engine
from tests import reference
from tests.checkpoints import copy_tokenizer, make_checkpoint
from tests.slow import slow_but

VOCAB_SIZE = 96
SETTINGS = {"dtype": "float32", "device": "cpu", "num_threads": 1, "num_blocks": 200}
SETTINGS |= {"block_size": 4, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Directory and transformers' model."""
    path = tmp_path_factory.mktemp("beams")
    model = make_checkpoint(path, "Qwen3ForCausalLM", vocab_size=VOCAB_SIZE, eos_token_id=5)
    copy_tokenizer(path)
    return path, model


def prompts(count):
    draw = random.Random(2)
    return [
        [draw.randrange(6, VOCAB_SIZE) for _ in range(draw.randint(1, 20))] for _ in range(count)
    ]


def transformers_beams(model, prompt, width, eos, **options):
    """Tokens, without padding, and scores, of a model that computes in float64."""
    with torch.no_grad():
        found = (
            copy.deepcopy(model)
            .double()
            .generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                eos_token_id=eos or None,
                pad_token_id=VOCAB_SIZE - 1,
                return_dict_in_generate=True,
                output_scores=True,
                **options,
            )
        )
    beams = []
    for row in found.sequences[:, len(prompt) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
        beams.append(row[:end])
    return beams, found.sequences_scores.tolist()


def near(model, prompt, beam, penalty=1.0):
    """What noise may change the score of a beam by: that of each token, scaled by the penalty."""
    count, (_, noise) = len(beam.token_ids), reference.score(model, [*prompt, *beam.token_ids])
    return reference.MARGIN * noise * count / count**penalty


WAYS = [
    {},
    {"early_stopping": True},
    {"early_stopping": "never"},
    {"length_penalty": 0.0},
    {"length_penalty": 2.0, "early_stopping": "never"},
    {"length_penalty": -1.0},
]


@pytest.mark.parametrize("way", slow_but(range(len(WAYS)), 0, 4))
@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_beams_equal_transformers(checkpoint, way):
    (path, model), compared = checkpoint, set()
    async with AsyncLLMEngine(path, **SETTINGS, async_scheduling=way % 2 == 1) as engine:
        for i, prompt in enumerate(prompts(6)):
            width, length = 2 + (i + way) % 5, 4 + 2 * i
            # Tokens that the beams have without them are stop tokens that come.
            free, _ = transformers_beams(model, prompt, width, [], max_new_tokens=length)
            eos = list(dict.fromkeys([5, free[-1][-1], free[0][1]]))[: i % 3 + 1]
            expected, scores = transformers_beams(
                model, prompt, width, eos, max_new_tokens=length, **WAYS[way]
            )
            found = await beam_search(
                engine, prompt, width, max_tokens=length, stop_token_ids=eos[1:], **WAYS[way]
            )
            assert [list(beam.token_ids) for beam in found.outputs] == expected
            for index, (beam, score) in enumerate(zip(found.outputs, scores, strict=True)):
                penalty = WAYS[way].get("length_penalty", 1.0)
                assert abs(beam.score - score) < near(model, prompt, beam, penalty)
                total = beam.cumulative_logprob / len(beam.token_ids) ** penalty
                assert beam.score == pytest.approx(total)
                stops = beam.token_ids[-1] in eos
                assert beam.index == index
                assert beam.finish_reason == ("stop" if stops else "length")
                assert beam.stop_reason == (
                    beam.token_ids[-1] if beam.token_ids[-1] in eos[1:] else None
                )
                shown = beam.token_ids[: len(beam.token_ids) - stops]
                assert beam.text == engine.tokenizer.decode(shown)
                compared.add(beam.finish_reason)
        stats = engine.stats()
    assert compared == {"stop", "length"}
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_beams_share_prefixes(checkpoint):
    path, _ = checkpoint
    (prompt,) = prompts(1)
    prompt = [*prompt, *range(6, 46)]
    async with AsyncLLMEngine(path, **SETTINGS) as engine:
        found = await beam_search(engine, prompt, 4, max_tokens=20, ignore_eos=True)
        stats = engine.stats()
    assert all(len(beam.token_ids) == 20 for beam in found.outputs)
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 80)
    assert stats.num_requests == 1 + 19 * 4
    # Of each but the first no more than a block, and the blocks that a beam has filled meanwhile.
    computed = stats.prefix_cache_queries - stats.prefix_cache_hits
    assert computed <= len(prompt) + 19 * 4 * 4


class Table:
    """A model as a table: the logits of a token by what came before."""

    def __init__(self, vocab_size, seed):
        self.vocab_size, self.seed = vocab_size, seed

    def logprobs(self, tokens):
        draw = random.Random(f"{self.seed} {tokens}")
        logits = [draw.gauss(0, 1.5) for _ in range(self.vocab_size)]
        total = math.log(sum(map(math.exp, logits)))
        return [one - total for one in logits]

    def top(self, tokens, count):
        logprobs = self.logprobs(tokens)
        order = sorted(range(self.vocab_size), key=lambda one: -logprobs[one])[:count]
        return [Logprob(one, logprobs[one], rank) for rank, one in enumerate(order, 1)]


def run(search, table):
    while not search.done:
        top_tokens = [
            table.top(beam.token_ids, search.candidates_per_beam) for beam in search.running_beams
        ]
        search.advance(top_tokens)
    return search.ended_beams


@pytest.mark.parametrize("seed", range(5))
def test_a_width_of_all_finds_the_best_of_all(seed):
    """With room for every sequence the search is an enumeration."""
    table, length, stop = Table(3, seed), 4, 2
    every = []
    for size in range(1, length + 1):
        for tokens in itertools.product(range(3), repeat=size):
            if stop in tokens[:-1] or (size < length and tokens[-1] != stop):
                continue
            logprob = sum(table.logprobs(list(tokens[:i]))[t] for i, t in enumerate(tokens))
            every.append((logprob / size, list(tokens)))
    every.sort(reverse=True)
    search = BeamSearch(
        beam_width=len(every),
        max_tokens=length,
        early_stopping="never",
        stop_token_ids=frozenset([stop]),
    )
    found = run(search, table)
    assert [beam.token_ids for beam in found] == [tokens for _, tokens in every]
    assert [beam.score for beam in found] == pytest.approx([score for score, _ in every])


def test_a_width_of_one_is_greedy_until_the_end():
    table = Table(50, 1)
    tokens = []
    for _ in range(8):
        tokens.append(table.top(tokens, 1)[0].token_id)
    (found,) = run(BeamSearch(beam_width=1, max_tokens=8), table)
    assert found.token_ids == tokens


def test_only_likeliest_beams_end():
    search = BeamSearch(beam_width=2, max_tokens=9, stop_token_ids=frozenset([1, 2]))
    top = [Logprob(token, -float(rank), rank) for rank, token in enumerate([1, 5, 2, 6], 1)]
    search.advance([top])
    assert [(beam.token_ids, beam.score) for beam in search.ended_beams] == [([1], -1.0)]
    assert [beam.token_ids for beam in search.running_beams] == [[5], [6]]
    # Of two likeliest that end, none is left out, and two others go on.
    search = BeamSearch(beam_width=2, max_tokens=9, stop_token_ids=frozenset([1, 5]))
    search.advance([[*top, Logprob(7, -5.0, 5)]])
    assert [beam.token_ids for beam in search.ended_beams] == [[1], [5]]
    assert [beam.token_ids for beam in search.running_beams] == [[2], [6]]


WRONG = [
    (0, {}, "beam_width", "from 1 to 1024"),
    (200, {}, "beam_width", "needs more log-probabilities"),
    (2, {"max_tokens": 0}, "max_tokens", "from 1"),
    (2, {"length_penalty": math.inf}, "length_penalty", "from -10 to 10"),
    (2, {"early_stopping": 1}, "early_stopping", 'true, false or "never"'),
    (2, {"early_stopping": "always"}, "early_stopping", 'true, false or "never"'),
    (2, {"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids", "from 0 to 95"),
    (2, {"ignore_eos": 3}, "ignore_eos", "true or false"),
    (2, {"timeout": 0}, "timeout", "seconds above 0"),
    (2, {"priority": 1}, "priority", "fcfs"),
]


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_arguments(checkpoint):
    path, _ = checkpoint
    engine = AsyncLLMEngine(path, **SETTINGS)
    with pytest.raises(EngineClosedError):
        await beam_search(engine, [1], 2, max_tokens=1)
    async with engine:
        for width, options, param, accepted in WRONG:
            with pytest.raises(InvalidRequestError) as caught:
                await beam_search(engine, [1], width, **{"max_tokens": 3, **options})
            assert caught.value.param == param
            assert accepted in str(caught.value)


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_search_ends_with_the_context(checkpoint):
    path, model = checkpoint
    prompt = prompts(1)[0] + [7] * 20
    room = 6
    async with AsyncLLMEngine(path, **SETTINGS, max_model_len=len(prompt) + room) as engine:
        found = await beam_search(engine, prompt, 3, max_tokens=50)
    expected, scores = transformers_beams(model, prompt, 3, [5], max_new_tokens=room)
    assert [list(beam.token_ids) for beam in found.outputs] == expected
    for beam, score in zip(found.outputs, scores, strict=True):
        assert abs(beam.score - score) < near(model, prompt, beam)


async def gated(engine, **options):
    """A search whose requests wait from its third step on."""
    search = asyncio.ensure_future(
        beam_search(engine, [9, 8, 7], 3, max_tokens=40, ignore_eos=True, **options)
    )
    while engine.stats().num_finished < 4:
        await asyncio.sleep(0)
    await engine.pause()
    while engine.stats().num_waiting + engine.stats().num_running < 3:
        await asyncio.sleep(0.001)
    return search


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_cancelled_search_aborts_its_requests(checkpoint):
    path, _ = checkpoint
    async with AsyncLLMEngine(path, **SETTINGS) as engine:
        search = await gated(engine)
        search.cancel()
        with pytest.raises(asyncio.CancelledError):
            await search
        await engine.resume()
        while (stats := engine.stats()).num_waiting or stats.num_running:
            await asyncio.sleep(0.001)
        assert stats.num_aborted == 3
        assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_search_of_an_engine_that_closes(checkpoint):
    path, _ = checkpoint
    async with AsyncLLMEngine(path, **SETTINGS) as engine:
        search = await gated(engine)
        await engine.aclose()
        with pytest.raises(EngineClosedError, match="closed meanwhile"):
            await search


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_deadline_returns_partial_output(checkpoint):
    path, _ = checkpoint
    async with AsyncLLMEngine(path, **SETTINGS) as engine:
        search = await gated(engine, timeout=1.0)
        with pytest.raises(DeadlineExceededError, match=r"after [1-9]\d* tokens") as caught:
            await search
        await engine.resume()
    beams = caught.value.partial.outputs
    assert len(beams) == 3
    assert all(beam.finish_reason is None and beam.token_ids for beam in beams)
    assert [beam.score for beam in beams] == sorted((b.score for b in beams), reverse=True)


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_a_queue_that_is_short_or_full(checkpoint):
    path, _ = checkpoint
    async with AsyncLLMEngine(path, **SETTINGS) as engine:
        expected = await beam_search(engine, [9, 8, 7], 4, max_tokens=6)
    async with AsyncLLMEngine(path, **SETTINGS, max_queued_requests=1) as engine:
        found = await beam_search(engine, [9, 8, 7], 4, max_tokens=6)
        assert [b.token_ids for b in found.outputs] == [b.token_ids for b in expected.outputs]
        await engine.pause()
        waiting = engine.stream([1], max_tokens=1)
        with pytest.raises(EngineOverloadedError):
            await beam_search(engine, [1], 2, max_tokens=1)
        waiting.close()
        await engine.resume()


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_an_executor_without_log_probabilities():
    async with fake_engine("Yes.") as engine:
        with pytest.raises(RequestError, match="reports no log-probabilities"):
            await beam_search(engine, "?", 2, max_tokens=3)


def test_an_engine_that_threads_use(checkpoint):
    path, model = checkpoint
    with LLM(path, **SETTINGS) as llm:
        search = beam_search(llm.engine, [9, 8, 7], 3, max_tokens=4, ignore_eos=True)
        found = asyncio.run(search)
        (best,) = llm.generate(
            [[9, 8, 7]], max_tokens=4, temperature=0, logprobs=0, ignore_eos=True
        )
    assert len({beam.token_ids for beam in found.outputs}) == 3
    (first, greedy), prompt = (found.outputs[0], best.outputs[0]), [9, 8, 7]
    noise = near(model, prompt, first, 0.0) + near(model, prompt, greedy, 0.0)
    assert first.cumulative_logprob >= greedy.cumulative_logprob - noise
