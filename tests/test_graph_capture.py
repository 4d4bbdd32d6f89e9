"""Failed CUDA graph captures."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncllm.config import EngineConfig
from asyncllm.gpu.batch.sampling_inputs import SamplingStages
from asyncllm.gpu.execution_mode import ExecutionMode
from asyncllm.gpu.graph import streams as graph_streams
from asyncllm.gpu.graph.capturer import CudaGraphCapturer
from asyncllm.gpu.graph.cuda_graphs import GraphKey, StepGraphs, StepPart
from asyncllm.gpu.graph.streams import CudaStream, CudaStreamPool
from asyncllm.gpu.ops import registry
from asyncllm.gpu.ops.torch_ops import TorchOps
from tests.ahead_on_cpu import PROMPTS, AheadOnCPU
from tests.cuda_captures import ILLEGAL, Captures

DEVICE = torch.device("cpu", 0)
EMBEDDING = "aten::embedding"
ERRORS = [
    RuntimeError(ILLEGAL),
    torch.OutOfMemoryError("CUDA out of memory"),
    ValueError("a kernel that does not compile"),
]


@pytest.fixture(params=[True, False], ids=["gc", "no gc"])
def collecting(request: pytest.FixtureRequest) -> Iterator[bool]:
    was = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if was else gc.disable)()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[Captures]:
    """torch's captures, of which none may be left in the end."""
    made = Captures()
    made.install(monkeypatch)
    yield made
    made.check_clean()


def look_up() -> None:
    torch.nn.functional.embedding(torch.tensor([1]), torch.zeros(2, 2))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("fails", ["capture_begin", EMBEDDING, "capture_end", "instantiate"])
def test_a_capture_that_fails_leaves_nothing_behind(captures, caplog, collecting, fails, error):
    captures.fails, captures.error = fails, error
    runs: list[GraphKey] = []

    def run(key: GraphKey) -> None:
        look_up()
        runs.append(key)

    graphs = StepGraphs(run, CudaGraphCapturer(DEVICE), (1, 2, 4))
    with caplog.at_level(logging.WARNING):
        for rows in (4, 2, 1, 4, 2, 1):
            runs.clear()
            graphs.run(GraphKey(rows))
            assert runs[0] == GraphKey(rows)  # Eagerly, whether or not a capture came after.
            assert gc.isenabled() == collecting
            captures.check_clean()
    # One attempt for each bucket, each followed by one that resets torch.
    assert captures.begun == 6
    assert graphs.capture_stats == []
    # Its reason is the same in all.
    (said,) = [record.message for record in caplog.records]
    assert str(captures.error) in said or "previous error" in said
    assert ("lower gpu_memory_utilization" in said) == (
        isinstance(error, torch.OutOfMemoryError) and fails != "capture_end"
    )


def test_a_capture_that_goes_well(captures, collecting):
    runs: list[GraphKey] = []
    graphs = StepGraphs(runs.append, CudaGraphCapturer(DEVICE), (1, 2))
    for rows in (2, 1, 1):
        graphs.run(GraphKey(rows))
    # Each once to warm up and once captured, then replayed.
    assert runs == [GraphKey(2)] * 2 + [GraphKey(1)] * 2
    assert [record.key for record in graphs.capture_stats] == [GraphKey(2), GraphKey(1)]
    assert [record.num_bytes for record in graphs.capture_stats] == [2**20] * 2
    assert gc.isenabled() == collecting
    assert len(captures.references) == 1


def test_failed_capture_is_retried_at_third_and_ninth_step(captures, caplog):
    captures.fails = EMBEDDING
    runs: list[GraphKey] = []

    def run(key: GraphKey) -> None:
        look_up()
        runs.append(key)

    graphs = StepGraphs(run, CudaGraphCapturer(DEVICE), (1, 2))
    graphs.run(GraphKey(2))
    attempts = []
    for step in range(1, 15):
        begun = captures.begun
        captures.fails = EMBEDDING if step < 13 else ""
        graphs.run(GraphKey(1))
        if captures.begun > begun:
            attempts.append(step)
    # The first, the third behind it, the ninth behind that, where it goes well.
    assert attempts == [1, 4, 13]
    assert [record.key for record in graphs.capture_stats] == [GraphKey(1)]
    # Each step once, the last of which is a replay, and the capture.
    assert runs.count(GraphKey(1)) == 13 + 1
    # The other has had no step since.
    assert runs.count(GraphKey(2)) == 1
    graphs.run(GraphKey(2))
    graphs.run(GraphKey(2))
    assert len(graphs.capture_stats) == 1
    graphs.run(GraphKey(2))
    assert [record.key for record in graphs.capture_stats] == [GraphKey(1), GraphKey(2)]
    assert len(caplog.records) == 1


