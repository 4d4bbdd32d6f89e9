"""Native sampling: the same bits on any threads, the head's own argmax, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from asyncllm.gpu.batch.decode_inputs import SamplingTensors
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.ops.gumbel import NO_TOKEN_LEFT
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.native_ops import NativeOps
from asyncllm.gpu.ops.quantise import quantise_int8
from asyncllm.gpu.sample.sampler import NOT_FINITE
from asyncllm.sampling_params import SamplingParams
from tests.driver import Driver
from tests.native_library import context, isas
from tests.test_model_runner import LARGE, MODEL, make

ISAS = isas()
GREEDY = SamplingParams(temperature=0.0, seed=0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.skipif(not ISAS, reason="no C++ compiler to build the native ops with")


def parameters(rows: int, seed: int) -> SamplingTensors:
    """Of all kinds, greedy ones among them."""
    generator = torch.Generator().manual_seed(seed)

    def choice(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[
            torch.randint(0, len(values), (rows,), generator=generator)
        ]

    return SamplingTensors(
        torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        choice([0.0, 0.3, 1.0, 1.3]),
        choice([0, 0, 1, 40, 900, 6000], torch.int32),
        choice([1.0, 0.9, 0.5]),
        choice([0.0, 0.0, 0.05]),
    )


def draw(ops: NativeOps, logits: torch.Tensor, sampling: SamplingTensors, lines: torch.Tensor):
    out = torch.empty_like(lines)
    last = torch.zeros(len(sampling.states), dtype=torch.int64)
    ops.sample(logits, sampling, lines, lines * 3, last, out)
    assert torch.equal(last[lines], out.clamp(min=0))
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_is_its_rows_own_on_any_threads(isa, dtype):
    rows, vocab_size = 40, 50_000
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    logits[4, 17] = torch.nan
    logits[7, :49_000] = -torch.inf
    logits, sampling = logits.to(dtype), parameters(rows, 2)
    sampling.temperature[7] = 1.0
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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("convert", [lambda weights: weights, quantise_int8])
def test_the_head_finds_the_first_of_its_largest_outputs(isa, dtype, convert):
    """As they are rounded: in bfloat16 many tie. Panels that hang over do not count."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(1003, 61, generator=generator).to(dtype)
    values[900:] = values[:103]
    for bias in (torch.randn(1003, generator=generator).to(dtype), torch.full((1003,), -50.0)):
        bundle = convert(LinearWeights(values, bias.to(dtype)))
        for threads in (1, 3):
            linear = NativeOps(context(threads, isa)).linear(bundle)
            for rows in (0, 1, 2, 3, 5, 17, 100):
                x = torch.randn(rows, 61, generator=generator).to(dtype)
                assert torch.equal(linear.argmax(x), linear(x).argmax(-1))
    x[3, 5], x[7] = torch.nan, 0.0
    found = linear.argmax(x)
    assert found[3] == -1
    assert torch.equal(found[[2, 4, 7]], linear(x)[[2, 4, 7]].argmax(-1))


@pytest.mark.parametrize("isa", ISAS)
def test_a_head_whose_outputs_are_no_numbers_has_no_token(isa):
    weight, ops = torch.eye(40), NativeOps(context(2, isa))
    bias = torch.zeros(40)
    for value, expected in ((torch.inf, -1), (torch.nan, -1), (-torch.inf, 0)):
        bias[33] = value
        assert ops.linear(LinearWeights(weight, bias)).argmax(torch.zeros(1, 40)) == expected
    nothing = ops.linear(LinearWeights(weight, torch.full((40,), -torch.inf)))
    assert nothing.argmax(torch.zeros(2, 40)).tolist() == [NO_TOKEN_LEFT] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_steps_write_no_logits_and_sample_the_same(monkeypatch, dtype):
    model = replace(LARGE, hidden_size=64, num_heads=8, vocab_size=5000)
    driver = Driver(make(model, attention_backend="native", dtype=dtype))
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    usual = [driver.add(prompt, 6, SamplingParams(temperature=0.0, seed=0, logprobs=0))
             for prompt in prompts]  # fmt: skip
    driver.run(usual)

    def refuse(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("logits are written")

    monkeypatch.setattr(Decoder, "logits", refuse)
    fused = [driver.add(prompt, 6, GREEDY) for prompt in prompts]
    driver.run(fused)
    assert [seq.outputs for seq in fused] == [seq.outputs for seq in usual]
    hot = driver.add([1], 2, SamplingParams(temperature=0.5, seed=1))
    with pytest.raises(AssertionError, match="logits are written"):
        driver.run([hot])


def test_a_greedy_row_without_a_number_ends_alone(monkeypatch):
    driver = Driver(make(MODEL, attention_backend="native"))
    alone = driver.add([1, 2, 3], 5, GREEDY)
    driver.run([alone])
    forward = Decoder.forward

    def broken(self, inputs, cache):
        hidden = forward(self, inputs, cache).clone()
        if len(hidden) == 2:
            hidden[1] = torch.nan
        return hidden

    monkeypatch.setattr(Decoder, "forward", broken)
    sound, other = driver.add([1, 2, 3], 5, GREEDY), driver.add([4, 5], 5, GREEDY)
    driver.run([sound, other])
    assert sound.outputs == alone.outputs
    assert other.outputs == []
    assert str(other.error) == NOT_FINITE


def test_what_cannot_be_sampled_from_is_refused():
    ops, sampling = NativeOps(context(1)), parameters(4, 5)
    lines, logits = torch.arange(4), torch.zeros(4, 9)
    with pytest.raises(ValueError, match=r"logits are \(4, 9\) of torch.float64"):
        draw(ops, logits.double(), sampling, lines)
    with pytest.raises(ValueError, match=r"top_k is .* expected 4 or more adjacent torch.int32"):
        draw(ops, logits, replace(sampling, top_k=sampling.top_k.long()), lines)
    with pytest.raises(ValueError, match=r"top_p is \(3,\)"):
        draw(ops, logits, replace(sampling, top_p=sampling.top_p[:3]), lines)
    with pytest.raises(ValueError, match="req_indices"):
        ops.sample(logits, sampling, lines[:3], lines, lines.clone(), lines.clone())
    with pytest.raises(RuntimeError, match="beyond its table"):
        ops.sample(logits, sampling, lines + 1, lines, lines.clone(), lines.clone())
