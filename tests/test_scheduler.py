"""The scheduler on the fake executor: exact decisions, and hypothesis machines."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from asyncllm.core.batch import RowError
from asyncllm.core.executor import ExecutorInfo
from asyncllm.core.kv_cache import block_ids
from asyncllm.core.request import Status
from asyncllm.errors import KVCacheTooSmallError
from tests.hypothesis_settings import quick_and_slow
from tests.integrity import check_scheduler
from tests.scheduler_machine import SchedulerMachine
from tests.scheduler_rig import Rig, info
from tests.slow import slow_but


def test_decodes_come_first_in_the_batch():
    rig = Rig()
    rig.add(range(3))
    rig.step()
    rig.add(range(20, 26))
    rig.add([9])
    step = rig.launch()
    assert step is not None
    assert step.batch.counts == [1, 1, 6]
    assert step.batch.num_decodes == 2
    assert [r.request_id for r in step.requests] == ["r0", "r2", "r1"]
    rig.collect()


def test_prefix_hit_leaves_at_least_one_token():
    rig = Rig()
    first = rig.add(range(8), max_tokens=1)
    assert rig.step() == {"r0": 8}
    rig.add(range(8), max_tokens=1)
    # Both blocks are cached, but at least one token is computed: only the first is taken.
    assert rig.step() == {"r1": 4}
    third = rig.add([*range(8), 50], max_tokens=1)
    assert rig.step() == {"r2": 1}
    assert third.num_cached_tokens == 8
    rig.expect(first, third)
    assert rig.scheduler.kv.num_queried_tokens == 8 + 8 + 9
    assert rig.scheduler.kv.num_hit_tokens == 4 + 8


def test_hit_on_blocks_that_the_same_step_writes():
    rig = Rig()
    requests = [rig.add([*range(8), i], max_tokens=3) for i in (90, 91, 92)]
    assert rig.step() == {"r0": 9, "r1": 1, "r2": 1}
    rig.finish_all(*requests)


def test_salt_keeps_prefixes_apart():
    rig = Rig()
    for salt, computed in ((None, 9), ("a", 9), ("b", 9), ("a", 1), (None, 1)):
        rig.add(range(9), max_tokens=1, salt=salt)
        assert list(rig.step().values()) == [computed], salt


@pytest.mark.parametrize("changes", [{"caching": False}, {"has_states": True}], ids=str)
def test_no_prefixes_without_caching_or_with_recurrent_states(changes):
    rig = Rig(**changes)
    for _ in range(2):
        request = rig.add(range(9), max_tokens=2)
        assert list(rig.step().values()) == [9]
        rig.finish_all(request)
    assert rig.scheduler.kv.pool.num_cached == 0


def test_a_paused_request_loses_its_recurrent_state_with_its_slot():
    """It then starts over. It takes a token in flight."""
    rig = Rig(has_states=True, max_num_seqs=1, pipeline_depth=2)
    first = rig.add(range(6), max_tokens=5)
    rig.step()
    rig.launch()
    rig.scheduler.pause(first)
    assert len(first.blocks[0]) == 2
    rig.collect()
    assert first.num_output_tokens == 2
    second = rig.add(range(20, 25), max_tokens=2)
    assert rig.step() == {"r1": 5}
    assert first.blocks == ()
    rig.step()
    assert second.is_finished
    rig.scheduler.resume(first)
    assert rig.step() == {"r0": 8}
    rig.finish_all(first, second)


@pytest.mark.parametrize("has_states", [False, True])
def test_a_paused_request_keeps_its_slot_until_another_needs_it(has_states):
    rig = Rig(has_states=has_states, max_num_seqs=2)
    first, second = rig.add(range(6), max_tokens=9), rig.add(range(10, 14), max_tokens=9)
    rig.step()
    for _ in range(2):
        rig.scheduler.pause(first)
        assert rig.step() == {"r1": 1}
        rig.scheduler.resume(first)
        assert first.status is Status.RUNNING
        step = rig.launch()
        assert (step.admitted, step.batch.released_indices) == ([], [])
        rig.collect()
    rig.scheduler.pause(first)
    rig.scheduler.pause(second)
    third = rig.add(range(20, 25), max_tokens=2)
    assert rig.step() == {"r2": 5}
    assert (first.req_index, second.req_index >= 0) == (-1, True), "it has paused longest"
    fourth = rig.add(range(30, 35), max_tokens=2)
    rig.scheduler.resume(second)
    assert second.status is Status.RUNNING, "as if it had not paused"
    assert rig.step() == {"r1": 1, "r2": 1}
    rig.scheduler.pause(second)
    assert rig.step() == {"r3": 5}
    rig.scheduler.resume(first)
    rig.finish_all(first, second, third, fourth)


def test_requests_whose_masks_are_being_made_hold_up_no_other():
    rig = Rig(max_num_seqs=2)
    slow = [rig.add(range(i, i + 4), max_tokens=2) for i in range(8)]
    for request in slow:
        request.num_placeholders = 1
        rig.scheduler.begin_mask_wait(request)
    late = rig.add(range(20, 25), max_tokens=1)
    assert rig.step() == {"r8": 5}
    assert late.is_finished
    assert not rig.scheduler.has_work()
    assert list(rig.scheduler.requests()) == slow
    later = rig.add(range(30, 35), max_tokens=2)
    rig.scheduler.finish(slow[3], "abort")
    for request in reversed(slow):
        request.num_placeholders = 0
        rig.scheduler.end_mask_wait(request)
    assert rig.step() == {"r0": 4, "r1": 4}, "each has its place in the queue again"
    rig.finish_all(*slow[:3], *slow[4:], later)


def test_a_step_that_fails_takes_the_slots_of_paused_requests():
    rig = Rig(max_num_seqs=2)
    paused, running = rig.add(range(6), max_tokens=4), rig.add(range(10, 14), max_tokens=9)
    rig.step()
    rig.scheduler.pause(paused)
    rig.scheduler.roll_back_steps([])
    assert (paused.req_index, paused.blocks, running.status) == (-1, (), Status.WAITING)
    rig.scheduler.resume(paused)
    rig.finish_all(paused, running)


@pytest.mark.parametrize("steps", [0, 2])
def test_the_fake_device_shows_a_stale_state(steps):
    """What the slot's last request left is cleared at position 0, and by nothing else."""
    rig = Rig(has_states=True, max_num_seqs=1)
    request = rig.add(range(6), max_tokens=4)
    for _ in range(steps):
        rig.step()
    rig.executor._states[0] = 5
    rig.finish_all()
    expected = rig.executor.reference(range(6), 4)
    assert (request.output_token_ids == expected) is (steps == 0)


