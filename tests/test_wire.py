"""Plain data across the executor seam."""

from __future__ import annotations

import pytest

from asyncllm import InvalidRequestError, RequestError
from asyncllm.core.batch import RowError
from asyncllm.core.block_pool import Block
from asyncllm.core.request import Request, RequestGroup
from asyncllm.core.scheduled_step import ScheduledStep
from asyncllm.runtime.loading import LoadedModel, load_model
from asyncllm.sampling_params import SamplingParams
from asyncllm.testing import FakeExecutor
from tests.fakes import engine_with, fake
from tests.pickling_executor import Pickling
from tests.scheduler_rig import Rig


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"pipeline_depth": 2},
        {"max_tokens_per_row": 3},
        {"block_size": (4, 2), "num_blocks": 24},
    ],
    ids=str,
)
def test_the_fake_behind_a_pickle(limits):
    rig = Rig(**({"num_blocks": 13, "max_model_len": 24} | limits))
    rig.executor = Pickling(rig.executor)
    requests = [
        rig.add(range(8 * i, 8 * i + 8), max_tokens=12, prompt_logprobs=(None, 1)[i % 2])
        for i in range(4)
    ]
    while rig.scheduler.has_work():
        if len(rig.in_flight) < rig.info.pipeline_depth:
            rig.launch()
        rig.collect()
    assert rig.scheduler.num_preemptions > 0
    rig.executor = FakeExecutor(rig.info)
    for request in requests:
        assert request.num_output_tokens == 12
        rig.expect(request)


def force_seven(output, logits):
    logits[:] = -1.0
    logits[7] = 1.0
    return logits


REQUESTS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 2, "logit_bias": {5: 2.0}, "repetition_penalty": 1.3},
    {"temperature": 0.9, "seed": 4, "min_tokens": 6, "stop_token_ids": [5, 6, 7]},
]


async def outputs(load, requests):
    settings = {"num_blocks": 60, "max_model_len": 64, "num_threads": 1}
    async with engine_with(load, **settings) as engine:
        streams = [
            engine.stream([3 + i, 5, 8], max_tokens=10, ignore_eos=True, **fields)
            for i, fields in enumerate(requests)
        ]
        return [(r.token_ids, len(r.logprobs or ())) for r in [await s.result() for s in streams]]


def behind_a_pickle(config, progress):
    loaded = load_model(config, progress)
    return LoadedModel(Pickling(loaded.executor), loaded.tokenizer, loaded.model_config)


async def test_the_model_runner_behind_a_pickle():
    assert await outputs(behind_a_pickle, REQUESTS) == await outputs(load_model, REQUESTS)


async def test_processors_stay_with_the_engine():
    (found,) = await outputs(load_model, [{"temperature": 0.0, "logits_processors": [force_seven]}])
    assert set(found[0]) == {7}
    with pytest.raises(InvalidRequestError, match="executor that runs in another process"):
        await outputs(behind_a_pickle, [{"temperature": 0.0, "logits_processors": [force_seven]}])


async def test_an_error_of_another_process_arrives_as_text():
    rig = fake()
    rig.executor.row_errors["bad"] = ZeroDivisionError("on purpose")
    async with rig.engine() as engine:
        with pytest.raises(RequestError) as near:
            await engine.generate([1], request_id="bad")
    rig.executor = Pickling(rig.executor)
    async with rig.engine() as engine:
        with pytest.raises(RequestError) as far:
            await engine.generate([1], request_id="bad")
    assert str(near.value) == str(far.value)
    assert near.value.__cause__ is rig.executor.executor.row_errors["bad"]
    assert far.value.__cause__ is None
    error = RowError.of(ZeroDivisionError("on purpose"))
    assert (error.kind, error.message) == ("ZeroDivisionError", "ZeroDivisionError('on purpose')")


def test_processors_are_forgotten_with_their_request():
    rig = Rig()
    params = SamplingParams(max_tokens=3, temperature=0.0, seed=0, logits_processors=[force_seven])
    request = Request(RequestGroup("p"), params, token_ids=[1, 2], max_model_len=64)
    rig.scheduler.add(request)
    step = rig.launch()
    (assignment,) = step.batch.assignments
    assert assignment.sampling.logits_processors == ()
    assert params.logits_processors == (force_seven,)
    in_process = rig.scheduler.in_process
    assert in_process.restore_logits_processors(assignment).sampling.logits_processors == (
        force_seven,
    )
    rig.collect()
    rig.finish_all()
    assert in_process.processors == {}


def mutable(root, skip=()) -> dict[int, object]:
    """Every list, dict and set that can be reached."""
    found, seen, pending = {}, set(), [root]
    while pending:
        one = pending.pop()
        if id(one) in seen or isinstance(one, (str, bytes, int, float, type, *skip)):
            continue
        seen.add(id(one))
        if isinstance(one, (list, dict, set, bytearray)):
            found[id(one)] = one
        if isinstance(one, dict):
            pending += [*one, *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)):
            pending += one
        elif not isinstance(one, Block):
            names = [*getattr(one, "__dict__", ()), *getattr(type(one), "__slots__", ())]
            pending += [getattr(one, name) for name in names if hasattr(one, name)]
    return found


@pytest.mark.parametrize("block_size", [4, (4, 2)])
def test_a_step_shares_nothing_that_changes_with_the_core(block_size):
    rig = Rig(pipeline_depth=2, block_size=block_size, num_blocks=60)
    params = SamplingParams(max_tokens=9, temperature=0.0, seed=0, logit_bias={3: 1.0})
    for i in range(3):
        rig.scheduler.add(
            Request(RequestGroup(f"r{i}"), params, token_ids=[i] * 6, max_model_len=64)
        )
    for _ in range(9):
        step = rig.launch()
        crossed = mutable(step.batch)
        kept = mutable(rig.scheduler, skip=(ScheduledStep,))
        assert len(crossed) > 5
        assert any(one is rig.scheduler.running for one in kept.values())
        assert not crossed.keys() & kept.keys()
        if len(rig.in_flight) == 2:
            rig.collect()