def test_the_largest_graph_of_a_kind_is_captured_first(captures):
    """The others fit into its memory. Where it fails they do not wait for it."""
    runs: list[GraphKey] = []

    def run(key: GraphKey) -> None:
        if key.stages is SamplingStages.TOKEN_CONSTRAINTS:
            look_up()
        runs.append(key)

    graphs = StepGraphs(run, CudaGraphCapturer(DEVICE), (1, 4))
    graphs.run(GraphKey(1))
    graphs.run(GraphKey(1, StepPart.FORWARD))
    graphs.run(GraphKey(1, StepPart.SAMPLE, SamplingStages.PENALTIES))
    graphs.run(GraphKey(1, StepPart.SAMPLE, SamplingStages.PENALTIES))
    assert [record.key for record in graphs.capture_stats] == [
        GraphKey(4),
        GraphKey(4, StepPart.FORWARD),
        GraphKey(4, StepPart.SAMPLE, SamplingStages.PENALTIES),
        GraphKey(1, StepPart.SAMPLE, SamplingStages.PENALTIES),
    ]
    captures.fails = EMBEDDING
    runs.clear()
    for _ in range(2):
        graphs.run(GraphKey(1, StepPart.SAMPLE, SamplingStages.TOKEN_CONSTRAINTS))
    assert runs == [
        GraphKey(rows, StepPart.SAMPLE, SamplingStages.TOKEN_CONSTRAINTS) for rows in (4, 1)
    ]


@pytest.mark.parametrize("fails", ["capture_begin", EMBEDDING, "capture_end", "instantiate"])
def test_captures_behind_a_failed_one_go_well(captures, fails):
    capturer = CudaGraphCapturer(DEVICE)
    kept = [capturer.capture(look_up)]
    for _ in range(2):
        captures.fails = fails
        assert capturer.capture(look_up) is None
        captures.fails = ""
        kept += [capturer.capture(look_up) for _ in range(2)]
        captures.check_clean()
    assert None not in kept


@pytest.mark.parametrize("fails", ["capture_begin", EMBEDDING, "capture_end", "instantiate"])
def test_failed_graph_outlives_engine_while_torch_uses_it(captures, fails):
    captures.fails = fails
    capturer = CudaGraphCapturer(DEVICE)
    assert capturer.capture(look_up) is None
    del capturer
    # Its frames refer to the graph.
    captures.error.__traceback__ = None
    gc.collect()
    # One that torch has ended by itself does not stay, nor does its pool.
    assert bool(captures.filters) == (fails != "instantiate")
    assert not any(captures.references.values())


def test_an_error_of_the_step_itself_is_raised(captures):

    def run() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        CudaGraphCapturer(DEVICE).capture(run)
    assert captures.begun == 0


def test_two_threads_capture_in_turn(captures):
    meeting, met = threading.Barrier(2), []

    def run() -> None:
        if threading.get_ident() in captures.threads:
            try:
                meeting.wait(0.1)
                met.append(True)
            except threading.BrokenBarrierError:
                met.append(False)

    threads = [
        threading.Thread(target=CudaGraphCapturer(DEVICE).capture, args=(run,)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == [False, False]
    assert gc.isenabled()


class Failing(AheadOnCPU):
    """An engine whose capturer is CUDA's."""

    def mode(self, config: EngineConfig) -> ExecutionMode:
        return replace(super().mode(config), make_capturer=lambda: CudaGraphCapturer(DEVICE))


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_two_engines_without_captures_answer(captures, monkeypatch, caplog):
    monkeypatch.setattr(registry, "OneDNNOps", TorchOps)
    captures.fails = EMBEDDING

    async def ask(ahead: AheadOnCPU, **fields: Any) -> tuple[int, ...]:
        async with ahead.engine(**fields) as engine:
            params = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
            found = await asyncio.gather(*(engine.generate(text, **params) for text in PROMPTS))
            return tuple(token for one in found for token in one.token_ids)

    found = await asyncio.gather(
        ask(Failing(), cuda_graphs="decode"),
        ask(Failing()),
        ask(AheadOnCPU(), cuda_graphs="off"),
    )
    assert len(found[0]) == 6 * len(PROMPTS)
    assert found[0] == found[1] == found[2]
    # Four buckets of each engine at start, and more in the answers' steps.
    assert captures.begun >= 2 * 2 * 4
    assert caplog.text.count("could not be captured") == 2


@pytest.fixture
def streams(monkeypatch) -> list[Any]:
    """Streams that were made, in place of torch's."""
    made: list[Any] = []

    class MadeStream:
        def __init__(self, device: torch.device, priority: int = 0) -> None:
            self.device, self.priority = device, priority
            made.append(self)

        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Stream", MadeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(graph_streams, "CUDA_STREAM_POOL", CudaStreamPool())
    return made


def test_streams_have_high_priority(streams):
    with CudaStream(DEVICE).use_side_stream():
        pass
    assert [stream.priority for stream in streams] == [-1, -1]


def test_an_engine_takes_the_streams_of_one_that_closed(streams):
    """cuBLAS keeps a workspace for each stream that ever ran a product."""
    other = torch.device("cuda", 1)
    for device in (DEVICE, DEVICE, other, DEVICE):
        stream = CudaStream(device)
        with stream.use_side_stream():
            pass
        stream.give_back()
    assert [stream.device for stream in streams] == [DEVICE, DEVICE, other, other]


def test_engines_that_run_at_once_have_streams_of_their_own(streams):
    first, second = CudaStream(DEVICE), CudaStream(DEVICE)
    first.give_back()
    third, fourth = CudaStream(DEVICE), CudaStream(DEVICE)
    assert [one._stream for one in (first, second, third, fourth)] == [
        streams[0], streams[1], streams[0], streams[2],
    ]  # fmt: skip
