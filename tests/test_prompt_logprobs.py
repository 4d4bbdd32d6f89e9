"""Prompt log-probabilities against transformers."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncLLMEngine, SamplingParams
from asyncllm.core.batch import PromptLogprobSpan
from asyncllm.core.deadlines import DeadlineExceededError
from asyncllm.errors import RequestError
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.sample import prompt_logprobs as prompt_logprobs_module
from asyncllm.outputs import TokenLogprobs
from tests.checkpoints import copy_tokenizer, make_checkpoint
from tests.driver import Driver, Sequence
from tests.dummy_runner import MODEL
from tests.fakes import fake
from tests.reference import MARGIN, score
from tests.scheduler_rig import Rig
from tests.slow import slow_but
from tests.static_runner import LateStream, make_decoder, make_runner

VOCAB_SIZE = 2048
SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1}
SETTINGS |= {"block_size": 4, "num_blocks": 120}
Found = tuple[TokenLogprobs | None, ...]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("checkpoint")
    copy_tokenizer(path)
    return path, make_checkpoint(path, "Qwen3ForCausalLM", head_dim=16, vocab_size=VOCAB_SIZE)


def prompts(*lengths: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(n)] for n in lengths]


def check(found: Found | None, prompt: list[int], model: Any, count: int) -> None:
    """Raises AssertionError unless these are transformers' log-probabilities of the prompt."""
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    expected, noise = score(model, prompt)
    limit = MARGIN * noise
    for entry, token, row in zip(found[1:], prompt[1:], expected, strict=False):
        assert entry is not None
        assert entry.token_id == token
        assert abs(entry.logprob - row[token]) < limit
        closer = [int((row > row[token] + near).sum()) for near in (2 * limit, -2 * limit)]
        assert closer[0] + 1 <= entry.sampled.rank <= max(closer)
        assert [one.rank for one in entry.top] == [*range(1, count + 1)]
        best = row.topk(count).values.tolist()
        for one, value in zip(entry.top, best, strict=True):
            assert abs(one.logprob - value) < limit
            assert abs(row[one.token_id] - value) < 2 * limit


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize("budget", [3, 16, 256])
@pytest.mark.parametrize("ahead", [False, True])
async def test_equal_to_transformers_for_every_chunk_size(checkpoint, budget, ahead):
    path, model = checkpoint
    asked = prompts(1, 2, 5, 16, 33, 47)
    settings = SETTINGS | {"max_num_batched_tokens": budget, "max_num_seqs": 3}
    async with AsyncLLMEngine(path, async_scheduling=ahead, **settings) as engine:
        plain = engine.stream(asked[4], max_tokens=4, temperature=0, logprobs=1)
        streams = [
            engine.stream(prompt, max_tokens=1 + i % 3, temperature=0, prompt_logprobs=i % 4)
            for i, prompt in enumerate(asked)
        ]
        results = [await stream.result() for stream in streams]
        neighbour = await plain.result()
    assert neighbour.prompt_logprobs is None
    assert neighbour.token_ids[:2] == results[4].token_ids
    for i, (prompt, result) in enumerate(zip(asked, results, strict=True)):
        check(result.prompt_logprobs, prompt, model, i % 4)
        assert result.usage.cached_tokens == 0
        assert streams[i].prompt_logprobs == result.prompt_logprobs


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_several_outputs_preemption_and_the_whole_vocabulary(checkpoint):
    path, model = checkpoint
    asked = prompts(24, 26, 23)
    settings = SETTINGS | {"num_blocks": 20, "max_num_batched_tokens": 16, "max_logprobs": -1}
    async with AsyncLLMEngine(path, **settings) as engine:
        streams = [
            engine.stream(prompt, max_tokens=40, ignore_eos=True, seed=1, prompt_logprobs=2)
            for prompt in asked
        ]
        several = engine.stream(asked[0], n=2, max_tokens=2, seed=1, prompt_logprobs=-1)
        results = [await stream.result() for stream in (*streams, several)]
        assert engine.stats().num_preemptions > 0
        hit = await engine.stream(asked[0], max_tokens=1).result()
    for result, prompt, count in zip(
        results, (*asked, asked[0]), (2, 2, 2, VOCAB_SIZE), strict=True
    ):
        check(result.prompt_logprobs, prompt, model, count)
    assert hit.prompt_logprobs is None
    assert hit.usage.cached_tokens > 0


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return make_decoder(MODEL)