def test_drafts_need_states_to_be_taken_back():
    with pytest.raises(ValueError, match="max_tokens_per_row=2 with has_states: expected 1"):
        info(max_tokens_per_row=2, has_states=True)


def test_output_becomes_a_prefix():
    rig = Rig()
    first = rig.add(range(6), max_tokens=7)
    rig.finish_all()
    follow_up = rig.add([*first.token_ids, 5], max_tokens=2)
    # 13 tokens are known, the KV of the last was never computed: 3 full blocks.
    assert rig.step() == {"r1": 2}
    assert follow_up.num_cached_tokens == 12
    rig.finish_all(follow_up)


def test_blocks_of_a_paused_request_are_spare_enough():
    rig = Rig(num_blocks=8, max_model_len=28)
    paused, running = rig.add(range(4), max_tokens=8), rig.add(range(40, 44), max_tokens=8)
    rig.step()
    rig.scheduler.pause(paused)
    rig.step()
    assert (len(paused.blocks[0]), len(running.blocks[0])) == (1, 2)
    # The last four blocks: what the running request needs next is the paused one's.
    rig.add(range(60, 76), max_tokens=1)
    assert rig.step() == {"r1": 1, "r2": 16}
    assert paused.num_preemptions == 0
    rig.finish_all()


def test_resumed_request_grows_by_spare_blocks():
    rig = Rig(num_blocks=5, max_model_len=16)
    request, other = rig.add(range(4), max_tokens=6), rig.add(range(20, 27), max_tokens=4)
    rig.launch()
    rig.scheduler.pause(request)
    rig.collect()
    rig.scheduler.resume(request)
    assert (len(request.token_ids), len(request.blocks[0])) == (5, 1)
    assert rig.scheduler.kv.pool.num_free == 1
    assert [rig.step() for _ in range(4)] == [{"r1": 1}, {"r1": 1}, {"r1": 1}, {"r0": 1}]
    rig.finish_all()
    assert rig.scheduler.num_preemptions == 0
    rig.expect(request, other)


def test_priority_orders_preemption():
    rig = Rig(policy="priority", num_blocks=7, max_model_len=24)
    low = rig.add(range(8), max_tokens=12, priority=5)
    high = rig.add(range(20, 28), max_tokens=12, priority=1)
    rig.finish_all()
    assert low.num_preemptions >= 1
    assert high.num_preemptions == 0
    rig.expect(low, high)


