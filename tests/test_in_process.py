"""InProcess: what stays with the engine, and what goes to the device in its place."""

from __future__ import annotations

from asyncllm.core.batch import RequestAssignment
from asyncllm.core.in_process import InProcess, picklable_params
from asyncllm.sampling_params import SamplingParams


def processor(token_ids, logits):
    return logits


def assignment(key, sampling):
    return RequestAssignment(3, "r", [1, 2], 2, ([4],), sampling, (9,), key)


def test_an_assignment_gets_back_the_processors_of_its_request():
    in_process = InProcess()
    assert (in_process.processors, in_process.errors) == ({}, {})
    in_process.processors[7] = (processor,)
    sampling = SamplingParams(temperature=0.5, seed=4)
    sent = assignment(7, sampling)
    got = in_process.with_processors(sent)
    assert got.sampling.logits_processors == (processor,)
    assert (got.sampling.temperature, got.sampling.seed) == (0.5, 4)
    assert (got.req_index, got.token_ids, got.block_ids) == (3, [1, 2], ([4],))
    assert not sampling.logits_processors
    for key in (-1, 8):
        sent = assignment(key, sampling)
        assert in_process.with_processors(sent) is sent


def test_parameters_that_travel_have_no_callable_and_a_mapping_of_their_own():
    empty = SamplingParams(temperature=0.5)
    assert picklable_params(empty) is empty
    biased = SamplingParams(temperature=0.5, logit_bias={3: 1.0})
    found = picklable_params(biased)
    assert found is not biased
    assert found.logit_bias == {3: 1.0}
    assert found.logit_bias is not biased.logit_bias
    processed = SamplingParams(temperature=0.5, logits_processors=(processor,))
    found = picklable_params(processed)
    assert found.logits_processors == ()
    assert found.temperature == 0.5
    assert processed.logits_processors == (processor,)