def run(decoder: Decoder, depth: int, chunk: int, *, late: bool) -> list[Sequence]:
    settings: dict[str, Any] = {"capturer": None}
    if late:
        settings = {"capturer": GraphCapturer(), "stream": LateStream()}
    driver = Driver(make_runner(decoder, **settings))
    draw = random.Random(2)
    seqs = []
    for i, length in enumerate((30, 9, 4, 21, 2)):
        params = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=(None, 3)[i % 2])
        prompt = [draw.randrange(128) for _ in range(length)]
        seqs.append(driver.add(prompt, 5, params))
    driver.run(seqs, chunk, depth)
    assert not any(seq.error for seq in seqs)
    if late:
        assert settings["stream"].most == depth  # no chunk waits for the host
    return seqs


@pytest.mark.parametrize("slice_elements", slow_but([1, 1000, 1 << 24], 1000))
def test_device_that_runs_ahead_gives_the_same(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, slice_elements: int
) -> None:
    expected = run(decoder, 1, 0, late=False)
    assert [len(seq.prompt_logprobs) for seq in expected] == [0, 8, 0, 20, 0]
    monkeypatch.setattr(prompt_logprobs_module, "MAX_SLICE_LOGITS", slice_elements)
    for depth in (1, 2):
        for chunk in (0, 1, 4, 7):
            for seq, other in zip(run(decoder, depth, chunk, late=True), expected, strict=True):
                assert seq.outputs == other.outputs
                for one, two in zip(seq.prompt_logprobs, other.prompt_logprobs, strict=True):
                    assert one.token_id == two.token_id
                    assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
                    assert [c.logprob for c in one.top] == pytest.approx(
                        [c.logprob for c in two.top], abs=1e-4
                    )


