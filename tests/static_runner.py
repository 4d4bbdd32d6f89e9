"""A device that runs ahead and graphs that bake everything in, played on the CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.core.executor import ExecutorInfo
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer, default_sizes
from asyncllm.gpu.graph.decode_runner import DecodeRunner
from asyncllm.gpu.kv_cache import KVCache, KVCacheSize, block_bytes
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.models.dense import attention_kinds, build_decoder
from asyncllm.gpu.ops.torch_attention import TorchAttention
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.weights import dummy_weights

CPU = torch.device("cpu")


class LateTicket:
    def __init__(self, stream: LateStream, work: Callable[[], None]) -> None:
        self._stream, self._work = stream, work
        self.done = False

    def run(self) -> None:
        self._work()
        self.done = True

    def synchronize(self) -> None:
        while not self.done:
            self._stream.advance()


class LateStream:
    """Work runs in order, as late as it may: when somebody waits for it.

    Whatever the host changes between submitting and waiting, the work sees changed, as a GPU
    might. ``most`` is how much was queued at once.
    """

    is_async = True

    def __init__(self) -> None:
        self._queue: deque[LateTicket] = deque()
        self.most = 0

    def context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def submit(self, work: Callable[[], None]) -> LateTicket:
        ticket = LateTicket(self, work)
        self._queue.append(ticket)
        self.most = max(self.most, len(self._queue))
        return ticket

    def advance(self) -> None:
        with torch.inference_mode():
            self._queue.popleft().run()

    def synchronize(self) -> None:
        while self._queue:
            self.advance()


class TraceRecorder:
    """``make_fx`` in place of a capture: the trace keeps tensors by identity, and every number
    that Python knew, as a graph does.

    Attributes:
        traces: what was traced, in order.
        before: called before each replay, to poison what a replay must not depend on.
    """

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.traces: list[GraphModule] = []
        self.before = before

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        # Tracing runs the function once.
        trace = make_fx(run, tracing_mode="real")()
        self.traces.append(trace)

        def replay() -> None:
            self.before()
            trace()

        return replay

    def memory(self) -> int:
        return 0


def storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def constants(trace: GraphModule) -> list[Tensor]:
    """Every tensor that a trace refers to."""
    return [value for value in vars(trace).values() if isinstance(value, Tensor)] + [
        *trace.buffers(),
        *trace.parameters(),
    ]


def make_decoder(
    model: ModelConfig, weights: Iterable[tuple[str, Tensor]] | None = None
) -> Decoder:
    """In plain torch and float32."""
    attention = {kind: TorchAttention(kind.shape, torch.float32) for kind in attention_kinds(model)}
    if weights is None:
        weights = dummy_weights(model, torch.float32, CPU, None)
    decoder = build_decoder(model, TorchOps(), attention, weights)
    decoder.set_max_positions(model.max_position_embeddings)
    return decoder


def make_runner(
    decoder: Decoder,
    *,
    capturer: GraphCapturer | None,
    stream: LateStream | None = None,
    sizes: tuple[int, ...] | None = None,
    max_num_seqs: int = 8,
    num_blocks: int = 64,
    block_size: int = 4,
    max_len: int = 96,
    depth: int = 2,
) -> ModelRunner:
    """A runner with its state on the "device"; with no recorder the plain one, which draws
    tokens by the same function."""
    model = decoder.model
    size = KVCacheSize(
        num_blocks + 1, block_size, max_len, block_bytes(model, block_size, torch.float32)
    )
    info = ExecutorInfo(
        vocab_size=model.vocab_size,
        num_blocks=num_blocks + 1,
        kv_groups=(KVCacheSpec(tuple(range(model.num_layers)), block_size),),
        max_model_len=max_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        pipeline_depth=depth,
    )
    return ModelRunner(
        decoder,
        KVCache(model, size, torch.float32, CPU),
        info,
        stream=stream,
        capturer=capturer,
        graph_sizes=default_sizes(max_num_seqs) if sizes is None else sizes,
        races=True,
    )


def decode_step(runner: ModelRunner) -> DecodeRunner:
    state = runner._state
    assert state is not None
    assert state.decode is not None
    return state.decode
