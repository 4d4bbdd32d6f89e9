"""Run-ahead and CUDA graphs, simulated on the CPU."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.core.batch import StepBatch
from asyncllm.core.executor import ExecutorInfo
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.gpu.batch.sampling_inputs import SamplingStages
from asyncllm.gpu.batch.step_inputs import StepInputs
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer, default_batch_sizes
from asyncllm.gpu.graph.graph_replay import GraphPlan, GraphReplay
from asyncllm.gpu.graph.streams import CudaStream
from asyncllm.gpu.kv_cache import KVCache, KVGroup
from asyncllm.gpu.launched_step import LaunchedStep
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.models.attention_kinds import attention_kinds, kv_plan
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.models.dense import build_decoder
from asyncllm.gpu.ops.base import BlockLayout
from asyncllm.gpu.ops.torch_attention import TorchAttention
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.state_cache import StateCache
from asyncllm.gpu.step_memory import StepMemory
from asyncllm.gpu.step_runner import StepRunner
from asyncllm.gpu.weights import dummy_weights
from asyncllm.logits_processor import LogitsProcessor

CPU = torch.device("cpu")


class LateEvent:
    """A point in a LateStream: done once all that was queued before it has run."""

    def __init__(self, stream: LateStream) -> None:
        self._stream = stream
        self.done = False

    def synchronize(self) -> None:
        while not self.done:
            self._stream.advance()


class LateStream(CudaStream):
    """Work runs in order, as late as it may: when an event of it is waited for. A step then finds
    in the host's memory what was changed after it was queued, as on a GPU.

    Only what attention plans from is of the moment: a plan is made on the host, at launch.
    ``most`` is how many steps were queued at once.
    """

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None] | LateEvent] = deque()
        self.most = 0

    def context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def use_side_stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def run(self, work: Callable[[], None]) -> None:
        self._queue.append(work)

    def record_event(self) -> LateEvent:
        event = LateEvent(self)
        self._queue.append(event)
        self.most = max(self.most, sum(isinstance(item, LateEvent) for item in self._queue))
        return event

    def advance(self) -> None:
        item = self._queue.popleft()
        if isinstance(item, LateEvent):
            item.done = True
            return
        with torch.inference_mode():
            item()

    def synchronize(self) -> None:
        while self._queue:
            self.advance()

    def give_back(self) -> None:
        assert not self._queue


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor of a Trace."""

    index: int


class Trace(TorchDispatchMode):
    """The ops of a run, and their replay: tensors by identity, and every number that Python knew,
    as a graph has them. A replay leaves each result where the run had it.

    Args:
        earlier: traces of the same capture, whose tensors this one may go on with.

    Attributes:
        ops: the names of what was called, in order.
        constants: every tensor that it refers to and neither made nor found in ``earlier``.
    """

    def __init__(self, earlier: Sequence[Trace] = ()) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.constants: list[Tensor] = []
        self.made: set[int] = set()
        self._earlier = earlier
        self._calls: list[tuple[Any, list[Any], dict[str, Any], Any]] = []
        self._places: dict[int, _Place] = {}
        self._held: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        known = len(self._held)
        given = self._placed(list(args))
        named = {name: self._placed(value) for name, value in (kwargs or {}).items()}
        made = {one for trace in self._earlier for one in trace.made}
        self.constants += [one for one in self._held[known:] if id(one) not in made]
        known = len(self._held)
        self.ops.append(str(func))
        self._calls.append((func, given, named, self._placed(found)))
        self.made |= {id(one) for one in self._held[known:]}
        return found

    def _placed(self, value: Any) -> Any:
        """A value with places for tensors."""
        if isinstance(value, list | tuple):
            return [self._placed(each) for each in value]
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._places:
            self._places[id(value)] = _Place(len(self._held))
            # An id is a tensor's own for as long as that lives.
            self._held.append(value)
        return self._places[id(value)]

    def replay(self) -> None:
        held = self._held

        def filled(value: Any) -> Any:
            if isinstance(value, _Place):
                return held[value.index]
            return [filled(each) for each in value] if isinstance(value, list) else value

        def keep(place: Any, found: Any) -> None:
            if isinstance(place, list):
                for own, each in zip(place, found, strict=True):
                    keep(own, each)
            elif isinstance(place, _Place) and found is not held[place.index]:
                held[place.index].copy_(found)

        for func, given, named, made in self._calls:
            keep(made, func(*filled(given), **{key: filled(each) for key, each in named.items()}))