@pytest.mark.parametrize(
    ("policy", "expected"), [("priority", [3, 1, 2, 0]), ("deadline", [3, 2, 1, 0])]
)
def test_policy_orders_admission(policy, expected):
    rig = Rig(policy=policy, max_num_seqs=1)
    ranks = ((0, math.inf), (-1, 9.0), (-1, 3.0), (-2, 99.0))
    requests = [rig.add([i], 1, priority=p, deadline=d) for i, (p, d) in enumerate(ranks)]
    finished = []
    while rig.scheduler.has_work():
        rig.step()
        finished += [i for i, r in enumerate(requests) if r.is_finished and i not in finished]
    assert finished == expected


def test_assignment_has_all_request_data():
    rig = Rig()
    rig.add(range(2))
    request = rig.add(range(20, 26), eos=(7, 8))
    step = rig.launch()
    assert step is not None
    assert step.batch.step == 0
    found = step.batch.assignments[1]
    assert (found.req_index, found.request_id) == (request.req_index, "r1")
    assert (found.token_ids, found.num_prompt_tokens) == ([20, 21, 22, 23, 24, 25], 6)
    assert found.block_ids == block_ids(request.blocks)
    assert [len(ids) for ids in found.block_ids] == [2]
    assert (found.sampling, found.eos_token_ids) == (request.sampling, (7, 8))
    assert found.processors_key == -1


def test_unschedulable_request_fails_and_next_runs():
    rig = Rig(num_blocks=4, max_model_len=100)
    big = rig.add(range(20), max_tokens=2)
    small = rig.add(range(3), max_tokens=2)
    assert rig.step() == {"r1": 3}
    ((request, error),) = rig.scheduler.failed
    assert request is big
    assert isinstance(error, KVCacheTooSmallError)
    assert "needs 5 KV blocks for 20 tokens, the cache has 3" in str(error)
    rig.finish_all(small)


def test_request_that_outgrows_the_pool_alone_fails():
    rig = Rig(num_blocks=4, max_model_len=100)
    request = rig.add(range(8), max_tokens=50)
    for _ in range(20):
        rig.step()
    assert request.is_finished
    ((failed, error),) = rig.scheduler.failed
    assert failed is request
    assert "needs 4 KV blocks for 13 tokens, the cache has 3" in str(error)
    assert rig.scheduler.num_preemptions == 0
    check_scheduler(rig.scheduler)
    assert rig.scheduler.kv.pool.num_free == 3


def test_finish_is_idempotent_in_every_state():
    rig = Rig(max_num_seqs=1)
    running, waiting = rig.add(range(6)), rig.add(range(3))
    rig.step()
    rig.scheduler.pause(running)
    for request in (running, waiting):
        for _ in range(2):
            rig.scheduler.finish(request, "abort")
    assert not rig.scheduler.has_work()
    assert rig.scheduler.kv.pool.num_free == 16
    check_scheduler(rig.scheduler)


def test_paused_request_is_the_first_victim():
    rig = Rig(num_blocks=6, max_model_len=20)
    paused = rig.add(range(8), max_tokens=8)
    rig.step()
    rig.scheduler.pause(paused)
    others = [rig.add(range(40, 48), max_tokens=4), rig.add(range(60, 64), max_tokens=4)]
    rig.finish_all()
    assert paused.num_preemptions == 1
    assert [r.num_preemptions for r in others] == [0, 0]
    rig.scheduler.resume(paused)
    rig.finish_all(paused, *others)


def test_paused_streams_recompute_no_more_than_is_generated():
    rig = Rig(num_blocks=33, max_num_seqs=8)
    neighbour = rig.add(range(900, 904), max_tokens=60)
    streams = [rig.add([i, *range(100, 139)], max_tokens=60) for i in range(4)]
    num_computed, late = 0, None
    # Each stream is read in turn, and paused again at its next token.
    for turn in itertools.cycle(range(4)):
        num_computed += sum(rig.step().values())
        for i, stream in enumerate(streams):
            if i == turn:
                rig.scheduler.resume(stream)
            elif stream.status is Status.RUNNING and len(stream.token_ids) > 40:
                rig.scheduler.pause(stream)
        if late is None and len(rig.scheduler.evicted):
            late = rig.add([7], max_tokens=3)
        if neighbour.is_finished:
            break
    assert late is not None
    assert late.is_finished  # Those that wait to compute their prompts again hold up no other.
    assert rig.scheduler.num_generated_tokens > 70
    num_prompt_tokens = 4 + 1 + 4 * 40
    # Each token of a paused stream alone would take 40 more.
    assert num_computed <= num_prompt_tokens + 2 * rig.scheduler.num_generated_tokens + 60
    for stream in streams:
        rig.scheduler.resume(stream)
    rig.finish_all(neighbour, *streams)


