"""The step loop by hand, on a clock of its own."""

from __future__ import annotations

import pytest

from asyncllm import EngineError
from asyncllm.core.channel import Channel
from asyncllm.core.executor import StepOutOfMemoryError
from asyncllm.outputs import Delta
from tests.test_request_group import Rig


def test_a_budget_that_was_shrunk_grows_back_with_the_steps_that_succeed():
    rig = Rig(max_num_batched_tokens=64)
    rig.group(60)
    rig.executor.faults[0] = StepOutOfMemoryError("on purpose")
    rig.steps(1)
    assert rig.scheduler.token_budget == 2
    rig.steps(31)
    assert rig.scheduler.token_budget == 2
    rig.steps(1)
    assert rig.scheduler.token_budget == 4


def test_a_step_lasts_from_its_launch_to_its_result():
    rig = Rig(pipeline_depth=2)
    rig.group(60)
    collect = rig.executor.collect

    def slow():
        rig.now += 3.0
        return collect()

    rig.executor.collect = slow
    rig.now = 10.0
    rig.steps(1)
    rig.now = 11.0
    rig.steps(1)
    assert rig.core.stats().last_step_time == 4.0


@pytest.mark.parametrize("call", ["launch", "collect"])
def test_a_call_of_the_device_hangs_once_it_took_the_timeout(call):
    rig = Rig()
    group = rig.group(60)
    rig.now, found = 100.0, []
    answer = getattr(rig.executor, call)
    error = EngineError("hung")

    def slow(*args):
        for later in (0.0, 4.5, 0.5):
            rig.now += later
            found.append(rig.core.fail_hung(5.0, error))
        # The second to find out is not the one that did.
        found.append(rig.core.fail_hung(5.0, error))
        return answer(*args)

    assert not rig.core.fail_hung(0.0, error)
    setattr(rig.executor, call, slow)
    rig.core.run()
    assert found[:4] == [False, False, True, False]
    assert rig.core.fatal_error is error
    assert group.channel.final.__cause__ is error


def test_a_channel_that_ended_takes_nothing_more():
    channel = Channel()
    channel.put(1, "one", None)
    channel.offer_end(EngineError("the end"))
    channel.end()
    channel.put(2, "two", None)
    channel.append(Delta("", (3,)))
    assert ([item.token_ids for item in channel.items], channel.num_written) == ([(1,)], 1)
