"""The hosts an engine lives in: asyncio, uvloop and trio, several loops, threads, forks,
blocked loops, loops that go away, and interpreters that do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import anyio
import anyio.from_thread
import anyio.lowlevel
import pytest
import trio

from asyncllm import (
    DeadlineExceededError,
    EngineDeadError,
    EngineOverloadedError,
    RequestError,
)
from asyncllm.runtime.event_loop import join_thread, post_when_done, running_backend
from tests.event_loops import BACKENDS, run  # noqa: F401 - a fixture, by its name
from tests.fakes import channel_of, fake, mailbox_of_this_loop
from tests.idle import until
from tests.processes import hear_ctrl_c, python
from tests.slow import slow_but


def free(engine):
    stats = engine.stats()
    return stats.num_free_blocks == stats.num_blocks and not stats.num_waiting


def test_streams_run_together(run):
    rig = fake(pipeline_depth=2)

    async def main():
        results = {}

        async def read(i):
            results[i] = [t async for d in engine.stream([i], max_tokens=20) for t in d.token_ids]

        async with rig.engine() as engine:
            async with anyio.create_task_group() as group:
                for i in range(20):
                    group.start_soon(read, i)
            assert free(engine)
        for i in range(20):
            assert results[i] == rig.executor.reference([i], 20)

    run(main)


def test_break_and_cancel_scopes_abort(run):
    rig = fake(step_time=0.001)

    async def main():
        async with rig.engine() as engine:
            async for _ in engine.stream([1], max_tokens=200):
                break
            with anyio.move_on_after(0.02) as scope:
                await engine.generate([2], max_tokens=200)
            assert scope.cancelled_caught
            with pytest.raises(TimeoutError), anyio.fail_after(0.02):
                await engine.generate([3], max_tokens=200)
            await until(lambda: free(engine))
            assert engine.stats().num_aborted == 3

    run(main)


def test_deadline_overload_and_death(run):
    rig = fake(step_time=0.001, max_num_seqs=1)

    async def main():
        async with rig.engine(max_queued_requests=1) as engine:
            with pytest.raises(DeadlineExceededError):
                await engine.generate([1], timeout=0.02)
            await engine.pause()
            queued = engine.stream([1], max_tokens=3)
            with pytest.raises(EngineOverloadedError):
                engine.stream([1])
            await engine.resume()
            await queued.result()
            rig.executor.faults |= {i: RuntimeError("lost") for i in range(10_000)}
            with pytest.raises(EngineDeadError, match="lost"):
                await engine.generate([1])

    run(main)


def test_hung_step_is_noticed(run):
    rig = fake(gate=1)

    async def main():
        async with rig.engine(step_timeout=0.1) as engine:
            with pytest.raises(EngineDeadError, match="step_timeout"):
                await engine.generate([1], max_tokens=9)

    run(main)
    rig.executor.gate.release(100)


def test_heartbeat_fills_silences_and_loses_nothing(run):
    rig = fake(gate=3)

    async def main():
        async with rig.engine() as engine:
            stream = engine.stream([1], max_tokens=20)
            got, silences = [], 0
            try:
                async for delta in stream.with_heartbeat(0.01):
                    if delta is None:
                        silences += 1
                        if silences % 2 == 0:
                            rig.executor.gate.release()
                    else:
                        got += delta.token_ids
            finally:
                rig.executor.gate.release(100)
            assert stream.finish_reason == "length"
            assert got == rig.executor.reference([1], 20)
            assert silences >= 2 * 17
            assert engine.stats().num_aborted == 0

    run(main)


def test_heartbeat_is_left_as_the_stream_itself_is(run):
    rig = fake(step_time=0.001, num_blocks=3001)

    async def main():
        async with rig.engine() as engine:
            async for _ in engine.stream([1]).with_heartbeat(5):
                break
            await until(lambda: engine.stats().num_aborted == 1)
            rig.executor.gate = threading.Semaphore(0)
            stream = engine.stream([2])
            with anyio.move_on_after(0.02) as scope:
                async for _ in stream.with_heartbeat(5):
                    pass
            assert scope.cancelled_caught
            rig.executor.gate.release(1000)
            with pytest.raises(RequestError, match="a read of its stream was cancelled"):
                await stream.result()
            await until(lambda: free(engine))

    run(main)


@pytest.mark.parametrize("other", BACKENDS)
def test_one_engine_from_two_loops_at_once(run, other):
    rig = fake(step_time=0.0005)
    backend, options = BACKENDS[other]

    async def main():
        async with rig.engine() as engine:
            elsewhere = {}

            async def read_elsewhere():
                for i in range(5):
                    elsewhere[i] = await engine.generate([100 + i], max_tokens=20)

            run_there = partial(anyio.run, backend=backend, backend_options=options)
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.to_thread.run_sync, run_there, read_elsewhere)
                for i in range(5):
                    result = await engine.generate([i], max_tokens=20)
                    assert list(result.token_ids) == rig.executor.reference([i], 20)
            for i, result in elsewhere.items():
                assert list(result.token_ids) == rig.executor.reference([100 + i], 20)
            assert len(elsewhere) == 5

    run(main)


@pytest.mark.parametrize("other", BACKENDS)
def test_loop_that_was_closed_aborts_its_streams(run, other):
    """A stream that outlives its loop can never be read again; the engine goes on."""
    rig = fake(max_model_len=250, gate=0)
    # However long the loop takes to end, the request has not.
    backend, options = BACKENDS[other]
    kept = []

    async def main():
        async with rig.engine() as engine:

            async def abandon():
                stream = engine.stream([1], max_tokens=240)
                # Held by the test, so that no destructor aborts it.
                kept.append(stream)

                async def let_it_run():
                    # The stream is this loop's from its first wait on.
                    await until(lambda: channel_of(stream).has_reader)
                    rig.executor.gate.release(3)

                async with anyio.create_task_group() as group:
                    group.start_soon(let_it_run)
                    await anext(stream)

            run_there = partial(anyio.run, backend=backend, backend_options=options)
            await anyio.to_thread.run_sync(run_there, abandon)
            rig.executor.gate.release(1000)
            await until(lambda: engine.stats().num_aborted == 1)
            await until(lambda: free(engine))
            result = await engine.generate([2], max_tokens=5)
            assert list(result.token_ids) == rig.executor.reference([2], 5)

    run(main)


def test_a_backend_makes_waiters_on_its_own_loop_alone(run):
    async def bind():
        backend = running_backend()
        assert backend.make_waiter() is not None
        assert await anyio.to_thread.run_sync(backend.make_waiter) is None
        return backend

    backend = run(bind)
    assert backend.make_waiter() is None

    async def on_the_next_loop():
        return backend.make_waiter()

    assert run(on_the_next_loop) is None


def test_trio_run_has_one_end_callback():
    async def main():
        backend = running_backend()
        assert [backend.is_closed() for _ in range(5)] == [False] * 5
        assert trio.lowlevel.current_statistics().run_sync_soon_queue_size == 1
        return backend

    assert trio.run(main).is_closed() is True


def test_a_future_that_outlives_its_loop_calls_nothing(run, caplog):
    future: Future[None] = Future()
    called = []

    async def main():
        post_when_done(future, lambda: called.append(True))

    run(main)
    future.set_result(None)
    # concurrent.futures logs what a callback raises.
    assert (called, caplog.records) == ([], [])


def test_join_lasts_until_the_thread_ends_or_the_time_is_up(run):
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, daemon=True)

    async def main():
        thread.start()
        with anyio.fail_after(5):
            await join_thread(thread, 0.0)
            assert thread.is_alive()
            ended.set()
            await join_thread(thread, 1e6)
            assert not thread.is_alive()

    run(main)


def test_engine_started_in_a_thread_that_is_not_the_main_one(run):
    rig = fake()

    async def main():
        async with rig.engine() as engine:
            return await engine.generate([1], max_tokens=3)

    with ThreadPoolExecutor() as pool:
        assert len(pool.submit(run, main).result(20).token_ids) == 3
    assert rig.executor.closed


def test_engine_makes_progress_while_the_loop_is_blocked(run):
    rig = fake(step_time=0.001)

    async def main():
        async with rig.engine() as engine:
            stream = engine.stream([1], max_tokens=100)
            await anext(stream)
            before = engine.stats().generation_tokens
            time.sleep(0.2)  # this is the point
            assert engine.stats().generation_tokens - before > 3
            assert list((await stream.result()).token_ids) == rig.executor.reference([1], 100)

    run(main)


def test_at_most_one_wake_is_outstanding(run):
    """However many streams and steps, a loop that does not run is called once."""
    rig = fake(step_time=0.001)
    calls = []

    async def main():
        async with rig.engine() as engine, anyio.create_task_group() as group:
            for i in range(10):
                group.start_soon(engine.generate, [i])
            await anyio.sleep(0.02)
            mailbox = mailbox_of_this_loop(engine)
            post = mailbox.backend.post
            mailbox.backend.post = lambda callback: (calls.append(callback), post(callback))
            time.sleep(0.1)
            assert len(calls) <= 1
            assert engine.stats().num_steps > 3
            group.cancel_scope.cancel()

    run(main)


PRELUDE = "import asyncio, os, sys, threading, time\nfrom tests.fakes import fake\n"


def program(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return python(*options, "-c", PRELUDE + textwrap.dedent(code), timeout=60)


def test_fork_after_start_is_a_clear_error_in_the_child():
    out = program(
        """
        import gc, warnings
        warnings.simplefilter("ignore", DeprecationWarning)

        async def main():
            rig = fake(step_time=0.001)
            async with rig.engine() as engine:
                stream = engine.stream([1], max_tokens=100)
                await anext(stream)
                pid = os.fork()
                if pid == 0:
                    seen = []
                    for call in (lambda: engine.stream([1]), engine.stats,
                                 lambda: engine.abort("x")):
                        try:
                            call()
                        except Exception as error:
                            seen.append(f"{type(error).__name__}: {error}")
                    assert engine.state == "closed"
                    assert "belongs to process" in str(engine.error)
                    del stream
                    gc.collect()
                    print("\\n".join(seen), flush=True)
                    os._exit(7)
                _, status = os.waitpid(pid, 0)
                result = await stream.result()
                print("child", os.waitstatus_to_exitcode(status))
                print(list(result.token_ids) == rig.executor.reference([1], 100))

        asyncio.run(main())
        """
    )
    assert out.returncode == 0, out.stderr
    lines = out.stdout.splitlines()
    assert len(lines) == 5
    assert all(line.startswith("EngineClosedError: the engine belongs to") for line in lines[:3])
    assert lines[3:] == ["child 7", "True"]


@pytest.mark.parametrize("how", slow_but(["sys.exit(0)", "pass", "raise KeyError('host')"], "pass"))
def test_interpreter_exits_while_streams_run(how):
    began = time.monotonic()
    out = program(
        f"""
        engines = []
        async def main():
            engine = fake(step_time=0.001).engine()
            engines.append(engine)
            await engine.start()
            streams = [engine.stream([i], max_tokens=10_000) for i in range(5)]
            engines.append(streams)
            await anext(streams[0])
            {how}
        asyncio.run(main())
        """,
        *("-W", "error"),
    )
    assert time.monotonic() - began < 30
    assert out.returncode == (1 if "KeyError" in how else 0), out.stderr
    assert "asyncllm" not in out.stderr.replace("asyncllm-engine", ""), out.stderr


def test_interpreter_exits_from_a_loop_that_never_closes():
    """No loop to cancel anything, no aclose: the exit hook ends the thread."""
    out = program(
        """
        import atexit
        rig = fake(step_time=0.001)
        engine = rig.engine()
        loop = asyncio.new_event_loop()
        loop.run_until_complete(engine.start())
        stream = engine.stream([1], max_tokens=10_000)
        atexit.register(lambda: print("threads", threading.active_count()))
        os.environ["ASYNCLLM_TEST"] = "1"
        hook = engine._thread._at_exit
        atexit.unregister(hook)
        atexit.register(lambda: print("closed", rig.executor.closed))
        atexit.register(hook)
        """
    )
    assert out.returncode == 0, out.stderr
    assert "closed True" in out.stdout
    assert out.stderr.count("Traceback") == 0, out.stderr


def test_development_mode_with_errors_for_warnings():
    out = program(
        """
        async def main():
            # How long a callback takes is the machine's: asyncio would warn above 0.1 s.
            asyncio.get_running_loop().slow_callback_duration = float("inf")
            rig = fake(step_time=0.001, pipeline_depth=2)
            async with rig.engine() as engine:
                async for _ in engine.stream([1], max_tokens=50):
                    break
                await asyncio.gather(*(engine.generate([i], max_tokens=20) for i in range(9)))
            async with rig.engine(model=None) as engine:
                await engine.generate([1], max_tokens=3)
        asyncio.run(main(), debug=True)
        """,
        *("-X", "dev", "-W", "error"),
    )
    assert (out.returncode, out.stderr) == (0, "")


def test_the_host_is_left_alone():
    out = program(
        """
        import asyncio, gc, logging, random, signal
        def state():
            return (
                dict(os.environ),
                [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
                random.getstate(),
                logging.getLogger().handlers[:],
                logging.getLogger().level,
                gc.get_threshold(),
                gc.isenabled(),
                type(asyncio.get_event_loop_policy()),
                sys.getswitchinterval(),
                sys.excepthook is sys.__excepthook__,
                threading.excepthook is threading.__excepthook__,
                sorted(t.name for t in threading.enumerate()),
                sorted(os.listdir("/proc/self/fd")),
            )
        async def main():
            before = state()
            async with fake().engine() as engine:
                await engine.generate([1], max_tokens=9)
                names = [t.name for t in threading.enumerate() if t.name.startswith("asyncllm")]
                assert names == ["asyncllm-engine"], names
                assert all(t.daemon for t in threading.enumerate() if t.name in names)
            after = state()
            assert before == after, (before, after)
            print("alone")
        asyncio.run(main())
        """
    )
    assert out.stdout == "alone\n", out.stderr


def test_ctrl_c_reaches_the_host():
    code = """
        async def main():
            async with fake(step_time=0.001).engine() as engine:
                print("ready", flush=True)
                await engine.generate([1], max_tokens=100_000, ignore_eos=True)
                while True:
                    await engine.generate([1], max_tokens=200)
        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            print("interrupted", threading.active_count())
    """
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_ctrl_c,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert out == "interrupted 1\n", err
