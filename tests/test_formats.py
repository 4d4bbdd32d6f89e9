"""Quantised checkpoints: what is read from them, and what is refused."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncllm.checkpoint.model_config import QUANT_METHODS, ModelConfig
from asyncllm.errors import InvalidRequestError, ModelLoadError
from asyncllm.gpu.formats import reader as reader_module
from asyncllm.gpu.formats.open_checkpoint import FORMATS, open_checkpoint
from asyncllm.gpu.weights import load_weights
from tests.checkpoints import make_checkpoint
from tests.driver import Driver
from tests.packing import CASES, Case, compressed, fp8, quantise_checkpoint
from tests.reference import Tally, compare, generate
from tests.static_runner import make_decoder, make_runner

CPU = torch.device("cpu")
PROMPTS = ([3], [1, 4, 1, 5, 9, 2, 6], list(range(40)))


def make(path: Path, case: Case, **settings: Any) -> tuple[torch.nn.Module, dict]:
    model = make_checkpoint(path, "Qwen3ForCausalLM", head_dim=32, **settings)
    return model, quantise_checkpoint(path, case, model)


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def test_tensors_are_those_of_the_unquantised_checkpoint(case, tmp_path, monkeypatch):
    """By their names, in three dtypes, whole and in slices of a few rows."""
    _, expected = make(tmp_path, case, num_hidden_layers=1)
    monkeypatch.setattr(reader_module, "SLICE_ELEMENTS", 1500)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with closing(open_checkpoint(tmp_path, dtype)) as reader:
            assert set(reader.tensors) == set(expected)
            for name, tensor in expected.items():
                found, slices = reader.tensor(name), list(reader.slices(name))
                packed = found.dtype == dtype != torch.float32 or "_proj" in name
                rounded = tensor.to(dtype) if packed else tensor
                assert reader.tensors[name].shape == found.shape
                if "_proj." in name:
                    assert len(slices) > 2
                    assert reader.tensors[name].num_bytes < tensor.nbytes
                torch.testing.assert_close(found, rounded, rtol=0.0, atol=0.0)
                torch.testing.assert_close(torch.cat(slices), found, rtol=0.0, atol=0.0)
