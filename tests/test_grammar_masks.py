"""Steps with grammar masks: forward pass, then sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.core.batch import GrammarMask
from asyncllm.core.executor import ExecutorInfo
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.gpu.batch.grammar_masks import mask_logits, num_mask_words
from asyncllm.gpu.batch.sampling_inputs import SamplingStages
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer, GraphKey, StepPart
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.sampling_params import SamplingParams
from asyncllm.testing.fake_executor import FakeExecutor, allowed_tokens
from tests.driver import Driver, Sequence, packed
from tests.dummy_runner import MODEL
from tests.static_runner import LateStream, TraceRecorder, make_decoder, make_runner

VOCAB = MODEL.vocab_size
GREEDY = SamplingParams(temperature=0.0, seed=0)
KINDS = [
    GREEDY,
    SamplingParams(temperature=1.1, seed=7),
    SamplingParams(temperature=0.9, top_k=9, seed=8),
    SamplingParams(temperature=1.2, top_p=0.8, logprobs=1, seed=9),
]
ON_DEVICE = KINDS[:3]


@pytest.fixture(scope="module")
def decoder(one_thread: None) -> Decoder:
    return make_decoder(MODEL)


def residue(tokens: list[int]) -> bytes:
    """Every third token, others at each position: a mask that is a step late is wrong."""
    return packed(range(len(tokens) % 3, VOCAB, 3), VOCAB)


def obeys(seq: Sequence) -> bool:
    start = len(seq.prompt)
    return all(t % 3 == at % 3 for at, t in enumerate(seq.tokens) if at >= start)


def run(
    runner: Any, depth: int, kinds: list[SamplingParams], count: int = 6, chunk: int = 0
) -> list[list[int]]:
    """Every second one is under a grammar."""
    driver = Driver(runner)
    seqs = [driver.add([3 * i + 1, 5, 7], 5 + i % 3, kinds[i % len(kinds)]) for i in range(count)]
    for seq in seqs[::2]:
        seq.mask = residue
    driver.run(seqs, chunk=chunk, depth=depth)
    assert all(map(obeys, seqs[::2]))
    assert not any(map(obeys, seqs[1::2]))
    return [seq.outputs for seq in seqs]


def alone(decoder: Decoder, kinds: list[SamplingParams], count: int = 6) -> list[list[int]]:
    runner = make_runner(decoder, capturer=None, max_num_seqs=1)
    found = []
    for i in range(count):
        driver = Driver(runner)
        seq = driver.add([3 * i + 1, 5, 7], 5 + i % 3, kinds[i % len(kinds)])
        seq.mask = None if i % 2 else residue
        driver.run([seq])
        found.append(seq.outputs)
    return found


def test_masked_rows_beside_free_ones(decoder):
    assert run(make_runner(decoder, capturer=None, depth=1), 1, KINDS) == alone(decoder, KINDS)


@pytest.mark.parametrize("kinds", [ON_DEVICE, KINDS], ids=["device", "host"])
def test_masks_on_the_static_step(decoder, kinds):
    """While a row needs the eager sampler, sampling is the host's."""
    expected, stream, capturer = alone(decoder, kinds), LateStream(), TraceRecorder()
    runner = make_runner(decoder, capturer=capturer, stream=stream, sizes=(8,))
    for depth in (1, 2):
        for chunk in (0, 2):
            assert run(runner, depth, kinds, chunk=chunk) == expected
    graphs = runner.graphs
    assert graphs is not None
    captured = {record.key for record in graphs.capture_stats}
    assert GraphKey(8, StepPart.FORWARD) in captured
    assert GraphKey(8, StepPart.SAMPLE, SamplingStages.MASKS) in captured
    for trace in capturer.traces:
        assert not {op for op in trace.ops if op.startswith(("aten._local_scalar", "aten.nonzero"))}


