"""Native sampling: the same bits on any threads, the head's own argmax, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from asyncllm.gpu.batch.sampling_inputs import RowsToSample, SamplingStages, TopLogprobs
from asyncllm.gpu.graph.step_queue import StepQueue
from asyncllm.gpu.ops.gumbel import NO_TOKEN_LEFT
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.native_ops import NativeOps
from asyncllm.gpu.ops.quantise import quantise_int4, quantise_int8
from asyncllm.sampling_params import SamplingParams
from tests.driver import Driver, outputs_of
from tests.dummy_runner import LARGE, MODEL, make
from tests.native_library import ISAS, context, each_isa, needs_native
from tests.sampling_bench import Bench
from tests.step_inputs import draw_scalars
from tests.triton.checks import sampling_rows

GREEDY = SamplingParams(temperature=0.0, seed=0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = needs_native


Scalars = dict[str, torch.Tensor]


def parameters(rows: int, seed: int) -> Scalars:
    """Of all kinds, greedy ones among them."""
    _, states, _, *columns = sampling_rows(rows, 6000, seed)
    return draw_scalars(states, *columns)


def draw(ops: NativeOps, logits: torch.Tensor, sampling: Scalars, lines: torch.Tensor):
    out = torch.empty_like(lines)
    last = torch.zeros(len(sampling["states"]), dtype=torch.int64)
    ops.sample(logits, sampling, RowsToSample(lines, lines * 3, last), out)
    assert torch.equal(last[lines], out.clamp(min=0))
    return out


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_is_its_rows_own_on_any_threads(isa, dtype):
    rows, vocab_size = 40, 50_000
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    logits[4, 17] = torch.nan
    logits[7, :49_000] = -torch.inf
    logits, sampling = logits.to(dtype), parameters(rows, 2)
    sampling["temperature"][7] = 1.0
    lines = torch.arange(rows)
    found = draw(NativeOps(context(3, isa)), logits, sampling, lines)
    alone = NativeOps(context(1, isa))
    for row in range(rows):
        one = torch.tensor([row])
        assert draw(alone, logits[row : row + 1], sampling, one).tolist() == [found[row]]
    assert found[4] == -1
    assert found[7] >= 49_000
    wide = torch.full((rows, vocab_size + 3), torch.inf, dtype=dtype)
    wide[:, 2:-1] = logits
    assert torch.equal(draw(alone, wide[:, 2:-1], sampling, lines), found)
    turned = logits.T.contiguous().T
    assert torch.equal(draw(alone, turned, sampling, lines), found)


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("convert", [lambda weights: weights, quantise_int8, quantise_int4])
def test_the_head_finds_the_first_of_its_largest_outputs(isa, dtype, convert):
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(1003, 62, generator=generator).to(dtype)
    values[900:] = values[:103]
    for bias in (torch.randn(1003, generator=generator).to(dtype), torch.full((1003,), -50.0)):
        bundle = convert(LinearWeights(values, bias.to(dtype)))
        for threads in (1, 3):
            linear = NativeOps(context(threads, isa)).make_linear(bundle)
            for rows in (0, 1, 2, 3, 5, 17, 100):
                x = torch.randn(rows, 62, generator=generator).to(dtype)
                assert torch.equal(linear.argmax(x), linear(x).argmax(-1))
    x[3, 5], x[7] = torch.nan, 0.0
    found = linear.argmax(x)
    assert found[3] == -1
    assert torch.equal(found[[2, 4, 7]], linear(x)[[2, 4, 7]].argmax(-1))


@each_isa
def test_nan_head_outputs_have_no_token(isa):
    weight, ops = torch.eye(40), NativeOps(context(2, isa))
    bias = torch.zeros(40)
    for value, expected in ((torch.inf, -1), (torch.nan, -1), (-torch.inf, 0)):
        bias[33] = value
        assert ops.make_linear(LinearWeights(weight, bias)).argmax(torch.zeros(1, 40)) == expected
    nothing = ops.make_linear(LinearWeights(weight, torch.full((40,), -torch.inf)))
    assert nothing.argmax(torch.zeros(2, 40)).tolist() == [NO_TOKEN_LEFT] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_steps_write_no_logits_and_sample_the_same(monkeypatch, dtype):
    model = replace(LARGE, hidden_size=64, num_heads=8, vocab_size=5000)
    driver = Driver(make(model, attention_backend="native", dtype=dtype))
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    usual = [driver.add(prompt, 6, SamplingParams(temperature=0.0, seed=0, logprobs=0))
             for prompt in prompts]  # fmt: skip
    driver.run(usual)

    asked: list[int] = []
    submit = StepQueue.submit

    def watched(self, step, **options):
        asked.append(step.num_logits)
        submit(self, step, **options)

    monkeypatch.setattr(StepQueue, "submit", watched)
    fused = [driver.add(prompt, 6, GREEDY) for prompt in prompts]
    driver.run(fused)
    assert [seq.outputs for seq in fused] == [seq.outputs for seq in usual]
    assert asked == [0] * 6
    driver.run([driver.add([1], 2, SamplingParams(temperature=0.5, seed=1))])
    assert asked[6:] == [1, 1]


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_processed_logits_have_the_bits_of_torch(isa, dtype):
    vocab_size, rows = 1003, 24
    random, generator = Random(4), torch.Generator().manual_seed(4)
    benches = [Bench(vocab_size, rows, ops=name) for name in ("cpu", f"native-{isa}")]
    some = range(vocab_size)
    for row in range(rows):
        fields: dict[str, Any] = {"temperature": 0.0}
        if row % 2:
            fields |= {"repetition_penalty": random.choice([0.7, 1.3])}
            fields |= {"presence_penalty": random.choice([0.0, 0.3])}
            fields |= {"frequency_penalty": random.choice([0.0, -0.7])}
        if row % 3 == 1:
            fields["logit_bias"] = {token: random.gauss(0, 3) for token in random.sample(some, 9)}
        if row % 4 == 2:
            fields["allowed_token_ids"] = random.sample(some, 500)
        if row % 5 == 3:
            fields |= {"min_tokens": 2, "stop_token_ids": random.sample(some, 60)}
        prompt, output = random.choices(some, k=40), random.choices(some, k=row % 7)
        for bench in benches:
            bench.enter(row, prompt, output, bad_words=((row,), (1002,)), **fields)
    for _ in range(3):
        logits = (torch.randn(rows, vocab_size, generator=generator) * 4).to(dtype)
        logits[3, 5], logits[5, 9] = torch.nan, -torch.inf
        masks = {row: random.randbytes(4 * 32) for row in random.sample(range(rows), 6)}
        masks[8] = bytes(4 * 32)
        tokens = random.choices(some, k=rows)
        found = []
        for bench in benches:
            found.append(bench.process(logits, list(range(rows)), masks))
            bench.append(list(range(rows)), tokens)
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(*(bench.runner.memory.tables.counts for bench in benches))


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocab_size", "counts"), [(70, [0, 1, 70]), (2040, [20, 127, 128]), (20_000, [5, 79, 400])]
)
def test_log_probabilities_and_ranks(isa, dtype, vocab_size, counts):
    rows = 6
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(8)) * 4
    logits[3] = torch.linspace(-1e-3, 1e-3, vocab_size)
    logits[4, : vocab_size // 2] = -torch.inf
    logits[5, 9] = torch.nan
    logits = logits.to(dtype)
    exact = logits.double().log_softmax(-1)
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    tokens = torch.tensor([3, int(order[1, 4]), int(order[2, 0]), 9, 7, -1])
    for threads in (1, 3):
        ops = NativeOps(context(threads, isa))
        for count in counts:
            out = TopLogprobs(rows + 1, count, torch.device("cpu"))
            ops.top_logprobs(logits, tokens, out)
            for row in range(rows - 1):
                best = order[row, :count]
                assert torch.equal(out.ids[row, :count], best)
                token = int(tokens[row])
                wanted = torch.cat((exact[row, best], exact[row, token : token + 1]))
                torch.testing.assert_close(out.values[row].double(), wanted, rtol=1e-6, atol=1e-6)
                rank = int((logits[row] > logits[row, token]).sum()) + 1
                assert int(out.ids[row, -1]) == rank
            assert not out.values[-1].any()


def test_unprocessable_rows_are_refused():
    bench = Bench(40, 4, ops="native-" + ISAS[0])
    bench.enter(0, [1], [2], temperature=0.0, presence_penalty=0.5, logit_bias={3: 1.0})
    bench.sample(torch.zeros(1, 40), [0])
    ops, rows = NativeOps(context(1)), bench.runner.memory.sampling_rows(1)
    logits = torch.zeros(1, 40)
    stages = SamplingStages.TOKEN_CONSTRAINTS | SamplingStages.PENALTIES
    tables = rows.tables
    tables.bias_ids[0, 0] = 40
    with pytest.raises(RuntimeError, match="process_logits: a slot, block or position"):
        ops.process_logits(logits, rows, stages)
    tables.bias_ids[0, 0] = 3
    for change in ({"req_indices": torch.tensor([5])}, {"host_token_ids": torch.tensor([40])}):
        with pytest.raises(RuntimeError, match="beyond its table"):
            ops.process_logits(logits, replace(rows, **change, positions=torch.tensor([9])), stages)
    with pytest.raises(ValueError, match=r"allowed is \(5, 2\) .* expected \(5, 1\)"):
        ops.process_logits(torch.zeros(1, 30), rows, stages)
    masks = {"mask_slots": torch.tensor([1]), "mask_words": torch.zeros(1, 2, dtype=torch.int32)}
    with pytest.raises(RuntimeError, match="beyond its table"):
        ops.process_logits(logits, replace(rows, **masks), SamplingStages.MASKS)
    out = TopLogprobs(1, 41, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="top_logprobs: shapes"):
        ops.top_logprobs(logits, torch.tensor([1]), out)
    with pytest.raises(RuntimeError, match="top_logprobs: a slot"):
        ops.top_logprobs(logits, torch.tensor([40]), TopLogprobs(1, 2, torch.device("cpu")))
    with pytest.raises(ValueError, match="1 rows of logits, 2 tokens"):
        ops.top_logprobs(logits, torch.tensor([1, 2]), out)


def test_unsampleable_logits_are_refused():
    ops, sampling = NativeOps(context(1)), parameters(4, 5)
    lines, logits = torch.arange(4), torch.zeros(4, 9)
    for given, changes, words in (
        (logits.double(), {}, r"logits are \(4, 9\) of torch.float64"),
        (
            logits,
            {"top_k": sampling["top_k"].long()},
            r"top_k is .* \(4,\) or more adjacent .*int32",
        ),
        (logits, {"top_p": sampling["top_p"][:3]}, r"top_p is \(3,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            draw(ops, given, sampling | changes, lines)
    with pytest.raises(ValueError, match="req_indices"):
        ops.sample(logits, sampling, RowsToSample(lines[:3], lines, lines.clone()), lines.clone())
    with pytest.raises(RuntimeError, match="beyond its table"):
        ops.sample(logits, sampling, RowsToSample(lines + 1, lines, lines.clone()), lines.clone())


def test_greedy_host_row_gets_its_logits():
    runner = make(MODEL, attention_backend="native")
    plain = outputs_of(runner, [1, 2, 3], 4, GREEDY)

    def ban(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[plain[len(output)]] = -torch.inf
        return logits

    ruled = SamplingParams(temperature=0.0, seed=0, logits_processors=[ban])
    assert outputs_of(runner, [1, 2, 3], 1, ruled) != plain[:1]
