"""Recorded steps that run ahead on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from asyncllm.core.batch import GrammarMask, StepBatch
from asyncllm.core.executor import StepOutOfMemoryError
from asyncllm.gpu.graph import step_queue
from asyncllm.gpu.graph.step_queue import StepQueue
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.ops.native_embedding import NativePlainEmbedding
from asyncllm.gpu.sample.sample_output import NOT_FINITE_MESSAGE
from asyncllm.sampling_params import SamplingParams
from tests.driver import Driver, Sequence, outputs_of, packed, state_of
from tests.dummy_runner import MODEL as LLAMA
from tests.native_library import check_forked_child, needs_native
from tests.recorded_runner import (
    PROMPTS,
    QWEN3,
    make_decoder,
    make_runner,
    op_by_op,
    program_of,
)

pytestmark = needs_native

GREEDY = SamplingParams(temperature=0.0, seed=0)
DRAWN = SamplingParams(temperature=0.9, seed=5)
PENALISED = replace(DRAWN, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.2)
BIASED = replace(GREEDY, logit_bias={3: 5.0, 7: -2.0}, stop_token_ids=(3,))
ALONE = {
    "greedy": [GREEDY] * 4,
    "drawn": [DRAWN, replace(DRAWN, top_k=9), replace(DRAWN, top_p=0.8), replace(DRAWN, min_p=0.1)],
    "both": [DRAWN, GREEDY, replace(DRAWN, top_k=9), GREEDY],
    "logprobs": [DRAWN, GREEDY, replace(GREEDY, logprobs=3), replace(DRAWN, logprobs=0)],
    "drawn logprobs": [DRAWN, replace(DRAWN, logprobs=3), replace(DRAWN, logprobs=1), DRAWN],
    "penalties": [DRAWN, GREEDY, PENALISED, replace(PENALISED, temperature=0.0)],
    "biases": [GREEDY, BIASED, DRAWN, replace(BIASED, temperature=0.9, min_tokens=4)],
    "processed logprobs": [
        replace(BIASED, logprobs=3),
        DRAWN,
        replace(PENALISED, logprobs=1),
        GREEDY,
    ],
    "processed alone": [PENALISED, BIASED, replace(PENALISED, top_p=0.8), BIASED],
}
HOST = {
    "prompt logprobs": replace(GREEDY, prompt_logprobs=2),
    "processors": replace(DRAWN, logits_processors=(lambda output, logits: -logits,)),
}


def ahead(decoder: Decoder, num_tokens: int = 1) -> ModelRunner:
    runner = make_runner(decoder)
    runner.enable_async_scheduling(num_tokens)
    return runner


def in_flight(prompt: list[int], steps: int = 2) -> tuple[ModelRunner, Driver, Sequence]:
    """A greedy sequence with so many steps queued."""
    runner = ahead(make_decoder(QWEN3))
    driver = Driver(runner)
    seq = driver.add(prompt, 6, GREEDY)
    for step in range(steps):
        driver.launch([(seq, step)])
    return runner, driver, seq


def queue_of(runner: ModelRunner) -> StepQueue:
    queue = state_of(runner).stream
    assert isinstance(queue, StepQueue)
    return queue


def watch(runner: ModelRunner) -> list[bool]:
    """Of every step submitted from now on, whether its tokens come with it."""
    queue = queue_of(runner)
    found: list[bool] = []
    submit = queue.submit

    def watched(step: LaunchedStep, *, is_early: bool):
        submit(step, is_early=is_early)
        found.append(step.is_sampling_queued)

    queue.submit = watched
    return found


def outputs(runner: ModelRunner, asked: list[SamplingParams], depth: int, chunk: int = 7):
    driver, asks = Driver(runner), list(enumerate(zip(PROMPTS, asked, strict=True)))
    seqs = [driver.add(p, 5 + 3 * i, one) for i, (p, one) in asks]
    driver.run(seqs, chunk=chunk, depth=depth)
    # More sequences than request indices, so that these pass to others.
    more = [driver.add(p[: 3 + i], 4 + i, one) for i, (p, one) in asks]
    driver.run(more, chunk=chunk, depth=depth)
    return [(seq.outputs, seq.logprobs, seq.prompt_logprobs, seq.error) for seq in (*seqs, *more)]


MODELS = {"tied": LLAMA, "untied": QWEN3, "capped": replace(QWEN3, logits_softcap=2.0)}
"""Capped logits have no head that finds the largest: greedy rows are drawn from them."""


@pytest.mark.parametrize("asked", ALONE)
@pytest.mark.parametrize("model", MODELS)
def test_tokens_equal_steps_run_one_by_one(model, asked):
    decoder = make_decoder(MODELS[model])
    runner = ahead(decoder)
    assert (program_of(runner).greedy is None) == (model == "capped")
    submitted = watch(runner)
    assert outputs(runner, ALONE[asked], 2) == outputs(make_runner(decoder), ALONE[asked], 1)
    assert submitted
    assert all(submitted)


@pytest.mark.parametrize("asks", HOST)
def test_rows_with_host_work_are_sampled_by_the_host(asks):
    decoder = make_decoder(QWEN3)
    asked = [DRAWN, GREEDY, HOST[asks], replace(DRAWN, seed=8)]
    runner = ahead(decoder)
    submitted = watch(runner)
    assert outputs(runner, asked, 2) == outputs(make_runner(decoder), asked, 1)
    assert not all(submitted)


@pytest.mark.parametrize("length", [2, 3])
def test_bad_words_are_excluded_behind_a_token_in_flight(length):
    runner = ahead(make_decoder(QWEN3))
    plain = [outputs_of(runner, prompt, 40, DRAWN) for prompt in PROMPTS]
    submitted, driver = watch(runner), Driver(runner)
    words = [tuple(zip(*(one[i:] for i in range(length)), strict=False)) for one in plain]
    found = []
    for depth, other in ((2, runner), (1, op_by_op(make_runner(make_decoder(QWEN3))))):
        driver = Driver(other)
        asks = zip(PROMPTS, words, strict=True)
        seqs = [driver.add(prompt, 40, DRAWN, bad_words=bad) for prompt, bad in asks]
        driver.run(seqs, depth=depth)
        found.append([seq.outputs for seq in seqs])
    assert submitted
    assert all(submitted)
    assert found[0] == found[1]
    for one, bad in zip(found[0], words, strict=True):
        assert set(bad).isdisjoint(zip(*(one[i:] for i in range(length)), strict=False))


def test_greedy_rows_of_a_mixed_step_write_no_logits():
    runner = make_runner(make_decoder(QWEN3))
    driver = Driver(runner)
    seqs = [driver.add(PROMPTS[0], 2, one) for one in (GREEDY, DRAWN, GREEDY, BIASED)]
    driver.launch([(seq, 0) for seq in seqs])
    step = runner._launched_steps[0]
    driver.collect()
    sizes = [step.sizes]
    # Of four rows that are wanted two have logits, and of the others the largest is found.
    assert sizes == [(4, 4 * len(PROMPTS[0]), 4, 2, 2)]
    for seq in seqs:
        driver.release(seq)
        assert seq.outputs == outputs_of(runner, PROMPTS[0], 1, seq.sampling)


def test_a_step_begins_where_the_one_before_ends():
    runner, driver, seq = in_flight(PROMPTS[0])
    queue_of(runner).synchronize()
    at = len(PROMPTS[0])
    found = state_of(runner).input_batch.token_ids[seq.req_index, at : at + 2].tolist()
    driver.collect()
    driver.collect()
    assert seq.outputs == found
    assert outputs_of(make_runner(state_of(runner).model), PROMPTS[0], 2, GREEDY) == found


def test_reused_index_waits_for_step_in_flight():
    runner = ahead(make_decoder(QWEN3))
    driver = Driver(runner)
    first, other = driver.add(PROMPTS[0], 9, DRAWN), driver.add(PROMPTS[2], 9, GREEDY)
    driver.launch([(first, 0), (other, 0)])
    driver.launch([(first, 1), (other, 1)])
    driver.collect()
    index = first.req_index
    assert index is not None
    # A request that is paused takes a token that is in flight, and its index has new parameters.
    driver.release(first)
    driver.free_slots.remove(index)
    driver.free_slots.appendleft(index)
    late = driver.add([9, 8, 7], 3, GREEDY)
    driver.launch([(late, 0), (other, 1)])
    assert late.req_index == index
    assert [step.has_begun for step in runner._launched_steps] == [True, False]
    driver.collect()
    assert [step.has_begun for step in runner._launched_steps] == [True]
    driver.collect()
    driver.run([late, other], depth=2)
    for seq in (first, late, other):
        plain = make_runner(make_decoder(QWEN3))
        assert seq.outputs == outputs_of(plain, seq.prompt, len(seq.outputs), seq.sampling)


def test_a_new_request_elsewhere_does_not_wait():
    runner = ahead(make_decoder(QWEN3))
    driver = Driver(runner)
    driver.launch([(driver.add(PROMPTS[0], 9, DRAWN), 0)])
    driver.launch([(driver.add(PROMPTS[1], 9, GREEDY), 0)])
    assert [step.has_begun for step in runner._launched_steps] == [True, True]
    runner.discard()


def test_short_steps_wait_for_the_host():
    decoder = make_decoder(QWEN3)
    expected = outputs(make_runner(decoder), ALONE["both"], 1)
    runner = ahead(decoder, 3)
    started: list[tuple[int, bool]] = []
    launch = runner.launch

    def launched(batch: StepBatch) -> None:
        launch(batch)
        started.append((batch.num_tokens, runner._launched_steps[-1].has_begun))

    runner.launch = launched
    assert outputs(runner, ALONE["both"], 2) == expected
    assert any(begun for _, begun in started)
    assert not any(begun for num_tokens, begun in started if num_tokens < 3)


def test_forward_pass_overlaps_mask_making():
    decoder = make_decoder(QWEN3)
    allowed = [range(4 * n, 4 * n + 40) for n in range(9)]

    def mask(tokens: list[int]) -> bytes:
        return packed(allowed[len(tokens) % 9], 128)

    def run(runner: ModelRunner) -> list[Sequence]:
        driver = Driver(runner)
        seqs = [driver.add(PROMPTS[0], 6, GREEDY), driver.add(PROMPTS[2], 6, DRAWN, mask=mask),
                driver.add(PROMPTS[1], 6, DRAWN)]  # fmt: skip
        driver.run(seqs)
        return seqs

    plain = make_runner(decoder)
    expected = run(op_by_op(plain))
    runner = make_runner(decoder)
    submitted = watch(runner)
    launch = runner.launch

    def launched(batch: StepBatch) -> None:
        launch(batch)
        assert runner._launched_steps[-1].has_begun == bool(batch.masked_rows)

    runner.launch = launched
    found = run(runner)
    assert [seq.outputs for seq in found] == [seq.outputs for seq in expected]
    assert submitted == [False] * 6
    assert all(token in allowed[(at + 30) % 9] for at, token in enumerate(found[1].outputs))


@pytest.mark.parametrize("rows_per_turn", [1, 3, 100])
@pytest.mark.parametrize("asked", [*ALONE, "prompt logprobs"])
def test_the_library_samples_rows_under_masks(asked, rows_per_turn, monkeypatch):
    """Beside rows without masks, with bad words, and with prompt log-probabilities."""
    monkeypatch.setattr(step_queue, "_PROCESSED_LOGITS_PER_THREAD", rows_per_turn * 128)
    decoder = make_decoder(QWEN3)
    params = ALONE.get(asked) or [replace(GREEDY, prompt_logprobs=2), DRAWN, GREEDY, PENALISED]

    def third(tokens: list[int]) -> bytes:
        """A mask that is a step late, or of another row, is wrong."""
        return packed(range((len(tokens) + tokens[0]) % 3, 128, 3), 128)

    def run(runner: ModelRunner, depth: int) -> list[Sequence]:
        driver = Driver(runner)
        words = [(first, second) for first in range(0, 128, 2) for second in range(0, 128, 5)]
        seqs = [
            driver.add(
                PROMPTS[i % 4], 6 + i, params[i % 4], mask=third if i % 3 else None,
                bad_words=words if i % 2 else (),
            )
            for i in range(6)
        ]  # fmt: skip
        driver.run(seqs, chunk=7, depth=depth)
        for i, seq in enumerate(seqs):
            sums = [at + seq.tokens[0] - token for at, token in enumerate(seq.tokens)]
            assert all(one % 3 == 0 for one in sums[len(seq.prompt) :]) == bool(i % 3)
        return seqs

    def found(seqs: list[Sequence]):
        return [(seq.outputs, seq.logprobs, seq.prompt_logprobs, seq.error) for seq in seqs]

    expected = found(run(op_by_op(make_runner(decoder)), 1))
    runner = ahead(decoder)

    def sample(step: LaunchedStep) -> None:
        pytest.fail("the host samples a step")

    monkeypatch.setattr(state_of(runner), "sample", sample)
    begun = []
    take_masks = runner.sample

    def masks_taken(masks: GrammarMask) -> None:
        take_masks(masks)
        begun.append([one.has_begun for one in runner._launched_steps])

    monkeypatch.setattr(runner, "sample", masks_taken)
    assert found(run(runner, 2)) == expected
    # A step is sampled where it runs, and the next one begins there, before its tokens are read.
    assert [True, True] in begun


def test_an_error_of_sampling_apart_is_raised_at_collect(monkeypatch):
    runner = ahead(make_decoder(QWEN3))
    driver = Driver(runner)
    seq = driver.add(PROMPTS[0], 6, GREEDY, mask=lambda _: packed(range(128), 128))
    driver.launch([(seq, 0)])
    queue = queue_of(runner)
    run = queue._run

    def lacking(args, *, is_early: bool) -> None:
        args.process.words += 1
        run(args, is_early=is_early)

    monkeypatch.setattr(queue, "_run", lacking)
    with pytest.raises(RuntimeError, match="sample"):
        driver.collect()


def test_a_row_without_numbers_fails_alone():
    decoder = make_decoder(QWEN3)
    embedding = decoder.embedding
    assert isinstance(embedding, NativePlainEmbedding)
    embedding.values[77] = torch.nan
    runner = ahead(decoder)
    driver = Driver(runner)
    bad, good = (driver.add(p, 6, one) for p, one in (([3, 77], GREEDY), (PROMPTS[0], DRAWN)))
    worse = driver.add([77, 5], 6, DRAWN)
    driver.launch([(bad, 0), (good, 0), (worse, 0)])
    driver.launch([(bad, 1), (good, 1), (worse, 1)])
    driver.collect()
    assert str(bad.error) == str(worse.error) == NOT_FINITE_MESSAGE
    driver.collect()
    driver.run([good], depth=2)
    assert good.outputs == outputs_of(make_runner(decoder), PROMPTS[0], 6, DRAWN)
    assert len(good.outputs) == 6


def test_step_error_is_raised_at_collect():
    runner, driver, seq = in_flight(PROMPTS[0])
    driver.collect()
    # The step in flight reads the same table.
    queue_of(runner).synchronize()
    state_of(runner).input_batch.tables[0].table[seq.req_index] = 99
    driver.launch([(seq, 1)])
    driver.collect()
    with pytest.raises(RuntimeError, match=r"step, op \d+, rope_and_cache: a slot, block"):
        driver.collect()


def test_no_memory_for_the_thread_is_told_as_such(monkeypatch):
    runner = ahead(make_decoder(QWEN3))
    queue = queue_of(runner)
    library = queue.recorded_step.program.context.functions
    monkeypatch.setattr(library, "submit", lambda *_: 2)
    driver = Driver(runner)
    driver.launch([(driver.add(PROMPTS[0], 6, GREEDY), 0)])
    with pytest.raises(StepOutOfMemoryError):
        driver.collect()


@pytest.mark.parametrize("end", ["discard", "close"])
def test_steps_in_flight_are_awaited(end):
    runner, _, _ = in_flight(PROMPTS[2])
    queue = queue_of(runner)
    getattr(runner, end)()
    jobs = [next(queue._jobs).args for _ in range(2)]
    assert sorted(job.number for job in jobs) == [1, 2]
    assert all(job.status == 0 for job in jobs)
    assert not runner._launched_steps


def test_a_forked_child_is_refused_and_does_not_wait():
    runner, driver, seq = in_flight(PROMPTS[0], 1)
    check_forked_child(driver.collect, runner.close)
    driver.collect()
    assert len(seq.outputs) == 1
