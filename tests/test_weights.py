"""Checkpoints that cannot be used are refused with names and numbers."""

from __future__ import annotations

import gc
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.models.architectures import find_architecture, parameters
from asyncllm.gpu.models.decoder import Decoder, attention_shape
from asyncllm.gpu.ops.torch_attention import TorchAttention
from asyncllm.gpu.ops.torch_ops import TorchOps
from asyncllm.gpu.weight_upload import PinnedUploader
from asyncllm.gpu.weights import dummy_weights, load_weights
from tests.checkpoints import make_checkpoint
from tests.live_bytes import LiveBytes

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    path = tmp_path_factory.mktemp("source")
    make_checkpoint(path, "Qwen3ForCausalLM", head_dim=32, num_hidden_layers=2)
    return ModelConfig.from_directory(path)


@pytest.fixture
def copy(source: ModelConfig, tmp_path: Path) -> ModelConfig:
    shutil.copytree(source.path, tmp_path / "copy")
    return replace(source, path=tmp_path / "copy")


def read(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return dict(load_weights(config, dtype, CPU))


def edit(config: ModelConfig, change) -> Path:
    path = config.path / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return path


def refused(config: ModelConfig) -> str:
    with pytest.raises(ModelLoadError) as error:
        read(config)
    return str(error.value)


def test_parameters_are_packed_in_order(source):
    tensors = load_file(source.path / "model.safetensors")
    packed = read(source)
    assert list(packed) == [parameter.name for parameter in parameters(source)]
    layer = "model.layers.1."
    for name, parts in (
        ("layers.1.qkv.weight", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("layers.1.gate_up.weight", ("mlp.gate_proj", "mlp.up_proj")),
    ):
        expected = torch.cat([tensors[f"{layer}{part}.weight"] for part in parts])
        assert torch.equal(packed[name], expected)
    assert torch.equal(packed["lm_head.weight"], tensors["lm_head.weight"])


def test_conversion_and_progress(source):
    tensors = load_file(source.path / "model.safetensors")
    total = sum(t.numel() * 4 for t in tensors.values())
    calls: list[tuple[int, int]] = []
    loaded = load_weights(source, torch.bfloat16, CPU, lambda done, of: calls.append((done, of)))
    for name, tensor in loaded:
        assert tensor.dtype == torch.bfloat16, name
    assert [of for _, of in calls] == [total] * len(tensors)
    assert calls[-1][0] == total
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_shards_and_a_single_file_are_the_same(source, tmp_path):
    tensors = load_file(source.path / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for index in range(3):
        file = f"model-{index}.safetensors"
        part = {name: tensors[name] for name in names[index::3]}
        save_file(part, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    index_file = tmp_path / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": weight_map}))
    sharded = read(replace(source, path=tmp_path))
    for name, tensor in read(source).items():
        assert torch.equal(tensor, sharded[name])
    (tmp_path / "model-1.safetensors").unlink()
    message = refused(replace(source, path=tmp_path))
    assert "model-1.safetensors" in message
    assert "no such file" in message
    index_file.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    assert "elsewhere" in refused(replace(source, path=tmp_path))
    for text in ("{", "[]", '{"weight_map": 3}'):
        index_file.write_text(text)
        assert "not an index" in refused(replace(source, path=tmp_path))


def test_missing_tensor(copy):
    name = "model.layers.1.mlp.up_proj.weight"
    path = edit(copy, lambda tensors: tensors.pop(name))
    message = refused(copy)
    assert str(path) in message
    assert name in message
    assert "(96, 64)" in message


def test_surplus_tensor(copy):
    name = "model.layers.0.self_attn.q_proj.bias"
    path = edit(copy, lambda tensors: tensors.update({name: torch.zeros(128)}))
    message = refused(copy)
    assert str(path) in message
    assert name in message


def test_harmless_surplus(copy, source):
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}
    edit(copy, lambda tensors: tensors.update(frequencies))
    assert len(read(copy)) == len(read(source))
    tied = replace(copy, tie_word_embeddings=True)
    assert "lm_head.weight" not in read(tied)


def test_wrong_shape(copy):
    name = "model.layers.0.self_attn.k_proj.weight"
    edit(copy, lambda tensors: tensors.update({name: torch.zeros(32, 64)}))
    message = refused(copy)
    for part in (name, "(32, 64)", "(64, 64)", "model.safetensors"):
        assert part in message


def test_wrong_type(copy):
    name = "model.norm.weight"
    edit(copy, lambda tensors: tensors.update({name: torch.zeros(64, dtype=torch.int64)}))
    assert "I64" in refused(copy)
    assert name in refused(copy)


@pytest.mark.parametrize("damage", ["half", "short", "empty", "pickle", "text"])
def test_damaged_file(copy, damage):
    path = copy.path / "model.safetensors"
    content = path.read_bytes()
    if damage == "pickle":
        torch.save({"model.norm.weight": torch.zeros(3)}, path)
    else:
        kept = {"half": content[: len(content) // 2], "short": content[:-1], "empty": b""}
        path.write_bytes(kept.get(damage, b"version https://example.invalid/spec\n" * 3))
    message = refused(copy)
    assert str(path) in message
    assert "not a whole safetensors file" in message


def test_no_file_at_all(copy):
    (copy.path / "model.safetensors").unlink()
    assert "model.safetensors" in refused(copy)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
def test_the_files_are_closed_again(source):
    attention = TorchAttention(attention_shape(source), torch.float32)
    decoder = Decoder(source, TorchOps(), attention, load_weights(source, torch.float32, CPU))
    assert str(source.path) not in Path("/proc/self/maps").read_text()
    assert decoder.embedding.shape == (256, 64)


def test_dummy_weights_are_the_same_every_time_and_leave_the_global_seed(source):
    state = torch.get_rng_state()
    first = dict(dummy_weights(source, torch.float32, CPU))
    second = dict(dummy_weights(source, torch.float32, CPU))
    assert torch.equal(state, torch.get_rng_state())
    assert {name: t.shape for name, t in first.items()} == {
        name: t.shape for name, t in read(source).items()
    }
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["layers.0.qkv.weight"].std().item() == pytest.approx(1 / 8, rel=0.05)


class LateTransfers:
    """A device that does nothing before it is waited for: a buffer that is filled again too
    early arrives with the wrong contents."""

    def __init__(self) -> None:
        self.started: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0
        self.most = 0

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.started.append((source, target))
        self.most = max(self.most, len(self.started) - self.done)

    def mark(self) -> int:
        return len(self.started)

    def wait(self, mark: int) -> None:
        for source, target in self.started[self.done : mark]:
            target.copy_(source)
        self.done = max(self.done, mark)


def staged(config: ModelConfig, dtype: torch.dtype, chunk_bytes: int) -> tuple[dict, LateTransfers]:
    transfers = LateTransfers()
    staging = PinnedUploader(CPU, chunk_bytes=chunk_bytes, pin=False, transfers=transfers)
    return dict(load_weights(config, dtype, CPU, staging=staging)), transfers


@pytest.mark.parametrize("chunk_bytes", [64, 1000, 4096, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_staged_weights_are_those_that_are_copied_directly(source, dtype, chunk_bytes):
    """Chunks that end within a row, and ones larger than any tensor."""
    expected = read(source, dtype)
    found, transfers = staged(source, dtype, chunk_bytes)
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected[name]), name
    assert transfers.done == len(transfers.started) > 2
    # Two buffers on their way, each with its conversion, is what "double-buffered" says.
    assert transfers.most == (2 if dtype == torch.float32 else 4)


@pytest.mark.parametrize("stored", [torch.float64, torch.bfloat16])
def test_staged_conversion_is_exact(copy, stored):
    """From wider and from narrower numbers, and of tensors that are no multiple of a chunk."""
    edit(copy, lambda tensors: tensors.update({k: t.to(stored) for k, t in tensors.items()}))
    expected = read(copy, torch.float32)
    found, _ = staged(copy, torch.float32, 1000)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("dtype", "buffers"), [(torch.float32, 2), (torch.bfloat16, 4)], ids=["same", "converted"]
)
def test_staging_takes_its_buffers_and_no_more(source, dtype, buffers):
    """Beside the parameters: two chunks on the host, and two on the device to convert in."""
    chunk = 2048
    transfers = LateTransfers()
    with LiveBytes() as live:
        staging = PinnedUploader(CPU, chunk_bytes=chunk, pin=False, transfers=transfers)
        loaded = []
        for _, tensor in load_weights(source, dtype, CPU, staging=staging):
            loaded.append(tensor)
        transfers.started.clear()
        parameters = sum(tensor.nbytes for tensor in loaded)
        assert live.peak == parameters + buffers * chunk
        assert max(tensor.nbytes for tensor in loaded) > 10 * chunk
        del staging, tensor
        loaded.clear()
        gc.collect()
        assert live.now == 0


def test_staged_progress_is_the_same(source):
    calls: list[list[tuple[int, int]]] = [[], []]
    for index, staging in enumerate(
        (None, PinnedUploader(CPU, pin=False, transfers=LateTransfers()))
    ):
        report = calls[index].append
        for _ in load_weights(
            source, torch.float32, CPU, lambda *now, report=report: report(now), staging
        ):
            pass
    assert calls[0] == calls[1]
    assert calls[0][-1][0] == calls[0][-1][1] > 0


def test_loading_that_is_given_up_waits_for_nothing(source):
    """Whoever counts the progress may raise, and the checkpoint is closed."""
    transfers = LateTransfers()
    staging = PinnedUploader(CPU, chunk_bytes=4096, pin=False, transfers=transfers)

    def give_up(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(load_weights(source, torch.float32, CPU, give_up, staging))
    assert 0 < transfers.done <= len(transfers.started)


def test_unknown_architecture(source):
    with pytest.raises(ModelLoadError, match="Qwen3ForCausalLM"):
        find_architecture(replace(source, architecture="GPT2LMHeadModel"))
    with pytest.raises(ModelLoadError, match="qk_norm"):
        find_architecture(replace(source, qk_norm=False))
