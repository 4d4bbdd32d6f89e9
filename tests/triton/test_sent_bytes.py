"""How many bytes a mixed step sends to the device."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

pytest.importorskip("triton")

from asyncllm.gpu.graph.cuda_graphs import GraphCapturer
from asyncllm.gpu.models.attention_kinds import attention_kinds
from asyncllm.gpu.models.dense import build_decoder
from asyncllm.gpu.ops.triton import (
    activation,
    decode_attention,
    decode_inputs,
    merge_attention,
    norm,
    prefill_attention,
    rope_cache,
    sampling,
)
from asyncllm.gpu.ops.triton.attention import TritonAttention
from asyncllm.gpu.ops.triton.op_set import TritonOps
from asyncllm.gpu.weights import dummy_weights
from tests.static_runner import CPU, LateStream, make_runner, sent_in_a_mixed_step, steps_of
from tests.triton.decoder_steps import small_model
from tests.triton.launches import recording

KERNELS = (
    activation, decode_attention, decode_inputs, merge_attention, norm, prefill_attention,
    rope_cache, sampling,
)  # fmt: skip


@pytest.mark.parametrize("max_len", [256, 131_072])
def test_a_mixed_step_sends_no_block_tables(max_len: int) -> None:
    model, dtype = small_model(), torch.float32
    attention = {
        kind: TritonAttention(kind.shape, dtype, CPU, capability=80, num_sms=16)
        for kind in attention_kinds(model)
    }
    decoder = build_decoder(model, TritonOps(), attention, dummy_weights(model, dtype, CPU))
    decoder.set_max_positions(128)
    stream = LateStream()
    runner = make_runner(
        decoder, capturer=GraphCapturer(), stream=stream, block_size=16, max_len=max_len
    )
    with ExitStack() as stack:
        for module in KERNELS:
            stack.enter_context(recording(module))
        sent = sent_in_a_mixed_step(runner, stream)
    # One copy of all sections: with room for 512 tokens wanted, their ids and positions, and their
    # slots in both KV groups.
    assert sent == steps_of(runner).memory.buffer.memory.nbytes
    assert 5 * 8 * 512 < sent < 5 * 8 * 512 + 1500