def test_preempting_step_admits_nothing():
    rig = Rig(num_blocks=8)
    rig.add(range(11), max_tokens=12)
    paused = rig.add(range(20, 31), max_tokens=12)
    assert rig.step() == {"r0": 11, "r1": 11}
    rig.scheduler.pause(paused)
    for _ in range(5):
        assert rig.step() == {"r0": 1}
    assert rig.scheduler.kv.pool.num_free == paused.num_preemptions == 0
    rig.add(range(3), max_tokens=1)
    assert rig.step() == {"r0": 1}
    assert paused.num_preemptions == 1
    assert rig.step() == {"r0": 1, "r2": 3}


def test_a_request_that_needs_the_host_waits_alone():
    rig = Rig(pipeline_depth=2)
    plain, ruled = rig.add(range(5), max_tokens=7), rig.add(range(9, 12), needs_host=True)
    late = rig.add(range(20, 50), max_tokens=3, needs_host=True)
    shapes = []
    while rig.scheduler.has_work() or rig.in_flight:
        step = rig.launch()
        if step is not None:
            shapes.append(
                {r.request_id: n for r, n in zip(step.requests, step.batch.counts, strict=True)}
            )
        if step is None or len(rig.in_flight) == 2:
            rig.collect()
        check_scheduler(rig.scheduler)
    # The chunks of a prompt follow one another: none of them but the last gives a token.
    assert shapes[:4] == [
        {"r0": 5, "r1": 3, "r2": 24},
        {"r0": 1, "r2": 6},
        {"r0": 1, "r1": 1},
        {"r0": 1, "r2": 1},
    ]
    assert [sum("r1" in shape for shape in shapes), len(shapes)] == [8, 11]
    assert all("r0" in shape for shape in shapes[:7])
    for request, count in ((plain, 7), (ruled, 8), (late, 3)):
        assert request.num_output_tokens == count
        rig.expect(request)


def test_at_depth_one_the_host_makes_no_difference():
    shapes = []
    for needs_host in (False, True):
        rig = Rig()
        for i in range(3):
            rig.add(range(i, i + 9), max_tokens=6, needs_host=needs_host)
        shapes.append([rig.step() for _ in range(8)])
    assert shapes[0] == shapes[1]


def test_rollback_withdraws_published_hashes():
    rig = Rig(pipeline_depth=2)
    requests = [rig.add(range(9), max_tokens=4), rig.add(range(50, 55), max_tokens=4)]
    rig.launch()
    rig.launch()
    assert rig.scheduler.kv.pool.num_cached == 3
    rig.executor.discard()
    rig.scheduler.roll_back_steps(rig.in_flight)
    rig.in_flight.clear()
    check_scheduler(rig.scheduler)
    assert rig.scheduler.kv.pool.num_cached == 0
    assert rig.scheduler.kv.pool.num_free == 16
    rig.finish_all(*requests)


def test_shrunken_budget_recovers():
    rig = Rig(max_num_batched_tokens=32)
    rig.add(range(20), max_tokens=2)
    step = rig.scheduler.schedule()
    assert step is not None
    rig.scheduler.roll_back_steps([step])
    assert rig.scheduler.budget.shrink([step]) == []
    assert rig.scheduler.budget.tokens == 10
    for _ in range(200):
        rig.scheduler.budget.record_success()
    assert rig.scheduler.budget.tokens == 32


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"token_ids": [5000]}, "sampled token 5000; the vocabulary has 997"),
        ({"token_ids": [-1]}, "sampled token -1"),
        ({"token_ids": [1, 1]}, "counts 1 tokens, its result has 2"),
        ({"token_ids": [1, 1], "counts": [2]}, "has 2 tokens in row 0; expected 1 to 1"),
        ({"counts": [0]}, "has 0 tokens in row 0; expected 1 to 1"),
        ({"token_ids": [1, 1], "counts": [1, 1]}, "has 1 rows, its result 2"),
        ({"errors": {0: RowError.of(ZeroDivisionError())}}, "has 1 tokens in row 0; expected none"),
    ],
    ids=str,
)
def test_garbage_from_the_device_is_noticed(fields, says):
    rig = Rig()
    rig.add(range(3))
    step = rig.launch()
    result = rig.executor.collect()
    for name, value in fields.items():
        setattr(result, name, value)
    with pytest.raises(ValueError, match=says):
        next(rig.scheduler.update(step, result))