def test_a_forward_pass_is_queued_before_its_masks_come(decoder):
    stream = LateStream()
    runner = make_runner(decoder, capturer=GraphCapturer(), stream=stream)
    driver = Driver(runner)
    masked, free = driver.add([1, 2, 3], 6, GREEDY, mask=residue), driver.add([4, 5], 6, GREEDY)
    driver.launch([(masked, 0), (free, 0)])
    assert len(stream._queue) == 1
    driver.launch([(masked, 0), (free, 0)])
    # What is behind it begins once it is sampled.
    assert len(stream._queue) == 1
    with pytest.raises(RuntimeError, match="step 0 awaits its masks"):
        runner.collect()
    driver.collect()
    assert stream.most == 1
    driver.collect()
    assert obeys(masked)
    assert len(masked.outputs) == len(free.outputs) == 2


def runners(decoder: Decoder) -> list[ModelRunner]:
    ahead = make_runner(decoder, capturer=GraphCapturer(), stream=LateStream())
    return [make_runner(decoder, capturer=None, depth=1), ahead]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    ("mask", "message"),
    [(packed((), VOCAB), "no token is left"), (b"\xff" * 7, "has 7 bytes; expected 16")],
)
def test_a_bad_mask_ends_its_own_row(decoder, ahead, mask, message):
    runner = runners(decoder)[ahead]
    driver = Driver(runner)
    good = [driver.add([1, 2, 3], 4, GREEDY), driver.add([9, 8], 4, GREEDY, mask=residue)]
    bad = driver.add([4, 5, 6], 4, GREEDY, mask=lambda _: mask)
    driver.run([good[0], bad, good[1]], depth=1 + ahead)
    assert isinstance(bad.error, ValueError)
    assert message in str(bad.error)
    expected = []
    for seq in good:
        single = Driver(make_runner(decoder, capturer=None))
        expected.append(single.add(seq.prompt, 4, GREEDY, mask=seq.mask))
        single.run(expected[-1:])
    assert [seq.outputs for seq in good] == [seq.outputs for seq in expected]


@pytest.mark.parametrize("kind", ["host", "device", "fake"])
def test_masks_that_no_step_awaits(decoder, kind):
    executor: Any = fake() if kind == "fake" else runners(decoder)[kind == "device"]
    with pytest.raises(RuntimeError, match="masks of step 0 came; expected none"):
        executor.sample(GrammarMask(0))
    driver = Driver(executor)
    seq = driver.add([1, 2, 3], 2, GREEDY, mask=residue)
    driver.launch([(seq, 0), (driver.add([4], 2, GREEDY), 0)])
    with pytest.raises(RuntimeError, match="masks of step 1 came; expected those of step 0"):
        executor.sample(GrammarMask(1))
    with pytest.raises(RuntimeError, match=r"masks of rows \[0\] came; expected some of \[1\]"):
        executor.sample(GrammarMask(0, [0], [b""]))
    # A row that ended meanwhile has none.
    executor.sample(GrammarMask(0))
    assert executor.collect().counts == [1, 1]


def fake(**limits: Any) -> FakeExecutor:
    info = {"num_blocks": 40, "max_model_len": 64, "max_num_seqs": 8} | limits
    groups = (KVCacheSpec((0,), 4),)
    return FakeExecutor(ExecutorInfo(VOCAB, kv_groups=groups, max_num_batched_tokens=64, **info))


def test_the_fake_draws_allowed_tokens():
    for depth in (1, 2):
        run(fake(pipeline_depth=depth), depth, [GREEDY])
    executor = fake()
    driver = Driver(executor)
    bad = driver.add([1, 2], 3, GREEDY, mask=lambda _: packed((), VOCAB))
    good = driver.add([3], 3, GREEDY, mask=lambda _: packed([17], VOCAB))
    driver.run([bad, good])
    assert "no token is left" in str(bad.error)
    assert good.outputs == [17] * 3


def test_words_and_bits():
    allowed = [0, 31, 32, 95, 96]
    mask = packed(allowed, 97)
    assert num_mask_words(97) * 4 == len(mask)
    assert allowed_tokens(mask, 97) == allowed
    words = torch.from_numpy(np.frombuffer(mask, np.int32).copy()).unsqueeze(0)
    logits = torch.randn(2, 97)
    found = logits.clone()
    mask_logits(found, torch.tensor([0, -1]), words)
    assert torch.isfinite(found[0]).nonzero().flatten().tolist() == allowed
    assert torch.equal(found[0][allowed], logits[0][allowed])
    assert torch.equal(found[1], logits[1])