class TraceRecorder:
    """A ``Trace`` in place of a capture, or several where it is cut.

    Attributes:
        traces: what was traced, in order.
        before: called before each replay, to poison what a replay must not depend on.
    """

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.traces: list[Trace] = []
        self.before = before
        self._pieces: list[Callable[[], None]] | None = None

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Traces a run, which is the first one as well."""
        first, pieces = len(self.traces), list[Callable[[], None]]()
        self._pieces = pieces
        self._begin(first)
        run()
        self._end()
        self._pieces = None

        def replay() -> None:
            self.before()
            for piece in pieces:
                piece()

        return replay

    def break_graph(self, run_eagerly: Callable[[], None]) -> None:
        if self._pieces is None:
            run_eagerly()
            return
        self._end()
        self._pieces.append(run_eagerly)
        run_eagerly()
        self._begin(self._first)

    def _begin(self, first: int) -> None:
        self._first = first
        self._trace = Trace(self.traces[first:])
        self._trace.__enter__()

    def _end(self) -> None:
        self._trace.__exit__(None, None, None)
        self.traces.append(self._trace)
        assert self._pieces is not None
        self._pieces.append(self._trace.replay)

    def pool_bytes(self) -> int:
        return 0


def storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def make_decoder(
    model: ModelConfig,
    weights: Iterable[tuple[str, Tensor]] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """In plain torch."""
    attention = {kind: TorchAttention(kind.shape, dtype) for kind in attention_kinds(model)}
    if weights is None:
        weights = dummy_weights(model, dtype, CPU, None)
    decoder = build_decoder(model, TorchOps(), attention, weights)
    decoder.set_max_positions(model.max_position_embeddings)
    return decoder


def in_groups(decoder: Decoder, *groups: tuple[int, ...]) -> Decoder:
    """The same decoder with these layers in KV groups."""
    group_of = {layer: group for group, layers in enumerate(groups) for layer in layers}
    layers: list[Any] = list(decoder.layers)
    kinds = [replace(layer.kind, kv_group=group_of[i]) for i, layer in enumerate(layers)]
    attention = {kind: decoder.attention[replace(kind, kv_group=0)] for kind in kinds}
    grouped = copy.copy(decoder)
    grouped.attention, indices = attention, list(attention)
    grouped.layers = [
        replace(layer, kind=kind, mixer=replace(layer.mixer, attention_index=indices.index(kind)))
        for layer, kind in zip(layers, kinds, strict=True)
    ]
    return grouped


def make_runner(
    decoder: Decoder,
    *,
    capturer: GraphCapturer | None,
    stream: LateStream | None = None,
    sizes: tuple[int, ...] | None = None,
    token_counts: tuple[int, ...] = (),
    max_num_seqs: int = 8,
    num_blocks: int = 64,
    block_size: int = 4,
    max_len: int = 96,
    max_tokens: int = 512,
    depth: int = 2,
    layers: tuple[tuple[int, ...], ...] = (),
    processors: Sequence[LogitsProcessor] = (),
) -> ModelRunner:
    """A runner with its state on the "device"; with no recorder the plain one, which draws
    tokens by the same function. ``layers`` of KV groups, if they are not the model's own, of which
    each has ``num_blocks``."""
    model = decoder.model
    if not layers and tuple(decoder.attention) == attention_kinds(model):
        groups = kv_plan(model).kv_groups(decoder.attention, block_size)
        num_blocks *= len(groups)  # of the same bytes in all
    else:
        groups = kv_groups(model, block_size, *layers)
    if layers:
        decoder = in_groups(decoder, *layers)
    info = ExecutorInfo(
        vocab_size=model.vocab_size,
        num_blocks=num_blocks + 1,
        kv_groups=tuple(group.spec for group in groups),
        max_model_len=max_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        pipeline_depth=depth,
        has_states=bool(decoder.states),
    )
    dtype = decoder.embedding.dtype
    states = StateCache(decoder.states, max_num_seqs, dtype, CPU)
    cache = KVCache(groups, num_blocks + 1, dtype, CPU, states)
    graphs = None
    if capturer is not None:
        sizes = default_batch_sizes(max_num_seqs) if sizes is None else sizes
        graphs = GraphPlan(capturer, sizes, token_counts)
    runner = ModelRunner(
        decoder,
        cache,
        info,
        # torch's second thread would spin beside the tests of the other worker.
        num_threads=1,
        stream=stream,
        graphs=graphs,
        logits_processors=processors,
    )
    return runner if stream is None else run_late(runner)


def run_late(runner: ModelRunner) -> ModelRunner:
    """The same runner, on a LateStream. Attention plans a step from the tables as they are at its
    launch."""
    steps_of(runner).memory.__class__ = LateMemory
    return runner


class LateMemory(StepMemory):
    def derive_inputs(self, step: LaunchedStep) -> StepInputs:
        inputs = super().derive_inputs(step)
        groups = [replace(g, host_table=g.host_table.copy()) for g in inputs.groups]
        return replace(inputs, groups=groups)


def kv_groups(model: ModelConfig, block_size: int, *layers: tuple[int, ...]) -> list[KVGroup]:
    """Groups of these layers, one of all layers if none are given, in the default layout."""
    layout = BlockLayout((2, block_size, model.num_kv_heads, model.head_dim))
    return [
        KVGroup(KVCacheSpec(group, block_size), layout)
        for group in layers or (tuple(range(model.num_layers)),)
    ]


def steps_of(runner: ModelRunner) -> StepRunner:
    assert runner._runner is not None
    return runner._runner


def replay_of(runner: ModelRunner) -> GraphReplay:
    replay = steps_of(runner).forward_pass
    assert isinstance(replay, GraphReplay)
    return replay


def queue_mixed_step(
    runner: ModelRunner, batch: StepBatch, stages: SamplingStages = SamplingStages.NONE
) -> None:
    """Queues the forward pass and the draw of a mixed step, on padding's blocks."""
    steps, memory = steps_of(runner), steps_of(runner).memory
    batch.num_tokens = sum(batch.counts)
    step = LaunchedStep(batch)
    step.buffer, step.stages = memory.host_buffers[0], stages
    memory.write_host_buffer(step)
    steps.forward_pass.prepare(step)
    step.inputs = memory.derive_inputs(step)
    steps._run_forward(step)
    assert step.output is not None
    steps.sample_logits(step.output.logits, stages)
