"""The decoder on the Triton backend against the plain one, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from asyncllm.gpu.ops.triton.attention import TritonAttention
from tests.triton.decoder_steps import BlocksFirst, run_steps


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TritonAttention, BlocksFirst])
def test_logits_are_those_of_the_plain_backend(kind: type[TritonAttention]) -> None:
    device = torch.device("cpu")
    expected = run_steps("torch", torch.float32, device)
    found = run_steps("triton", torch.float32, device, capability=80, made=kind)
    for step, (logits, wanted) in enumerate(zip(found, expected, strict=True)):
        assert torch.allclose(logits, wanted, rtol=1e-4, atol=1e-4), f"step {step}"