@pytest.mark.parametrize("late", [False, True])
def test_non_finite_logits_end_only_their_request(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Only the positions of the prompt are; what the request is sampled from is sound."""
    logits = decoder.logits
    asked = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=0)
    settings: dict[str, Any] = {"capturer": None}
    if late:
        settings = {"capturer": GraphCapturer(), "stream": LateStream()}
    driver = Driver(make_runner(decoder, **settings))
    broken, sound = driver.add([1] * 12, 3, asked), driver.add([2] * 5, 3, asked)
    monkeypatch.setattr(
        decoder, "logits", lambda hidden: logits(hidden) * (torch.nan if len(hidden) == 11 else 1)
    )
    driver.run([broken, sound])
    assert "not finite" in str(broken.error)
    assert (len(broken.outputs), len(broken.prompt_logprobs)) == (0, 0)
    assert (len(sound.outputs), len(sound.prompt_logprobs)) == (3, 4)


# --- the core ----------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_chunks_bring_their_own_positions(depth: int) -> None:
    rig = Rig(max_num_batched_tokens=8, pipeline_depth=depth)
    request = rig.add(range(10), max_tokens=1, prompt_logprobs=3)
    spans = []
    while rig.scheduler.has_work():
        step = rig.launch()
        if step is not None:
            spans.append(step.batch.prompt_logprobs)
        rig.collect()
    assert spans == [
        {0: PromptLogprobSpan(0, 4, 3)},
        {0: PromptLogprobSpan(4, 8, 3)},
        {0: PromptLogprobSpan(8, 9, 3)},
    ]
    rig.expect(request)
    assert request.whole_prompt_logprobs == (
        None,
        *rig.executor.reference_prompt_logprobs(range(10), 3),
    )


def test_positions_count_for_more_of_the_budget_of_a_step() -> None:
    """All requests together, so that a step takes no longer; those that are known count no more."""
    rig = Rig(max_num_batched_tokens=16)
    few = rig.add(range(6), max_tokens=3, prompt_logprobs=3)
    many = rig.add(range(7), max_tokens=1, prompt_logprobs=33)
    plain = rig.add(range(20), max_tokens=1)
    assert rig.step() == {"r0": 6, "r1": 1, "r2": 1}
    assert rig.step() == {"r0": 1, "r1": 5}
    assert rig.step() == {"r0": 1, "r1": 1, "r2": 14}
    rig.finish_all(few, many, plain)


def test_a_step_of_one_token_computes_a_position() -> None:
    rig = Rig(max_num_batched_tokens=1)
    request = rig.add(range(3), max_tokens=1, prompt_logprobs=0)
    assert [rig.step() for _ in range(3)] == [{"r0": 1}] * 3
    rig.expect(request)


def test_the_prefix_cache_is_written_and_not_read() -> None:
    rig = Rig(max_num_batched_tokens=48)
    first, again = (rig.add(range(12), max_tokens=1, prompt_logprobs=0) for _ in range(2))
    assert rig.step() == {"r0": 12, "r1": 12}
    plain = rig.add(range(12), max_tokens=1)
    assert rig.step() == {"r2": 4}
    assert (first.num_cached_tokens, again.num_cached_tokens, plain.num_cached_tokens) == (0, 0, 8)
    assert (rig.scheduler.kv.num_queried_tokens, rig.scheduler.kv.num_hit_tokens) == (12, 8)
    rig.expect(first, again, plain)


def test_preempted_request_continues_after_known_positions() -> None:
    """What has come is not asked for again, and its blocks may be read."""
    rig = Rig(max_num_batched_tokens=12)
    request = rig.add(range(16), max_tokens=3, prompt_logprobs=1)
    rig.step()
    rig.step()
    rig.scheduler.preempt(request)
    step = rig.launch()
    assert step is not None
    assert (step.batch.starts, step.batch.prompt_logprobs) == (
        [12],
        {0: PromptLogprobSpan(12, 15, 1)},
    )
    rig.collect()
    rig.finish_all(request)


def test_recomputed_positions_are_kept_once() -> None:
    """A recurrent request that pauses with a step in flight starts over, and that step counts."""
    rig = Rig(max_num_batched_tokens=12, pipeline_depth=2, has_states=True)
    request = rig.add(range(16), max_tokens=3, prompt_logprobs=1)
    first = rig.launch()
    rig.scheduler.pause(request)
    rig.scheduler._evict_slot(request)
    rig.scheduler.resume(request)
    second = rig.launch()
    spans = [step.batch.prompt_logprobs for step in (first, second) if step is not None]
    assert spans == [{0: PromptLogprobSpan(0, 6, 1)}] * 2
    rig.collect()
    rig.collect()
    rig.finish_all(request)


def test_positions_that_come_after_the_reader_dropped_all_are_not_kept() -> None:
    """A reader may drop them while a step that computes them again is in flight."""
    rig = Rig(max_num_batched_tokens=12, pipeline_depth=2, has_states=True)
    request = rig.add(range(7), max_tokens=3, prompt_logprobs=1)
    first = rig.launch()
    rig.scheduler.pause(request)
    rig.scheduler._evict_slot(request)
    rig.scheduler.resume(request)
    second = rig.launch()
    assert first is not None
    assert second is not None
    assert first.batch.prompt_logprobs == second.batch.prompt_logprobs
    rig.collect()
    assert request.prompt_logprobs == rig.executor.reference_prompt_logprobs(range(7), 1)
    request.prompt_logprobs = None
    rig.collect()
    assert request.prompt_logprobs is None
    rig.scheduler.preempt(request)
    step = rig.launch()
    assert step is not None
    assert step.batch.prompt_logprobs == {}
    rig.collect()
    while rig.scheduler.has_work():
        rig.launch()
        rig.collect()
    assert request.output_token_ids == rig.executor.reference(list(range(7)), 3)


def test_incomplete_results_are_detected() -> None:
    rig = Rig()
    rig.add(range(3), prompt_logprobs=0)
    step = rig.launch()
    assert step is not None
    result = rig.executor.collect()
    result.prompt_logprobs[0] = result.prompt_logprobs[0][:1]
    with pytest.raises(ValueError, match=r"of \{0: 1\} tokens by row; expected \{0: 2\}"):
        next(rig.scheduler.update(step, result))


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_ends_before_the_prompt_is_computed() -> None:
    rig = fake(max_num_batched_tokens=4)
    prompt = [*range(1, 11)]
    async with rig.engine() as engine:
        rig.executor.row_errors["bad"] = ZeroDivisionError("on purpose")
        bad = engine.stream(prompt, request_id="bad", max_tokens=2, prompt_logprobs=1)
        good = engine.stream(prompt, max_tokens=2, prompt_logprobs=1)
        with pytest.raises(RequestError, match="on purpose"):
            await bad.result()
        result = await good.result()
        assert result.prompt_logprobs == (
            None,
            *rig.executor.reference_prompt_logprobs(prompt, 1),
        )
        late = engine.stream(prompt, timeout=1e-6, prompt_logprobs=1)
        with pytest.raises(DeadlineExceededError):
            await late.result()
        aborted = engine.stream(prompt, prompt_logprobs=1)
        aborted.abort()
        assert (await aborted.result()).prompt_logprobs is None
        await asyncio.sleep(0)
        assert engine.stats().num_free_blocks == engine.stats().num_blocks
