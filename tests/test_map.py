"""map(): many rows, a bounded number in flight."""

from __future__ import annotations

import asyncio
import threading
import time

import anyio
import anyio.lowlevel
import pytest

from asyncllm import (
    LLM,
    EngineClosedError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    RequestError,
    SamplingParams,
)
from asyncllm.testing import fake_llm
from tests.event_loops import run as run  # a fixture
from tests.fakes import core_of, fake
from tests.idle import all_free, blocking_until, until


def prompt_of(number):
    return [number % 1000, number // 1000]


async def collect(results):
    return [result async for result in results]


def tokens_of(results):
    return [list(result.completion.token_ids) for result in results]


class Source:
    """Rows that count how many were drawn; ``kind`` says how they come."""

    def __init__(self, count, kind="iterator", before_row=lambda number: None):
        self.numbers, self.kind, self.before_row = range(count), kind, before_row
        self.num_drawn = 0
        self.threads = set()

    def __call__(self):
        if self.kind == "list":
            self.num_drawn = len(self.numbers)
            return list(self.numbers)
        return self._draw() if self.kind == "iterator" else self._draw_async()

    def _draw(self):
        for number in self.numbers:
            self.before_row(number)
            self.num_drawn += 1
            self.threads.add(threading.current_thread().name)
            yield number

    async def _draw_async(self):
        for number in self._draw():
            await anyio.lowlevel.checkpoint()
            yield number


@pytest.mark.parametrize("kind", ["list", "iterator", "async"])
def test_results_are_ordered_and_rows_in_flight_bounded(run, kind):
    rig, source, most = fake(max_num_seqs=4, record=True, step_time=0.001), Source(50, kind), []

    async def main():
        async with rig.engine() as engine:
            results = []
            rows = engine.map(source(), prompt=prompt_of, max_under_way=6, max_tokens=3)
            async for result in rows:
                results.append(result)
                stats = engine.stats()
                most.append(stats.num_running + stats.num_waiting)
                assert kind == "list" or source.num_drawn <= len(results) + 6
            assert [result.row for result in results] == list(range(50))
            assert [result.key for result in results] == list(range(50))
            expected = [rig.executor.reference(prompt_of(i), 3) for i in range(50)]
            assert tokens_of(results) == expected
            assert all(result.error is None for result in results)
            await all_free(engine)

    run(main)
    assert max(most) <= 6
    assert max(len(batch.assignments) + batch.num_decodes for batch in rig.executor.batches) > 1


def test_iterators_are_drawn_on_a_thread_and_lists_inline(run):
    source = Source(3)

    async def main():
        async with fake().engine() as engine:
            await collect(engine.map(source(), prompt=prompt_of, max_tokens=1))

    run(main)
    assert source.threads == {"asyncllm-rows"}


async def test_unordered_results_do_not_wait_for_a_long_row():
    rig = fake(step_time=0.001)

    def params(number):
        return SamplingParams(max_tokens=100 if number == 0 else 2)

    async with rig.engine() as engine:
        for ordered, last in ((False, 0), (True, 19)):
            rows = engine.map(range(20), prompt=prompt_of, sampling_params=params, ordered=ordered)
            keys = [result.key async for result in rows]
            assert sorted(keys) == list(range(20))
            assert keys[-1] == last


async def test_batch_larger_than_queue_leaves_others_their_turn():
    rig = fake(max_num_seqs=2)
    async with rig.engine(max_queued_requests=4) as engine:
        rows = asyncio.ensure_future(
            collect(engine.map(list(range(80)), prompt=prompt_of, max_tokens=2))
        )
        other = await engine.submit([7], max_tokens=2)
        assert list((await other.result()).token_ids) == rig.executor.reference([7], 2)
        expected = [rig.executor.reference(prompt_of(i), 2) for i in range(80)]
        assert tokens_of(await rows) == expected
        assert engine.stats().num_rejected == 0


# --- errors -----------------------------------------------------------------------------


async def test_an_error_is_its_rows_own():
    rig = fake()
    good, long, silent, refused = [1], [1] * 400, None, [5]

    def params(row):
        if row is refused:
            raise ZeroDivisionError("no parameters")
        return SamplingParams(max_tokens=2)

    async with rig.engine() as engine:
        rows = [good, long, silent, refused, good, {}]
        results = await collect(engine.map(rows, sampling_params=params))
        kinds = [type(result.error).__name__ for result in results]
        assert kinds == [
            "NoneType",
            "ContextLengthExceededError",
            "InvalidRequestError",
            "ZeroDivisionError",
            "NoneType",
            "InvalidRequestError",
        ]
        assert [result.completion is None for result in results] == [
            error != "NoneType" for error in kinds
        ]
        assert results[2].error.param == "prompt"
        await all_free(engine)


async def test_a_row_without_a_prompt_or_a_key_fails_alone():
    async with fake().engine() as engine:
        rows = [{"id": "a", "text": "1 2"}, {"id": "b"}, {"text": "3"}]
        results = await collect(
            engine.map(
                rows, prompt=lambda row: row["text"], key=lambda row: row["id"], max_tokens=1
            )
        )
        found = [(result.key, repr(result.error)) for result in results]
        assert found == [("a", "None"), ("b", "KeyError('text')"), (None, "KeyError('id')")]


@pytest.mark.parametrize("name", ["prompt", "key", "sampling_params"])
async def test_an_error_of_a_callers_function_keeps_no_frames(name):
    def failing(row):
        raise ValueError(f"row {row}")

    async with fake().engine() as engine, engine.map([1], max_tokens=1, **{name: failing}) as rows:
        (result,) = await collect(rows)
    assert type(result.error) is ValueError
    assert result.error.__traceback__ is None
    assert "in failing" in result.error.__notes__[0]


async def test_a_device_error_of_a_row_is_its_own():
    answers = {"1": "one", "2": RequestError("no"), "3": "three"}
    with fake_llm(answers) as llm:
        results = await collect(llm.engine.map(["1", "2", "3"]))
        assert [one.completion and one.completion.text for one in results] == ["one", None, "three"]
        assert str(results[1].error) == "no"


@pytest.mark.parametrize("kind", ["iterator", "async"])
def test_iterable_error_comes_after_earlier_rows(run, kind):
    def fail(number):
        if number == 5:
            raise OSError("the disk is gone")

    async def main():
        async with fake().engine() as engine:
            rows, results = engine.map(Source(9, kind, fail)(), prompt=prompt_of, max_tokens=2), []
            with pytest.raises(InvalidRequestError, match="the disk is gone") as caught:
                async for result in rows:
                    results.append(result.key)
            assert caught.value.param == "rows"
            assert isinstance(caught.value.__cause__, OSError)
            assert results == list(range(5))
            assert await collect(rows) == []

    run(main)


async def test_a_dead_engine_ends_the_job():
    rig = fake(step_time=0.001)
    async with rig.engine() as engine:
        rig.executor.faults[30] = ZeroDivisionError("on purpose")
        results = []
        with pytest.raises(EngineDeadError):
            async for result in engine.map(range(10**6), prompt=prompt_of, max_tokens=4):
                results.append(result.error)
        assert results
        assert results == [None] * len(results)


async def test_closing_the_engine_ends_the_job():
    engine = fake(step_time=0.002).engine()
    await engine.start()
    rows = engine.map(range(10**6), prompt=prompt_of, max_tokens=4)
    await anext(rows)
    await engine.aclose()
    with pytest.raises(EngineClosedError):
        async for _ in rows:
            pass


BAD_ARGUMENTS = [
    ({"rows": None}, "rows"),
    ({"rows": "one text"}, "rows"),
    ({"rows": {"a": 1}}, "rows"),
    ({"rows": 5}, "rows"),
    ({"prompt": "text"}, "prompt"),
    ({"key": 3}, "key"),
    ({"progress": 3}, "progress"),
    ({"done": 3}, "done"),
    ({"done": "abc"}, "done"),
    ({"ordered": 2}, "ordered"),
    ({"max_under_way": 0}, "max_under_way"),
    ({"max_under_way": 5000}, "max_under_way"),
    ({"max_under_way": True}, "max_under_way"),
    ({"sampling_params": {"max_tokens": 3}}, "sampling_params"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"temprature": 1}, "temprature"),
    ({"request_id": "x"}, "request_id"),
    ({"on_slow": "pause"}, "on_slow"),
    ({"timeout": -1}, "timeout"),
]


