"""Gated delta rules against the reference functions of flash-linear-attention.

pip install --no-deps --target build/fla fla-core einops
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncllm.checkpoint.linear_attention_config import LinearAttentionConfig
from asyncllm.gpu.ops.gated_delta import DecayParameters
from tests.op_sets import BACKENDS, make
from tests.recurrent_checks import SLOTS, state_inputs

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SHAPES = [(2, 4, 8, 12), (3, 3, 17, 70), (1, 4, 128, 128)]
COUNTS = (1, 63, 64, 65, 200)
FIRST, SLOT = 5, 3
"""A row behind others in the batch's slots, that goes on from a state."""


@pytest.fixture(scope="module")
def cases():
    """Inputs of each shape and number of tokens, as the projections give them."""
    generator = torch.Generator().manual_seed(15)
    made = []
    for keys, heads, key_dim, value_dim in SHAPES:
        for count in COUNTS:
            shapes = {
                "q": (count, keys, key_dim),
                "k": (count, keys, key_dim),
                "v": (count, heads, value_dim),
                "b": (count, heads),
                "a": (count, heads),
                "dt_bias": (heads,),
                "A_log": (heads,),
                "state": (heads, key_dim, value_dim),
            }
            made.append({name: torch.randn(s, generator=generator) for name, s in shapes.items()})
    return made


@pytest.fixture(scope="module")
def expected(cases, tmp_path_factory):
    """Of each case the outputs and the last state, token by token and in chunks."""
    folder = ROOT / "build" / "fla"
    if not folder.is_dir():
        pytest.skip("pip install --no-deps --target build/fla fla-core einops first")
    files = [str(tmp_path_factory.mktemp("fla") / name) for name in ("inputs", "outputs")]
    torch.save(cases, files[0])
    # -P: beside the program is a folder named as triton is.
    command = [sys.executable, "-P", str(ROOT / "tests" / "fla_rules.py"), *files]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    subprocess.run(command, check=True, env=environment, stderr=subprocess.STDOUT)
    return torch.load(files[1], weights_only=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_flash_linear_attention(backend, cases, expected):
    shapes = [shape for shape in SHAPES for _ in COUNTS]
    for shape, case, references in zip(shapes, cases, expected, strict=True):
        ops, config = make(backend), LinearAttentionConfig((True,), *shape, 4)
        qkv = torch.cat([case[name].flatten(1) for name in "qkv"], 1)
        state = torch.randn(SLOTS, *case["state"].shape)
        state[SLOT] = case["state"]
        before = state.clone()
        rows = ops.state_rows(state_inputs([(SLOT, FIRST, len(qkv))]))
        delta = ops.gated_delta(config, DecayParameters(case["dt_bias"], case["A_log"]))
        found = delta(qkv, torch.cat((case["b"], case["a"]), 1), state, rows)
        for out, last in references:
            torch.testing.assert_close(found, out.flatten(1), rtol=2e-5, atol=2e-5)
            torch.testing.assert_close(state[SLOT], last, rtol=2e-5, atol=2e-5)
        state[SLOT] = before[SLOT]
        assert torch.equal(state, before)
