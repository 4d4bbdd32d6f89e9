"""How many requests a step admits."""

from __future__ import annotations

import pytest

from asyncllm.core.admission_pace import AdmissionPace
from tests.scheduler_rig import Rig


def rig_beside(*owners: str | None, **changes) -> Rig:
    """A running request of each of these owners."""
    rig = Rig(num_blocks=200, max_num_seqs=32, max_num_batched_tokens=256, **changes)
    for owner in owners:
        rig.add(range(3), max_tokens=40, owner=owner)
    rig.step()
    return rig


def admitted(rig: Rig) -> int:
    step = rig.launch()
    assert step is not None
    rig.collect()
    return len(step.admitted)


def test_a_step_beside_another_owner_admits_few():
    rig = rig_beside("a")
    for number in range(10):
        rig.add([number], max_tokens=30, owner="b")
    assert [admitted(rig) for _ in range(6)] == [2, 2, 2, 2, 2, 0]


@pytest.mark.parametrize("num_floods", [1, 3])
def test_an_owner_with_running_requests_does_not_wait_for_those_of_one_token(num_floods):
    """The others never have as many running, so by these alone their turn would always be next."""
    rig = rig_beside(*"aaaaaaa")
    for number in range(40 * num_floods):
        rig.add([number], max_tokens=1, owner=f"flood {number % num_floods}")
    late = rig.add([77], max_tokens=30, owner="a")
    assert admitted(rig) == 2 * num_floods + 1
    assert late.num_output_tokens == 1
    assert admitted(rig) == 2 * num_floods


@pytest.mark.parametrize("owner", [None, "a"])
def test_one_owner_has_no_bound(owner):
    rig = rig_beside(owner)
    for number in range(20):
        rig.add([number], max_tokens=30, owner=owner)
    assert admitted(rig) == 20


def test_a_step_that_holds_up_nobody_has_no_bound():
    rig = rig_beside()
    for number in range(20):
        rig.add([number], max_tokens=30, owner=str(number % 2))
    assert admitted(rig) == 20


def test_long_steps_admit_more():
    rig = rig_beside("a")
    rig.scheduler.pace.record_decode_step(0.004)
    for number in range(20):
        rig.add([number], max_tokens=30, owner="b")
    assert [admitted(rig) for _ in range(3)] == [4, 4, 4]


def test_a_step_that_was_held_up_counts_little():
    pace = AdmissionPace()
    assert pace.max_admissions == 2
    pace.record_decode_step(0.01)
    assert pace.max_admissions == pytest.approx(10)
    pace.record_decode_step(0.5)
    assert pace.max_admissions == pytest.approx(10.5)
    pace.record_decode_step(0.003)
    assert pace.max_admissions == pytest.approx(3)


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {3: 1.0}},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.5},
    ],
)
def test_parameters_that_are_written_to_tables_count(params):
    rig = rig_beside("a")
    for number in range(6):
        rig.add([number], max_tokens=30, owner="b", **params)
    assert [admitted(rig) for _ in range(7)] == [1, 1, 1, 1, 1, 1, 0]


def test_prompt_tokens_of_further_outputs_count():
    """Without a block to copy, each computes the prompt's rest of 16 tokens again."""
    rig = rig_beside("a", block_size=32, caching=False)
    first = rig.add(range(16), max_tokens=30, owner="b")
    for _ in range(6):
        rig.add(range(16), max_tokens=30, owner="b", first=first)
    assert [admitted(rig) for _ in range(7)] == [2, 1, 1, 1, 1, 1, 0]