@pytest.mark.parametrize(("arguments", "param"), BAD_ARGUMENTS, ids=repr)
async def test_bad_arguments_are_refused_before_a_row_is_drawn(arguments, param):
    source = Source(3)
    with fake_llm("yes") as llm:
        for engine in (llm.engine, llm):
            with pytest.raises(InvalidRequestError) as caught:
                engine.map(**{"rows": source(), **arguments})
            assert caught.value.param == param
        with pytest.raises(InvalidRequestError, match="async one"):
            llm.map(Source(3, "async")())
    assert source.num_drawn == 0
    with pytest.raises(EngineClosedError):
        fake().engine().map([[1]])


# --- leaving, resuming, progress --------------------------------------------------------


def later_is_longer(number):
    return SamplingParams(max_tokens=200 if number else 50)


def test_leaving_aborts_the_rows_under_way(run):
    rig = fake(step_time=0.001)

    async def main():
        async with rig.engine() as engine:
            for leave in ("break", "aclose", "with"):
                before = engine.stats()
                source = Source(10**6, "async" if leave == "break" else "iterator")
                rows = engine.map(
                    source(), prompt=prompt_of, max_under_way=9, sampling_params=later_is_longer
                )
                if leave == "with":
                    async with rows:
                        await anext(rows)
                else:
                    async for _ in rows:
                        break
                if leave == "aclose":
                    await rows.aclose()
                    assert await collect(rows) == []
                del rows
                await until(lambda: engine.stats().num_waiting == engine.stats().num_running == 0)
                await all_free(engine)
                stats = engine.stats()
                num_ended = stats.num_finished + stats.num_aborted
                assert num_ended == stats.num_requests
                assert stats.num_aborted > before.num_aborted
                drawn = source.num_drawn
                await anyio.sleep(0.02)
                assert source.num_drawn == drawn <= 12

    run(main)