def test_failed_request_publishes_no_prefix():
    """Its KV may hold NaN, at positions before the token that made it too."""
    rig = Rig()
    size, shared = rig.info.block_size, list(range(1, 40))
    first = rig.add(shared[:size], max_tokens=1)
    rig.finish_all(first)
    failing = rig.add([*shared, 50], max_tokens=4)
    rig.executor.row_errors[failing.request_id] = ArithmeticError("NaN")
    rig.finish_all()
    assert failing.is_finished
    assert failing.num_cached_tokens == size
    after = rig.add([*shared, 60], max_tokens=1)
    rig.finish_all(after)
    assert after.num_cached_tokens == size
    again = rig.add([*shared, 70], max_tokens=1)
    rig.finish_all()
    assert again.num_cached_tokens == len(shared) // size * size


# --- a plain model of the scheduler -----------------------------------------------------


class PlainScheduler:
    """First come, first served without prefix caching, by counting alone: how many tokens
    each request computes in each step. Written for reading, not for speed."""

    def __init__(self, limits: ExecutorInfo):
        self.limits = limits
        self.waiting: list[dict] = []
        self.running: list[dict] = []

    def blocks(self, tokens):
        return -(-tokens // self.limits.block_size)

    def free(self):
        return self.limits.num_blocks - 1 - sum(r["blocks"] for r in self.running)

    def preempt(self, request):
        self.running.remove(request)
        request.update(blocks=0, computed=0)
        self.waiting.append(request)
        self.waiting.sort(key=lambda r: r["arrival_index"])

    def step(self):
        budget, plan, preempted = self.limits.max_num_batched_tokens, {}, False
        for request in list(self.running):
            if request not in self.running or budget == 0:
                continue
            count = min(request["tokens"] - request["computed"], budget)
            needed = self.blocks(request["computed"] + count)
            while needed - request["blocks"] > self.free() and request in self.running:
                victim = max(self.running, key=lambda r: r["arrival_index"])
                budget += plan.pop(victim["arrival_index"], 0)
                self.preempt(victim)
                preempted = True
            if request in self.running:
                request["blocks"] = max(needed, request["blocks"])
                plan[request["arrival_index"]] = count
                budget -= count
        while not preempted and budget and self.waiting:
            request = self.waiting[0]
            needed = self.blocks(request["tokens"])
            spare = max(1, (self.limits.num_blocks - 1) // 100) if self.running else 0
            if len(self.running) == self.limits.max_num_seqs or needed + spare > self.free():
                break
            self.running.append(self.waiting.pop(0))
            request["blocks"] = needed
            plan[request["arrival_index"]] = min(request["tokens"], budget)
            budget -= plan[request["arrival_index"]]
        for request in list(self.running):
            request["computed"] += plan.get(request["arrival_index"], 0)
            if request["arrival_index"] in plan and request["computed"] == request["tokens"]:
                request["tokens"] += 1
                if request["tokens"] == request["limit"]:
                    self.running.remove(request)
        return plan


@pytest.mark.parametrize("seed", slow_but(range(60), *range(20)))
def test_decisions_equal_the_plain_model(seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    limits = dict(
        num_blocks=rng.randint(9, 30),
        block_size=rng.choice([1, 2, 4, 8]),
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.randint(3, 30),
    )
    limits["max_model_len"] = min(48, (limits["num_blocks"] - 1) * limits["block_size"])
    rig = Rig(caching=False, **limits)
    model = PlainScheduler(rig.info)
    requests = []
    for _ in range(400):
        if len(requests) < 25 and rng.random() < 0.4:
            length = rng.randint(1, limits["max_model_len"] - 1)
            request = rig.add([rng.randrange(997) for _ in range(length)], rng.randint(1, 20))
            requests.append(request)
            limit = request.max_total_tokens
            model.waiting.append(
                dict(
                    arrival_index=request.arrival_index,
                    tokens=length,
                    computed=0,
                    blocks=0,
                    limit=limit,
                )
            )
        expected = {f"r{rank}": count for rank, count in model.step().items()}
        assert rig.step() == expected
    rig.finish_all()
    assert len(requests) == 25
    rig.expect(*requests)


# --- everything at once -----------------------------------------------------------------


TestSchedulerMachine, TestManySchedules = quick_and_slow(SchedulerMachine, 200)
