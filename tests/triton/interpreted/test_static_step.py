"""Steps that run ahead on the Triton backend, in the interpreter, against the plain path."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncllm.gpu.graph.cuda_graphs import GraphCapturer
from asyncllm.gpu.ops.triton.attention import TritonAttention
from asyncllm.sampling_params import SamplingParams
from tests.driver import Driver
from tests.static_runner import CPU, LateStream, make_decoder, make_runner, steps_of
from tests.triton.decoder_steps import (
    BlocksFirst,
    run_steps,
    small_model,
    triton_decoder,
    wide_fields,
)

KINDS = [
    SamplingParams(temperature=0.0, seed=0),
    SamplingParams(temperature=0.9, top_k=2, seed=4),
    SamplingParams(temperature=1.2, top_p=0.8, top_k=30, seed=5),
    SamplingParams(temperature=0.8, min_p=0.05, seed=6, logprobs=1),
]
MODELS = {"Qwen 3": small_model(), "Gemma 4": replace(small_model(), **wide_fields(2))}
SETTINGS: dict[str, Any] = {"block_size": 16, "num_blocks": 30, "max_len": 96, "max_num_seqs": 5}


@pytest.mark.parametrize(
    "name", ["Qwen 3", pytest.param("Gemma 4", marks=pytest.mark.slow)], ids=str
)
def test_tokens_are_those_of_the_plain_path(name: str) -> None:
    """Decode steps padded to a bucket, of which the last ones need the host; blocks that
    were not written are full of NaN."""
    plain = make_runner(make_decoder(MODELS[name]), capturer=None, **SETTINGS)
    stream = LateStream()
    decoder = triton_decoder(MODELS[name], torch.float32)
    ahead = make_runner(decoder, capturer=GraphCapturer(), stream=stream, sizes=(5,), **SETTINGS)
    steps_of(ahead).cache.tensor.fill_(torch.nan)
    found = []
    for runner, depth in ((plain, 1), (ahead, 2)):
        driver = Driver(runner)
        prompts = ([5, 6, 7], list(range(30)), [9], [250, 3])
        seqs = [
            driver.add(prompt, count, kind)
            for prompt, count, kind in zip(prompts, (6, 5, 6, 3), KINDS, strict=True)
        ]
        driver.run(seqs, depth=depth)
        found.append([seq.outputs for seq in seqs])
    assert found[0] == found[1]
    assert len({token for tokens in found[0] for token in tokens}) > 10
    assert stream.most == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TritonAttention, BlocksFirst])
def test_logits_are_those_of_the_plain_path(kind: type[TritonAttention]) -> None:
    expected = run_steps("torch", torch.float32, CPU)
    found = run_steps("triton", torch.float32, CPU, capability=80, made=kind)
    for step, (logits, wanted) in enumerate(zip(found, expected, strict=True)):
        assert torch.allclose(logits, wanted, rtol=1e-4, atol=1e-4), f"step {step}"