@pytest.mark.parametrize("kind", ["iterator", "async"])
@pytest.mark.parametrize("end", ["break", "aclose", "engine", "cancel", "idle"])
def test_the_callers_generator_is_closed(run, kind, end):
    """However the job ends: while a row is drawn, and while there is no room for one."""
    rig, closed_by = fake(step_time=0.001), []

    def draw():
        try:
            for number in range(10**6):
                if end == "cancel" and number == 4:
                    time.sleep(0.05)
                yield number
        finally:
            closed_by.append(threading.current_thread().name)

    async def draw_async():
        try:
            for number in range(10**6):
                await anyio.sleep(60 if end == "cancel" and number == 4 else 0)
                yield number
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            closed_by.append(threading.current_thread().name)

    async def main():
        async with rig.engine() as engine:
            given = draw() if kind == "iterator" else draw_async()
            most = 3 if end == "idle" else 9
            rows = engine.map(given, prompt=prompt_of, max_under_way=most, max_tokens=4)
            await anext(rows)
            if end == "engine":
                rig.executor.faults[engine.stats().num_steps + 3] = ZeroDivisionError("on purpose")
                with pytest.raises(EngineDeadError):
                    await collect(rows)
            elif end == "aclose":
                await rows.aclose()
                await rows.aclose()
            else:
                if end == "idle":
                    await until(lambda: rows._feeder._cancel is None)
                del rows
            await until(lambda: closed_by)
            if end != "engine":
                await all_free(engine)

    run(main)
    assert len(closed_by) == 1
    assert (closed_by[0] == "asyncllm-rows") == (kind == "iterator")


async def test_generator_close_error_is_logged_and_file_stays_open(caplog, tmp_path):
    def draw():
        try:
            yield from range(100)
        finally:
            raise OSError("the disk is gone")

    path = tmp_path / "rows"
    path.write_text("1\n" * 100)
    async with fake().engine() as engine:
        rows = engine.map(draw(), prompt=prompt_of, max_under_way=2, max_tokens=1)
        await anext(rows)
        await rows.aclose()
        await until(lambda: "closing the rows of map() raised OSError" in caplog.text)
        with path.open() as file:
            rows = engine.map(file, prompt=lambda line: [int(line)], max_tokens=1)
            await anext(rows)
            await rows.aclose()
            await until(lambda: rows._feeder._cancel is None)
            assert not file.closed


