"""How many nodes the graph of a decode step has: each costs about as much as a small kernel."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from asyncllm.core.executor import ExecutorInfo
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer, GraphKey
from asyncllm.gpu.kv_cache import KVCache
from asyncllm.gpu.model_runner import Graphs, ModelRunner
from asyncllm.gpu.models.attention_kinds import attention_kinds, kv_groups
from asyncllm.gpu.models.dense import build_decoder
from asyncllm.gpu.ops.triton import (
    activation,
    decode_attention,
    decode_inputs,
    merge_attention,
    norm,
    rope_cache,
    sampling,
)
from asyncllm.gpu.ops.triton.attention import TritonAttention
from asyncllm.gpu.ops.triton.op_set import TritonOps
from asyncllm.gpu.weights import dummy_weights
from tests.static_runner import replay_of
from tests.triton.decoder_steps import small_model
from tests.triton.launches import recording

CPU = torch.device("cpu")
SILENT = {
    "aten::view", "aten::slice", "aten::select", "aten::split", "aten::split_with_sizes",
    "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::t",
    "aten::transpose", "aten::unbind", "aten::_unsafe_view", "aten::detach", "aten::alias",
    "aten::as_strided", "aten::unsqueeze", "aten::expand",
}  # fmt: skip
"""Ops of torch that launch nothing."""


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name not in SILENT:
            self.ops[name] += 1
        return func(*args, **(kwargs or {}))


def nodes(num_layers: int, rows: int) -> Counter[str]:
    """Launches of a decode step for an H200: 132 multiprocessors, compute capability 9.0."""
    heads = {"num_heads": 16, "num_kv_heads": 8}
    model = replace(small_model(), num_layers=num_layers, sliding_layers=(), **heads)
    attention = {
        kind: TritonAttention(kind.shape, torch.bfloat16, CPU, capability=90, num_sms=132)
        for kind in attention_kinds(model)
    }
    weights = dummy_weights(model, torch.bfloat16, CPU)
    decoder = build_decoder(model, TritonOps(), attention, weights)
    decoder.set_max_positions(4096)
    groups = kv_groups(model, attention, 16)
    info = ExecutorInfo(
        vocab_size=model.vocab_size,
        num_blocks=32,
        kv_groups=tuple(group.spec for group in groups),
        max_model_len=4096,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        pipeline_depth=2,
    )
    cache = KVCache(groups, 32, torch.bfloat16, CPU)
    runner = ModelRunner(decoder, cache, info, graphs=Graphs(GraphCapturer(), ()))
    modules = (
        activation, decode_attention, merge_attention, norm, rope_cache, sampling, decode_inputs,
    )  # fmt: skip
    with ExitStack() as stack, torch.inference_mode():
        launches = [stack.enter_context(recording(module)) for module in modules]
        counting = stack.enter_context(Counting())
        replay_of(runner).run_padding(GraphKey(rows))
    kernels = Counter(launch.kernel.fn.__name__ for found in launches for launch in found)
    return counting.ops + kernels


@pytest.mark.parametrize(("rows", "splits"), [(1, True), (256, False)])
def test_nodes_of_a_layer(rows: int, splits: bool) -> None:
    """Four products, rotation with cache write, attention, two norms, SiLU; and a merge where
    a sequence is shared among programs."""
    layer = nodes(3, rows) - nodes(2, rows)
    kernels = {
        "aten::linear": 4,
        "rope_cache_kernel": 1,
        "decode_kernel": 1,
        "norm_kernel": 2,
        "gated_mul_kernel": 1,
    }
    assert layer == Counter(kernels | ({"merge_kernel": 1} if splits else {}))


def test_nodes_around_the_layers() -> None:
    """Step state with table changes, embedding, first norm, the output head, two for sampling."""
    layer = nodes(3, 256) - nodes(2, 256)
    rest = nodes(2, 256) - layer - layer
    assert rest == Counter(
        {
            "decode_inputs_kernel": 1,
            "aten::embedding": 1,
            "norm_kernel": 1,
            "aten::linear": 1,
            "chunk_kernel": 1,
            "choose_kernel": 1,
        }
    )
