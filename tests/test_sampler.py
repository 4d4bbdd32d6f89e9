"""The sampler against float64 references and exact probabilities."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.core.batch import SlotAssignment
from asyncllm.core.executor import SamplingLimits
from asyncllm.core.token_rules import TokenRules
from asyncllm.gpu.batch.sampling_inputs import RowsToSample, SamplingStages
from asyncllm.gpu.batch.sampling_table import SAMPLE_OP_PARAMS
from asyncllm.gpu.sample.host_rules import HostSamplingRules, apply_processors
from asyncllm.gpu.sample.sampling_state import mix_seed
from asyncllm.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_IDS, SamplingParams
from tests.chi_square import chi_square
from tests.driver import UNCHECKED, unchecked
from tests.hypothesis_settings import examples
from tests.native_library import CPU_OPS, cpu_ops
from tests.sampling_bench import Bench
from tests.slow import slow_but
from tests.triton.checks import check_company, check_odd_rows, check_sampling

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


def kept(
    logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> dict[int, float]:
    """Plain reference in float64: tokens that may be drawn, with their probabilities."""
    p = torch.softmax(logits.double(), -1).tolist()
    alive = [i for i in range(len(p)) if p[i] >= min_p * max(p)]
    alive.sort(key=lambda i: (-p[i], i))
    if top_k > 0:
        alive = alive[:top_k]
    mass = math.fsum(p[i] for i in alive)
    chosen, total = [], 0.0
    for i in alive:
        if total / mass >= top_p:
            break
        chosen.append(i)
        total += p[i]
    return {i: p[i] / total for i in chosen}


def draws(
    ops: str, logits: torch.Tensor, count: int, seed: int, top_k=0, top_p=1.0, min_p=0.0
) -> np.ndarray:
    """``count`` draws from one row of logits, each with a position of its own."""
    lines = torch.arange(count)

    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((count + 1,), value, dtype=dtype)

    state = torch.from_numpy(np.full(count + 1, mix_seed(seed), np.uint64).view(np.int64))
    parameters = column(1.0), column(top_k, torch.int32), column(top_p), column(min_p)
    out = torch.empty_like(lines)
    rows = logits.expand(count, -1)
    last = torch.zeros(count + 1, dtype=torch.int64)
    scalars = dict(zip(SAMPLE_OP_PARAMS, (state, *parameters), strict=True))
    cpu_ops(ops).sample(rows, scalars, RowsToSample(lines, lines, last), out)
    assert torch.equal(last[:-1], out)
    return out.numpy()


ALL_LIMITS = {"top_k": 20, "top_p": 0.9, "min_p": 0.01}


@pytest.mark.parametrize(
    "limits",
    slow_but([{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}, ALL_LIMITS], {}, ALL_LIMITS),
)
@pytest.mark.parametrize("seed", slow_but([1, 2, 3], 1))
@pytest.mark.parametrize("ops", CPU_OPS)
def test_draws_follow_the_exact_probabilities(ops, limits, seed):
    logits = torch.randn(100, generator=torch.Generator().manual_seed(5)) * 1.5
    expected = kept(logits, **limits)
    tokens = draws(ops, logits, 20_000, seed, **limits)
    assert set(tokens.tolist()) <= set(expected)
    ids = sorted(expected, key=expected.__getitem__, reverse=True)
    observed = np.array([(tokens == i).sum() for i in ids], dtype=float)
    frequencies = np.array([expected[i] for i in ids]) * len(tokens)
    rare = frequencies < 10
    observed = np.append(observed[~rare], observed[rare].sum())
    frequencies = np.append(frequencies[~rare], frequencies[rare].sum())
    if frequencies[-1] == 0:
        observed, frequencies = observed[:-1], frequencies[:-1]
    p_value = chi_square(observed, frequencies)
    print(f"seed {seed} {limits}: p = {p_value:.4f}")
    assert p_value > 1e-4


def test_neighbouring_seeds_share_nothing():
    seeds = [0, 1, -1, 2**63, 2**64 - 2, -(2**63) + 1]
    assert len({mix_seed(seed) for seed in seeds}) == len(seeds)


@pytest.mark.parametrize("ops", CPU_OPS)
@examples(40)
@given(
    seed=st.integers(0, 2**20),
    vocab_size=st.sampled_from([40, 3000, 20_000]),
    scale=st.sampled_from([0.01, 2.0, 6.0]),
    top_k=st.sampled_from([0, 1, 5, 40, 300, 5000]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_cpu_sampling_equals_plain_function(
    ops, seed, vocab_size, scale, top_k, top_p, min_p, dtype
):
    """Nuclei of all widths, and in bfloat16 ties where the cut is."""
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    logits = logits.to(dtype)
    parameters = [torch.full((2,), value) for value in (1.3, top_k, top_p, min_p)]
    parameters[1] = parameters[1].to(torch.int32)
    states, positions = torch.tensor([seed, seed]), torch.arange(2)
    arguments = (logits, states, positions, *parameters)
    check_sampling(cpu_ops(ops).sample, arguments, "cpu")


@pytest.mark.parametrize("ops", CPU_OPS)
def test_odd_rows_on_the_cpu(ops):
    check_odd_rows(cpu_ops(ops).sample, "cpu")
    check_company(cpu_ops(ops).sample, "cpu")


@pytest.mark.parametrize("ops", CPU_OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_draws_the_same_alone_and_in_company(ops, dtype):
    generator = torch.Generator().manual_seed(9)
    vocab_size = 5000
    # In bfloat16 most of the likely tokens share their logit with others.
    logits = (torch.randn(24, vocab_size, generator=generator) * 2).to(dtype)
    fields: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 50, "logprobs": 4},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.0},
        {"temperature": 0.9, "repetition_penalty": 1.4, "presence_penalty": 0.5},
        {"temperature": 0.8, "top_p": 0.999, "logit_bias": {3: 5.0}},
        {"temperature": 1.0, "top_k": 3000, "top_p": 0.5, "logprobs": 0},
    ]

    def bench(rows: list[int]) -> Bench:
        found = Bench(vocab_size, ops=ops)
        for req_index, row in enumerate(rows):
            found.enter(req_index, [1, 2, 3], [4] * (row % 5), **fields[row % 8])
        return found

    order = list(range(24))
    together = bench(order).sample(logits, order)
    for row in order:
        single = bench([row]).sample(logits[row : row + 1], [0])
        assert single.token_ids[0] == together.token_ids[row]
        assert single.logprobs.get(0) == together.logprobs.get(row)
    turned = bench(order).sample(logits.flip(0), order[::-1])
    assert turned.token_ids[::-1].tolist() == together.token_ids.tolist()


GREEDY = [
    {"temperature": 0.0} | more for more in ({}, {"top_k": 5}, {"top_p": 0.1}, {"min_p": 0.9})
]
GREEDY += [{"temperature": tiny} for tiny in (1e-300, 1e-6, 1e-4)]


def test_tiny_temperatures_are_greedy():
    logits = torch.randn(len(GREEDY), 300, generator=torch.Generator().manual_seed(2)) * 50
    bench = Bench(300)
    for req_index, fields in enumerate(GREEDY):
        bench.enter(req_index, [1], [], **fields)
    found = bench.sample(logits, list(range(len(GREEDY)))).token_ids
    assert found.tolist() == logits.argmax(-1).tolist()


def penalised(
    logits: list[float], prompt: list[int], output: list[int], params: dict[str, float]
) -> list[float]:
    """Plain reference, token by token."""
    result = []
    for token, value in enumerate(logits):
        if token in prompt or token in output:
            repetition = params.get("repetition_penalty", 1.0)
            value = value / repetition if value > 0 else value * repetition
        value -= params.get("frequency_penalty", 0.0) * output.count(token)
        value -= params.get("presence_penalty", 0.0) * (token in output)
        result.append(value)
    return result


@pytest.mark.parametrize("ops", CPU_OPS)
@examples(40)
@given(
    seed=st.integers(0, 2**20),
    prompt=st.lists(st.integers(0, 19), min_size=1, max_size=8),
    output=st.lists(st.integers(0, 19), max_size=8),
    presence=st.sampled_from([0.0, 0.7, -1.5]),
    frequency=st.sampled_from([0.0, 0.4, -0.3]),
    repetition=st.sampled_from([1.0, 1.5, 0.6]),
)
def test_penalties_match_the_reference(ops, seed, prompt, output, presence, frequency, repetition):
    params = {
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "repetition_penalty": repetition,
    }
    bench = Bench(20, ops=ops)
    bench.enter(3, prompt, output, temperature=0.0, **params)
    bench.enter(5, prompt, [], temperature=0.0)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(4):
        logits = torch.randn(2, 20, generator=generator)
        before = logits.clone()
        processed = bench.process(logits, [3, 5])
        expected = penalised(logits[0].tolist(), prompt, output, params)
        torch.testing.assert_close(processed[0], torch.tensor(expected), rtol=1e-5, atol=1e-6)
        # The last token has been counted: the counts begin anew.
        bench.enter(3, prompt, output, temperature=0.0, **params)
        tokens = bench.sample(logits, [3, 5]).token_ids.tolist()
        assert torch.equal(logits, before)
        assert tokens[0] == int(torch.tensor(expected).argmax())
        bench.append([3, 5], tokens)
        output = [*output, tokens[0]]


def test_counts_of_a_slot_do_not_leak_into_the_next_request():
    bench = Bench(50)
    logits = torch.zeros(1, 50)
    logits[0, 9], logits[0, 8] = 1.0, 0.5
    for req_index in range(12):
        bench.enter(req_index, [1], [9, 9], temperature=0.0, presence_penalty=1.0)
        assert bench.sample(logits, [req_index]).token_ids.tolist() == [8]
    bench.sampler.release(4)
    bench.enter(4, [1], [], temperature=0.0, presence_penalty=1.0)
    assert bench.sample(logits, [4]).token_ids.tolist() == [9]


def test_processors_see_the_output_and_fail_alone():
    calls = []

    def force(output, logits):
        calls.append(list(output))
        logits[:] = -5.0
        logits[10 + len(output)] = 5.0
        return logits

    def broken(output, logits):
        raise KeyError("broken on purpose")

    def misshapen(output, logits):
        return logits[:-1]

    def nothing(output, logits):
        return None

    def poison(output, logits):
        return logits * torch.nan

    bench = Bench(30)
    processors = [(force,), (broken,), (misshapen,), (nothing,), (poison,), ()]
    for req_index, chain in enumerate(processors):
        bench.enter(req_index, [1, 2], [3], temperature=0.0, logits_processors=chain, logprobs=1)
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(4))
    before = logits.clone()
    output = bench.sample(logits, list(range(6)))
    assert torch.equal(logits, before)
    assert calls == [[3]]
    assert output.token_ids.tolist() == [11, -1, -1, -1, -1, int(before[5].argmax())]
    kinds = {row: type(error) for row, error in output.errors.items()}
    assert kinds == {1: KeyError, 2: TypeError, 3: TypeError, 4: ValueError}
    assert "shape (29,)" in str(output.errors[2])
    assert set(output.logprobs) == {0, 5}
    # Log-probabilities are the model's, not the processor's.
    assert output.logprobs[0].logprob == pytest.approx(before[0].log_softmax(-1)[11].item())


@examples(60)
@given(
    fields=st.fixed_dictionaries(
        {},
        optional={
            "logprobs": st.integers(-1, 70),
            "min_tokens": st.sampled_from([0, 3]),
            "stop_token_ids": st.sampled_from([[7], range(126)]),
            "ignore_eos": st.booleans(),
            "logit_bias": st.sampled_from([1, MAX_LOGIT_BIASES]).map(
                lambda count: dict.fromkeys(range(count), 1.0)
            ),
            "logits_processors": st.sampled_from([(), (print,)]),
            "allowed_token_ids": st.just([1, 2]),
            "presence_penalty": st.just(1.0),
        },
    ),
    eos=st.sampled_from([(), (1,), (1, 2)]),
    bad_words=st.sampled_from([(), ((3,),), ((3,), (4, 5))]),
)
def test_the_core_knows_which_requests_need_the_host(fields, eos, bad_words):
    bench = Bench(2000, 2)
    limits = SamplingLimits(64)
    params = SamplingParams(**fields)
    known = () if params.ignore_eos else eos
    rules = TokenRules.create(params.allowed_token_ids, bad_words, 2000)
    bench.enter(1, [1, 2], [], known, bad_words, **fields)
    needs = bench.sampler.state.rows_needing_host(np.array([0, 1])).tolist()
    assert needs == ([1] if limits.exceeded_by(params, rules) else [])


def test_bad_words_need_the_host_where_one_may_end():
    bench = Bench(30)
    bench.enter(0, [1, 2], [4], (), ((4, 5),), temperature=0.0)
    bench.enter(1, [1, 4], [6], (), ((4, 5),), temperature=0.0)
    rows, positions = np.array([0, 1]), np.array([3, 3])
    assert bench.sampler.rows_needing_host(rows, positions).tolist() == [0]
    assert bench.sampler.state.rows_needing_host(rows).tolist() == [0, 1]
    logits = torch.zeros(2, 30)
    logits[:, 5] = 2.0
    logits[:, 7] = 1.0
    assert bench.sample(logits, [0, 1]).token_ids.tolist() == [7, 5]


class Unprintable(Exception):
    def __repr__(self) -> str:
        raise ValueError("on purpose")

    __str__ = __repr__


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        asyncio.CancelledError(),
        StopIteration(),
        MemoryError(),
        torch.OutOfMemoryError("of its own"),
        Unprintable(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_error_of_a_processor_ends_its_own_row(error):
    def broken(output, logits):
        logits[:] = torch.nan
        raise error

    bench = Bench(30)
    for req_index, chain in enumerate([(), (broken,), ()]):
        bench.enter(req_index, [1], [], temperature=0.8, seed=req_index, logits_processors=chain)
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(9))
    clean = [bench.sample(logits[row : row + 1], [row]).token_ids[0] for row in (0, 2)]
    output = bench.sample(logits, [0, 1, 2])
    assert output.token_ids.tolist() == [clean[0], -1, clean[1]]
    assert set(output.errors) == {1}
    found = output.errors[1]
    assert isinstance(found, Exception)
    assert error in (found, found.__cause__)


def test_inapplicable_rules_end_only_their_row():
    bench = Bench(30)
    rules: list[dict[str, Any]] = [
        {"logit_bias": {30: 1.0}},
        {"logit_bias": {5: 99.0}},
        {"min_tokens": 1, "stop_token_ids": range(MAX_STOP_IDS + 1)},
    ]
    for req_index, fields in enumerate(rules):
        bench.enter(req_index, [1], [], temperature=0.0, **fields)
    assert {row: type(bench.sampler.failures.pop(row)) for row in (0, 2)} == {
        0: IndexError,
        2: IndexError,
    }
    assert bench.sample(torch.zeros(3, 30), [0, 1, 2]).token_ids[1] == 5


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("fields", UNCHECKED, ids=lambda fields: next(iter(fields)))
def test_failed_assignment_leaves_slot_neutral(fields):
    bench = Bench(30)
    bench.enter(0, [1, 2], [], temperature=0.0, repetition_penalty=2.0, logit_bias={4: 5.0})
    params = unchecked(**fields)
    bench.sampler.add_request(SlotAssignment(0, "odd", [1, 2], 2, [1], params))
    assert set(bench.sampler.failures) == {0}
    assert not len(bench.sampler.state.rows_needing_host(np.array([0])))
    assert SamplingStages(int(bench.sampler.state.stages[0])) is SamplingStages.NONE
    assert bench.sample(torch.zeros(1, 30), [0]).token_ids[0] >= 0
    bench.enter(0, [1, 2], [], temperature=0.0, logit_bias={4: 5.0})
    assert not bench.sampler.failures
    assert bench.sample(torch.zeros(1, 30), [0]).token_ids.tolist() == [4]


@pytest.mark.parametrize("ops", CPU_OPS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_nan_logits_end_only_their_row(ops, temperature):
    bench = Bench(30, ops=ops)
    for req_index in range(5):
        bench.enter(req_index, [1], [], temperature=temperature, seed=req_index, top_p=0.9)
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(6))
    clean = bench.sample(logits, list(range(5))).token_ids.tolist()
    logits[1, 7], logits[2, 3], logits[4] = torch.nan, torch.inf, -torch.inf
    output = bench.sample(logits, list(range(5)))
    assert set(output.errors) == {1, 2, 4}
    assert output.token_ids.tolist() == [clean[0], -1, -1, clean[3], -1]


def test_nothing_left_to_sample_is_an_error():
    bench = Bench(10)
    bench.enter(0, [1], [], allowed_token_ids=[4], min_tokens=3, stop_token_ids=[4])
    output = bench.sample(torch.zeros(1, 10), [0])
    assert "no token is left" in str(output.errors[0])


@pytest.mark.parametrize("ops", CPU_OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_logits(ops, dtype):
    bench = Bench(100, ops=ops)
    bench.enter(0, [1], [], temperature=0.0, logprobs=3, logit_bias={50: 99.0})
    bench.enter(1, [1], [], temperature=2.0, logprobs=0, top_k=5)
    bench.enter(2, [1], [], temperature=0.0)
    bench.enter(3, [1], [], temperature=0.0, logprobs=64)
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(8)).to(dtype)
    output = bench.sample(logits, [0, 1, 2, 3])
    assert set(output.logprobs) == {0, 1, 3}
    for row, count in ((0, 3), (1, 0), (3, 64)):
        exact = logits[row].double().log_softmax(-1)
        entry = output.logprobs[row]
        token = int(output.token_ids[row])
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(exact[token].item(), abs=1e-5)
        assert entry.sampled.rank == int((exact > exact[token]).sum()) + 1
        assert len(entry.top) == count
        best = exact.sort(descending=True).values[:count]
        assert [t.logprob for t in entry.top] == pytest.approx(best.tolist(), abs=1e-5)
        assert [t.rank for t in entry.top] == list(range(1, count + 1))
        for candidate in entry.top:
            assert candidate.logprob == pytest.approx(exact[candidate.token_id].item(), abs=1e-5)
    assert output.token_ids[0] == 50


def test_processor_out_of_memory_ends_only_its_row():
    """torch itself would read past its end."""

    def processor(output, logits):
        logits.untyped_storage().resize_(0)
        return logits

    row = torch.zeros(40)
    rules = HostSamplingRules(processors=(processor,))
    with pytest.raises(ValueError, match="storage does not hold it"):
        apply_processors(row, rules, np.array([], dtype=np.int64))
    assert row.eq(0).all()