def test_llm_closes_the_callers_generator():
    closed = []

    def draw():
        try:
            yield from range(10**6)
        finally:
            closed.append(threading.current_thread())

    with fake_llm("yes") as llm:
        for _ in llm.map(draw(), prompt=str, max_under_way=3):
            break
        assert closed == [threading.current_thread()]
        rows = llm.map(draw(), prompt=str, max_under_way=3)
        next(rows)
        llm.engine._close_blocking()
        with pytest.raises(EngineClosedError):
            list(rows)
        assert closed == [threading.current_thread()] * 2


async def test_a_break_aborts_at_once():
    rig = fake(step_time=0.001)
    async with rig.engine() as engine:
        async for _ in engine.map(list(range(50)), prompt=prompt_of, max_under_way=8, max_tokens=9):
            break
        # No turn of the loop has passed: the reader's last reference is gone.
        live = engine._thread.core.admission._live_groups
        assert all(group.cancelled for group in list(live.values()))


async def test_a_cancelled_read_loses_nothing():
    rig = fake(step_time=0.005)
    async with rig.engine() as engine:
        rows, results = engine.map(range(5), prompt=prompt_of, max_tokens=5), []
        while len(results) < 5:
            try:
                results.append(await asyncio.wait_for(anext(rows), 0.004))
            except TimeoutError:
                continue
        assert [result.key for result in results] == list(range(5))
        assert await collect(rows) == []


async def test_results_come_while_the_next_row_is_late():
    for kind in ("iterator", "async"):
        arrived = threading.Event()

        def wait(number, arrived=arrived):
            if number == 2 and not arrived.wait(10):
                raise TimeoutError

        async def late(wait=wait):
            for number in range(3):
                await asyncio.to_thread(wait, number)
                yield number

        async with fake().engine() as engine:
            given = late() if kind == "async" else Source(3, kind, wait)()
            rows = engine.map(given, prompt=prompt_of, max_tokens=2)
            assert [(await anext(rows)).key for _ in range(2)] == [0, 1]
            began = time.monotonic()
            reading = asyncio.ensure_future(anext(rows))
            await asyncio.sleep(0.01)  # The loop is free while the iterable blocks.
            assert time.monotonic() - began < 5
            arrived.set()
            assert (await reading).key == 2


async def test_second_run_skips_finished_rows():
    rig = fake()
    rows = [{"id": f"row {i}", "prompt": [i, 1]} for i in range(30)]
    stored, counts = {}, []
    how = {"prompt": lambda row: row["prompt"], "key": lambda row: row["id"], "max_tokens": 2}
    async with rig.engine() as engine:
        async for result in engine.map(rows, **how):
            stored[result.key] = result
            if len(stored) == 11:
                break
        await all_free(engine)
        again = engine.map(rows, done=stored, progress=lambda *pair: counts.append(pair), **how)
        rest = await collect(again)
    assert [result.row for result in rest] == rows[11:]
    assert counts == [(i, 0) for i in range(12, 31)]
    assert len(stored) == 11


async def test_progress_counts_failures_and_its_error_is_logged(caplog):
    counts = []
    async with fake().engine() as engine:
        rows = [[1], None, [2]]
        await collect(engine.map(rows, progress=lambda *pair: counts.append(pair), max_tokens=1))
        assert counts == [(1, 0), (2, 1), (3, 1)]
        for error in (ZeroDivisionError, StopAsyncIteration):

            def fail(*_: int, error: type[Exception] = error) -> None:
                raise error

            results = await collect(engine.map([[1], [2]], progress=fail, max_tokens=1))
            assert [one.error for one in results] == [None, None]
            assert error.__name__ in caplog.text


async def test_externally_aborted_row_is_an_error():
    rig = fake(step_time=0.01)
    async with rig.engine() as engine:
        results = aiter(engine.map([[1]], max_tokens=200))
        reading = asyncio.ensure_future(anext(results))
        await until(lambda: engine.stats().num_running)
        core = core_of(engine)
        engine.abort([group.request_id for group in list(core.admission._live_groups.values())])
        found = await reading
        assert isinstance(found.error, RequestError)
        assert "aborted" in str(found.error)
        assert len(found.completion.token_ids) < 200


