"""What a step costs beside its kernels: nodes of a decode step's graph, bytes of a mixed step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from asyncllm.gpu.batch.step_buffer import StepBuffer
from asyncllm.gpu.graph.cuda_graphs import GraphKey
from asyncllm.sampling_params import SamplingParams
from tests.driver import Driver
from tests.static_runner import LateStream, replay_of, steps_of
from tests.triton.launches import recording
from tests.triton.small_steps import ROWS, make_step

GREEDY = SamplingParams(temperature=0.0, seed=0)
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
    fields = {"num_layers": num_layers, "sliding_layers": ()}
    replay = replay_of(make_step(4096, (), torch.bfloat16, **fields))
    with recording() as launches, Counting() as counting, torch.inference_mode():
        replay.run_padded_rows(GraphKey(rows))
    return counting.ops + Counter(launch.kernel.fn.__name__ for launch in launches)


@pytest.mark.parametrize(("rows", "merges"), [(1, 1), (ROWS, 0)])
def test_nodes_of_a_decode_step(rows: int, merges: int) -> None:
    """A merge where a sequence is shared among programs; around the layers step state with table
    changes, embedding, first norm, the output head, and two for sampling."""
    two = nodes(2, rows)
    layer = nodes(3, rows) - two
    kernels = {"rope_cache": 1, "decode": 1, "merge": merges, "norm": 2, "gated_mul": 1}
    assert layer == +Counter(
        {"aten::linear": 4} | {f"{name}_kernel": count for name, count in kernels.items()}
    )
    around = ["decode_inputs_kernel", "aten::embedding", "norm_kernel", "aten::linear"]
    assert two - layer - layer == Counter([*around, "chunk_kernel", "choose_kernel"])


def sent_in_a_mixed_step(max_len: int) -> list[int]:
    """Bytes of each copy for three decode rows, and prompts of 9 and 21 tokens."""
    stream, sent = LateStream(), list[int]()
    runner = make_step(max_len, (), torch.bfloat16, stream=stream)
    copy_from, from_numpy = StepBuffer.copy_from, torch.from_numpy

    def copied(self: StepBuffer, source: StepBuffer, last: str) -> None:
        sent.append(self.ends[last])
        copy_from(self, source, last)

    def counted(array: Any) -> torch.Tensor:
        sent.append(array.nbytes)
        return from_numpy(array)

    driver = Driver(runner)
    decoding = [driver.add([1, 2, 3] * count, 9, GREEDY) for count in (1, 3, 8)]
    entering = [driver.add([5] * count, 9, GREEDY) for count in (9, 21)]
    with recording(), pytest.MonkeyPatch.context() as patch:
        driver.launch([(seq, 0) for seq in decoding])
        stream.synchronize()
        patch.setattr(StepBuffer, "copy_from", copied)
        patch.setattr(torch, "from_numpy", counted)
        driver.launch([(seq, 0) for seq in decoding + entering])
        stream.synchronize()
    assert sum(sent) == steps_of(runner).memory.buffer.memory.nbytes
    return sent


def test_a_mixed_step_sends_no_block_tables() -> None:
    """One copy of all sections, for sequences of any length."""
    short, long = sent_in_a_mixed_step(256), sent_in_a_mixed_step(131_072)
    assert short == long
    assert len(short) == 1
