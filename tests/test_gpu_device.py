"""Memory and weight uploads on a real GPU."""

from __future__ import annotations

import pytest
import torch

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.config import EngineConfig
from asyncllm.gpu.memory import MemoryProbe, cuda_cache_bytes, release_cached_memory
from asyncllm.gpu.weights import load_weights
from tests.checkpoints import make_checkpoint
from tests.gpu_turns import alone_on_the_gpu  # noqa: F401 - a fixture, by its name

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"),
    pytest.mark.usefixtures("alone_on_the_gpu"),
]

GPU = torch.device("cuda", 0)
MIB = 2**20


def test_pool_counts_its_memory():
    probe = MemoryProbe()
    # Loads the kernel, which takes memory of CUDA's own.
    torch.ones(1, device=GPU)
    probe.empty_cache(GPU)
    before = probe.free_and_total_bytes(GPU)[0]
    with probe.private_pool(GPU) as reserved:
        assert reserved() == 0
        tensor = torch.ones(64 * MIB, dtype=torch.uint8, device=GPU)
        assert reserved() == 64 * MIB
        del tensor
        assert reserved() == 64 * MIB
    assert probe.free_and_total_bytes(GPU)[0] == before - 64 * MIB
    assert probe.synchronize(GPU, 5.0)
    probe.empty_cache(GPU)
    assert probe.free_and_total_bytes(GPU)[0] == before


def test_measuring_leaves_the_hosts_peak_statistics():
    peak = torch.ones(256 * MIB, dtype=torch.uint8, device=GPU)
    del peak
    held = torch.cuda.max_memory_allocated(GPU)
    assert held >= 256 * MIB
    probe = MemoryProbe()
    probe.empty_cache(GPU)
    free, total = probe.free_and_total_bytes(GPU)
    found = cuda_cache_bytes(
        EngineConfig(),
        GPU,
        free_at_start=free,
        weights_bytes=0,
        profile_run=lambda: torch.ones(32 * MIB, dtype=torch.uint8, device=GPU)[0].item(),
        graph_reserve_bytes=0,
        min_bytes=1,
    )
    assert torch.cuda.max_memory_allocated(GPU) == held
    assert found <= min(int(0.9 * total), free) - 32 * MIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_arrive_as_they_do_on_a_cpu(tmp_path, dtype):
    make_checkpoint(tmp_path, "Qwen3ForCausalLM", head_dim=32)
    model = ModelConfig.from_directory(tmp_path)
    expected = dict(load_weights(model, dtype, torch.device("cpu")))
    found = dict(load_weights(model, dtype, GPU))
    for name, tensor in expected.items():
        assert found[name].device == GPU
        assert torch.equal(found[name].cpu(), tensor), name
    del found
    release_cached_memory(GPU)