async def test_one_task_reads_at_a_time_on_one_loop():
    async with fake(step_time=0.01).engine() as engine:
        rows = engine.map([[1], [2]], max_tokens=5)
        first = asyncio.ensure_future(anext(rows))
        await asyncio.sleep(0.005)
        with pytest.raises(RuntimeError, match="another task"):
            await anext(rows)
        await first

        def read_elsewhere():
            with pytest.raises(RuntimeError, match="event loop that read"):
                asyncio.run(collect(rows))

        await asyncio.to_thread(read_elsewhere)


# --- LLM --------------------------------------------------------------------------------


def test_llm_maps_in_the_calling_thread():
    with fake_llm(lambda question: question.upper(), max_queued_requests=3) as llm:
        source = Source(30)
        rows = llm.map(source(), prompt=str, max_under_way=2, progress=lambda *pair: None)
        results = []
        for result in rows:
            results.append(result)
            assert source.num_drawn <= len(results) + 2
        assert [result.completion.text for result in results] == [str(i) for i in range(30)]
        assert source.threads == {threading.current_thread().name}
        chats = [[{"role": "user", "content": "hello"}], "", "you"]
        found = list(llm.map(chats, ordered=False))
        assert {one.completion.text if one.completion else one.error.param for one in found} == {
            "HELLO",
            "YOU",
            "prompt",
        }


def test_llm_yields_results_while_iterable_is_slow():
    with fake_llm("yes") as llm:
        times = []

        def slow():
            for number in range(4):
                times.append((number, len(got)))
                time.sleep(0.05)
                yield str(number)

        got = []
        for result in llm.map(slow()):
            got.append(result.key)
    assert got == [0, 1, 2, 3]
    assert times[3][1] >= 1


def test_llm_waits_for_a_queue_that_others_fill():
    rig = fake(max_num_seqs=1, gate=0)
    engine = rig.engine(max_queued_requests=1)
    engine._start_blocking()
    llm = LLM(engine=engine)
    llm._owns_engine = True
    with llm:
        others = [engine.stream([1], max_tokens=3)]
        blocking_until(lambda: engine.stats().num_running == 1)
        others.append(engine.stream([1], max_tokens=3))
        with pytest.raises(EngineOverloadedError):
            engine.stream([1])
        threading.Timer(0.05, rig.executor.gate.release, (10**4,)).start()
        results = list(llm.map([[2], [3]], max_tokens=2))
        assert tokens_of(results) == [rig.executor.reference([i], 2) for i in (2, 3)]


def test_leaving_an_llm_map_aborts():
    rig = fake(step_time=0.001)
    engine = rig.engine()
    engine._start_blocking()
    llm = LLM(engine=engine)
    llm._owns_engine = True
    with llm:

        def lengths(number):
            return SamplingParams(max_tokens=2 + 200 * number)

        for _ in llm.map(range(9), prompt=prompt_of, max_under_way=5, sampling_params=lengths):
            break
        blocking_until(lambda: engine.stats().num_aborted >= 1)
        blocking_until(lambda: engine.stats().num_free_blocks == engine.stats().num_blocks)
        stats = engine.stats()
        assert stats.num_finished + stats.num_aborted == stats.num_requests < 8
        rig.executor.faults[stats.num_steps + 5] = ZeroDivisionError("on purpose")
        with pytest.raises(EngineDeadError):
            for _ in llm.map(range(10**6), prompt=prompt_of, max_under_way=5, max_tokens=30):
                pass


async def test_a_second_close_does_not_cancel_the_closing_of_the_generator():
    closed = []

    async def draw():
        try:
            for number in range(100):
                yield number
        finally:
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            closed.append(True)

    async with fake(step_time=0.001).engine() as engine:
        rows = engine.map(draw(), prompt=prompt_of, max_under_way=3, max_tokens=4)
        await anext(rows)
        await until(lambda: rows._feeder._cancel is None)
        for _ in range(10):
            await rows.aclose()
            await anyio.lowlevel.checkpoint()
        await until(lambda: closed, 5)
