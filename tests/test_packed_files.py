"""Files of packed weights: writing, reading, damage and sharing."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import hashlib
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncllm import AsyncLLMEngine, EngineConfig, EngineError, InvalidRequestError
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.checkpoint.weights_identity import WeightsIdentity
from asyncllm.cli import main
from asyncllm.gpu import calibration
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.ops.native_linear import NativeLinear
from asyncllm.gpu.ops.native_weights import (
    pack_new_weights,
    quantise_int4_native,
    quantise_int8_native,
)
from asyncllm.gpu.packed import packed_folder, packed_store
from asyncllm.gpu.packed.packed_file import (
    TENSOR_ALIGNMENT_BYTES,
    PackedFile,
    PackedFileError,
    PackedWeightRecorder,
    write_packed_file,
)
from asyncllm.gpu.packed.packed_folder import PACKED_FILE_SUFFIX, PackedFolder
from asyncllm.gpu.packed.packed_store import PackedStore, cache_folder
from asyncllm.native.context import NativeContext, PackedWeights
from tests.checkpoints import copy_tokenizer, make_checkpoint
from tests.driver import Driver
from tests.families import make
from tests.gguf_files import write_gguf
from tests.native_library import ISAS, context, each_isa, needs_native
from tests.packing import CASES, repack

pytestmark = needs_native

ME = {os.geteuid()} if hasattr(os, "geteuid") else set()
PROMPTS = [3], list(range(40)), [7] * 9


@pytest.fixture(autouse=True)
def _small_models_have_files(monkeypatch: pytest.MonkeyPatch, small_bandwidth_probe: None) -> None:
    monkeypatch.setattr(packed_store, "is_small_model", lambda model: False)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    make_checkpoint(path, "Qwen3ForCausalLM", head_dim=32, num_hidden_layers=2)
    return path


@pytest.fixture
def model(plain: Path, tmp_path: Path) -> Path:
    """A copy of its own for a test that changes it."""
    return Path(shutil.copytree(plain, tmp_path / "model"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "packed"


def settings(folder: Path, **others: Any) -> EngineConfig:
    values = {
        "device": "cpu", "attention_backend": "native", "num_blocks": 32, "num_threads": 1,
        "async_scheduling": False, "max_num_batched_tokens": 64, "packed_cache_dir": folder,
        "packed_cache": "shared", "dtype": "float32",
    }  # fmt: skip
    return EngineConfig(**values | others)


def start(path: Path, config: EngineConfig) -> tuple[list[Any], str]:
    """Tokens and log-probabilities of some prompts, and where the weights came from."""
    runner = build_model_runner(config, ModelConfig.from_directory(path))
    state = runner.report().packed_weights
    driver = Driver(runner)
    sequences = [driver.add(prompt, 6) for prompt in PROMPTS]
    driver.run(sequences)
    found = [(each.outputs, each.logprobs) for each in sequences]
    runner.close()
    return found, state


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{PACKED_FILE_SUFFIX}"))


def only_file(folder: Path) -> Path:
    (found,) = files(folder)
    return found


def bytes_at(address: int, count: int) -> bytes:
    return ctypes.string_at(address, count)


# --- what is in a file -----------------------------------------------------------------


def forms(own: NativeContext) -> dict[str, LinearWeights]:
    """Weights of every form, with sizes that fill no panel."""
    random = torch.Generator().manual_seed(0)
    values = torch.randn(150, 200, generator=random)
    bias = torch.randn(150, generator=random)
    eight = quantise_int8_native(own, LinearWeights(values))
    codes = torch.randint(-127, 128, (150, 200), generator=random, dtype=torch.int8)
    groups = torch.rand(150, 7, generator=random)
    return {
        "float32": LinearWeights(values, bias),
        "bfloat16": LinearWeights(values.bfloat16()),
        "float16": LinearWeights(values.half(), bias.half()),
        "int8": eight,
        "int4": quantise_int4_native(own, LinearWeights(values, bias)),
        "uint8 in groups": LinearWeights(
            codes, scheme="int8", scales=groups, scale_block=(1, 32),
            zeros=codes[:, :7].contiguous(),
        ),
        "int4, no zeros": LinearWeights(
            (codes[:, :100].int() + 128).to(torch.uint8), scheme="int4",
            scales=groups.half(), scale_block=(1, 32),
            zeros=torch.full((150, 7), 8, dtype=torch.uint8),
        ),
    }  # fmt: skip


def write(
    path: Path,
    own: NativeContext,
    tensors: list[tuple[str, Tensor | PackedWeightRecorder]],
    key: Any = "key",
) -> Path:
    with path.open("w+b") as file:
        path.chmod(0o600)
        size = write_packed_file(file.fileno(), own, key, {"model": 7}, tensors)
    assert size == path.stat().st_size
    return path


@each_isa
def test_a_file_has_the_bytes_of_fresh_packing(tmp_path, isa):
    own = context(2, isa)
    found, recorded = {}, []
    for name, weights in forms(own).items():
        recorder = PackedWeightRecorder()
        found[name] = recorder.pack(own, weights)
        recorded.append((name, recorder))
    norm = torch.arange(11, dtype=torch.bfloat16)
    table = torch.arange(30.0).view(5, 6)
    recorded[2:2] = [("norm", norm), ("table", table)]
    file = PackedFile(write(tmp_path / "file", own, recorded), ME)
    file.verify(own)
    assert (file.key, file.checkpoint_checksums) == ("key", {"model": 7})
    read: dict[str, Any] = dict(file.weights())
    assert list(read) == [name for name, _ in recorded]
    assert torch.equal(read["norm"], norm)
    assert torch.equal(read["table"], table)
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(1))
    for name, weights in forms(own).items():
        stored = read[name]
        assert stored.spec == weights.spec
        assert stored.num_bytes == weights.num_bytes
        assert stored.values.dtype == weights.values.dtype
        fresh = NativeLinear(own, weights)
        linear = NativeLinear(own, replace(stored, bias=weights.bias))
        one, two = fresh.weights, linear.weights
        assert one.num_bytes == two.num_bytes
        assert two.address % TENSOR_ALIGNMENT_BYTES == 0
        assert file.address <= two.address < file.address + file.size
        # Again, by weights that no recorder has seen.
        assert bytes_at(one.address, one.num_bytes) == bytes_at(two.address, two.num_bytes)
        own_x = x.to(linear.dtype or torch.float32)
        assert torch.equal(fresh(own_x), linear(own_x)), name


LAYOUTS = {
    "avx512-1": "d82b8c63feeea9fc",
    "avx2-1": "7ede49ae9aa3b095",
    "baseline-1": "e568b392f15a5f5f",
}
"""Digests of the packed bytes of ``forms``."""


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa in ("avx512", "avx2", "baseline")])
def test_layout_version_matches_packed_bytes(isa):
    """Fails if packed bytes change and ``LAYOUT`` in kernels.h does not: then raise it, and put the
    new digests into LAYOUTS."""
    own, digest = context(1, isa), hashlib.blake2b(digest_size=8)
    for weights in forms(own).values():
        packed = pack_new_weights(own, weights)
        digest.update(bytes_at(packed.address, packed.num_bytes))
    assert {own.weights_layout: digest.hexdigest()}.items() <= LAYOUTS.items()


def test_weights_outlive_the_name_of_their_file(tmp_path):
    """The mapping belongs to what reads it: neither unlinking nor the file object's end matter."""
    own, recorder = context(), PackedWeightRecorder()
    weights = LinearWeights(torch.randn(64, 64))
    fresh = recorder.pack(own, weights)
    path = write(tmp_path / "file", own, [("w", recorder), ("norm", torch.ones(3))])
    file = PackedFile(path, ME)
    read: dict[str, Any] = dict(file.weights())
    linear, norm = NativeLinear(own, read["w"]), read["norm"]
    path.unlink()
    del file, read
    found = linear.weights
    assert bytes_at(found.address, found.num_bytes) == bytes_at(fresh.address, fresh.num_bytes)
    assert norm.tolist() == [1.0, 1.0, 1.0]


def test_a_view_refuses_memory_of_another_size_or_alignment():
    own = context()
    packed = pack_new_weights(own, LinearWeights(torch.randn(64, 64)))
    address, count, form = packed.address, packed.num_bytes, packed.form
    assert PackedWeights.view(own, form, address, count, None, packed).num_bytes == count
    for wrong in ((address, count - 64), (address, count + 64), (address + 4, count)):
        with pytest.raises(MemoryError, match="64 x 64 cannot be packed"):
            PackedWeights.view(own, form, *wrong, None, packed)


def test_a_checksum_changes_with_every_byte_and_their_order():
    own = context(2)
    data = bytearray(random.Random(0).randbytes(600_001))
    buffer = (ctypes.c_char * len(data)).from_buffer(data)

    def checksum(count: int = len(data)) -> int:
        return own.checksums(ctypes.addressof(buffer), [(0, count)])[0]

    whole, seen = checksum(), set()
    for index in [*range(0, len(data), 9973), 2**18 - 1, 2**18, len(data) - 1]:
        data[index] ^= 1
        seen.add(checksum())
        data[index] ^= 1
    assert len(seen) == len({*range(0, len(data), 9973), 2**18 - 1, 2**18, len(data) - 1})
    assert whole not in seen
    assert checksum() == whole == context(1).checksums(ctypes.addressof(buffer), [(0, 600_001)])[0]
    assert len({checksum(count) for count in (0, 1, 7, 8, 9, 600_000)}) == 6
    # Chunks that change places.
    data[: 2**18], data[2**18 : 2**19] = data[2**18 : 2**19], data[: 2**18]
    assert checksum() != whole


# --- what a start makes of it ----------------------------------------------------------

KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "float32": ("Qwen3", {}, {}),
    "bfloat16, tied": ("Qwen3", {"tie_word_embeddings": True}, {"dtype": "bfloat16"}),
    "biases": ("Qwen2", {}, {}),
    "int8, tied": ("Qwen3", {"tie_word_embeddings": True}, {"quantization": "int8"}),
    "int4": ("Qwen2", {}, {"quantization": "int4", "dtype": "bfloat16"}),
    "experts": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        {"quantization": "int4"},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_from_the_file_gives_the_same_bits(tmp_path, folder, kind):
    architecture, sizes, own = KINDS[kind]
    path = tmp_path / "model"
    make_checkpoint(path, f"{architecture}ForCausalLM", num_hidden_layers=2, **sizes)
    expected, without = start(path, settings(folder, packed_cache="off", **own))
    assert without == 'packed_cache="off"'
    assert not folder.exists()
    first, state = start(path, settings(folder, **own))
    assert state == f"read from {only_file(folder)}"
    second, again = start(path, settings(folder, packed_cache="auto", **own))
    assert again == state
    assert first == second == expected


OTHER_PARAMETERS = "Qwen3_5", "GptOss", "Glm4"
PACKED = "awq", "gptq", "gptq-v2-8", "ct-int", "ct-pack-4-zeros"


def gguf(plain: Path, path: Path) -> Path:
    path.mkdir()
    write_gguf(path / "model.gguf", plain, load_file(plain / "model.safetensors"), "Q8_0")
    return path / "model.gguf"


SAVED: dict[str, Callable[[Path, Path], Any]] = {
    # Convolutions and rates of states; fused experts; rows that are put into another order.
    **{name: lambda plain, path, name=name: make(path, name) for name in OTHER_PARAMETERS},
    "GGUF": gguf,
    **{name: lambda plain, path, name=name: repack(plain, path, CASES[name]) for name in PACKED},
}
"""What saves a checkpoint, given a plain one and a path, and may return another path."""


@pytest.mark.parametrize("name", SAVED)
def test_other_checkpoints_give_the_same_bits(plain, tmp_path, folder, name):
    saved = SAVED[name](plain, tmp_path / "model")
    path = saved if isinstance(saved, Path) else tmp_path / "model"
    expected, _ = start(path, settings(folder, packed_cache="off"))
    start(path, settings(folder))
    found, state = start(path, settings(folder))
    assert state == f"read from {only_file(folder)}"
    assert found == expected


def test_memory_of_a_step_counts_as_before(plain, folder):
    """The report's floor reads ``weight_bytes``, which the file's placeholders have to give."""
    model = ModelConfig.from_directory(plain)
    runners = [
        build_model_runner(settings(folder, packed_cache=cache, quantization="int4"), model)
        for cache in ("off", "shared", "auto")
    ]
    assert len({runner.report().weight_bytes for runner in runners}) == 1
    assert runners[0].report().weight_bytes > 10_000
    for runner in runners:
        runner.close()


def test_auto_writes_after_the_start(plain, folder):
    config = settings(folder, packed_cache="auto")
    runner = build_model_runner(config, ModelConfig.from_directory(plain))
    wait_for(lambda: "written to" in runner.report().packed_weights)
    path = only_file(folder)
    assert runner.report().packed_weights == f"packed at this start, and written to {path}"
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == [path]
    runner.close()
    assert start(plain, config)[1] == f"read from {path}"


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_engine_that_ends_leaves_no_part_of_a_file(plain, folder, monkeypatch):
    runner = build_model_runner(
        settings(folder, packed_cache="off"), ModelConfig.from_directory(plain)
    )
    runner.close()
    stores = []
    write = PackedStore.write_in_background
    monkeypatch.setattr(
        PackedStore, "write_in_background", lambda self, sidecars: stores.append(self)
    )
    runner = build_model_runner(
        settings(folder, packed_cache="auto"), ModelConfig.from_directory(plain)
    )
    runner.close()
    (store,) = stores
    write(store, {})
    store._writer.join()
    assert store.state.endswith("the engine ended before the file was written")
    assert list(folder.iterdir()) == []


def test_packed_weights_are_refused_or_explained(plain, folder):
    for given, reason in (
        ({"attention_backend": "torch"}, "only native ops on a CPU pack weights"),
        ({"load_format": "dummy"}, "random weights have no file"),
    ):
        assert start(plain, settings(folder, packed_cache="auto", **given))[1] == reason
        with pytest.raises(InvalidRequestError, match=f"packed_cache.*{reason}"):
            start(plain, settings(folder, **given))
    assert not folder.exists()


def test_a_small_model_has_no_file(plain, folder, monkeypatch):
    monkeypatch.undo()
    _, state = start(plain, settings(folder))
    assert state.endswith("a model of less than 32 million parameters gains nothing")
    assert not folder.exists()


def test_the_folder_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(EngineConfig()) == tmp_path / "asyncllm" / "packed"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder(EngineConfig()) == Path("/home/somebody/.cache/asyncllm/packed")
    assert cache_folder(EngineConfig(packed_cache_dir=tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"packed_cache": "on"}, "packed_cache.*auto.*shared.*off"),
        ({"packed_cache_dir": 5}, "packed_cache_dir.*a directory or None"),
        ({"packed_cache_size": "much"}, "packed_cache_size.*bytes"),
        ({"packed_cache_size": 0}, "packed_cache_size"),
    ],
)
def test_settings_have_bounds(given, message):
    with pytest.raises(InvalidRequestError, match=message):
        EngineConfig(**given)
    assert EngineConfig(packed_cache_size="1GiB").packed_cache_size == 2**30


# --- whose weights a file has ----------------------------------------------------------


def store_of(path: Path, folder: Path, own: NativeContext, **others: Any) -> PackedStore:
    config = settings(folder, **others)
    dtype = getattr(torch, config.dtype)
    return PackedStore(config, ModelConfig.from_directory(path), own, dtype)


def test_a_name_tells_forms_layouts_and_versions_apart(plain, folder, monkeypatch):
    own = context(1, ISAS[0])
    names = {store_of(plain, folder, own).path.name}
    assert names == {store_of(plain, folder, context(2, ISAS[0])).path.name}

    def add(**others: Any) -> None:
        name = store_of(plain, folder, own, **others).path.name
        assert name not in names
        names.add(name)

    add(dtype="bfloat16")
    add(quantization="int8")
    add(quantization="int4")
    with monkeypatch.context() as patch:
        patch.setattr(NativeContext, "weights_layout", property(lambda self: f"{self.isa}-2"))
        add()
    for name in ("VERSION", "FORMAT_VERSION"):
        with monkeypatch.context() as patch:
            patch.setattr(packed_store, name, "another")
            add()
    if len(ISAS) > 1:
        assert store_of(plain, folder, context(1, ISAS[1])).path.name not in names


def test_a_name_tells_checkpoints_apart(model, folder, tmp_path):
    own, weights = context(), model / "model.safetensors"
    names = [store_of(model, folder, own).path.name]

    def differs() -> None:
        names.append(store_of(model, folder, own).path.name)
        assert len(set(names)) == len(names)

    status = weights.stat()
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns - 1))  # A clock that goes back.
    differs()
    # Another file of the same size and modification time.
    status = weights.stat()
    shutil.copy(weights, tmp_path / "copy")
    os.replace(tmp_path / "copy", weights)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    differs()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"read_by": "nobody yet"}))
    differs()
    moved = model.rename(tmp_path / "moved")
    names.append(store_of(moved, folder, own).path.name)
    assert len(set(names)) == len(names)


def test_packed_name_depends_on_weights_alone(model, folder):
    own = context()
    name = store_of(model, folder, own).path.name
    (model / "generation_config.json").write_text('{"temperature": 0.3, "eos_token_id": 9}')
    assert store_of(model, folder, own).path.name == name


def test_the_hubs_own_hash_is_an_identity(model, tmp_path):
    """The hub's cache links to files that are named by their content: times do not matter there."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    blob = blobs / ("ab" * 32)
    (model / "model.safetensors").rename(blob)
    (model / "model.safetensors").symlink_to(blob)
    found = WeightsIdentity.of(model)
    assert found.files == (
        {"name": "model.safetensors", "size": blob.stat().st_size, "hash": "ab" * 32},
    )
    os.utime(blob, ns=(5, 5))
    assert WeightsIdentity.of(model) == found
    (model / "model.safetensors").unlink()
    blob.rename(blobs / ("ac" * 32))
    (model / "model.safetensors").symlink_to(blobs / ("ac" * 32))
    assert WeightsIdentity.of(model) != found


def test_checkpoint_replaced_while_read_is_not_written(model, folder, monkeypatch):
    original = PackedStore._record_weights

    def replaced(self: PackedStore, weights: Any) -> Any:
        yield from original(self, weights)
        os.utime(model / "model.safetensors", ns=(7, 7))

    monkeypatch.setattr(PackedStore, "_record_weights", replaced)
    runner = build_model_runner(
        settings(folder, packed_cache="auto"), ModelConfig.from_directory(model)
    )
    wait_for(lambda: "not written" in runner.report().packed_weights)
    assert "was changed while it was loaded" in runner.report().packed_weights
    runner.close()
    assert files(folder) == []


# --- files that cannot be used ---------------------------------------------------------


def damage(path: Path, kind: str) -> None:
    content = bytearray(path.read_bytes())
    size = len(content)
    if kind == "cut":
        content = content[: size // 2]
    elif kind == "empty":
        content = bytearray()
    elif kind == "longer":
        content += b"\0"
    elif kind == "preamble":
        content[3] ^= 1
    elif kind == "format":
        content[8] ^= 2
    elif kind == "header":
        content[-9] ^= 4
    elif kind == "digest":
        content[45] ^= 4
    elif kind == "first tensor":
        content[70] ^= 1
    elif kind == "a byte":
        content[size // 3] ^= 128
    path.write_bytes(content)


DAMAGES = ("cut", "empty", "longer", "preamble", "format", "header", "digest", "first tensor",
           "a byte")  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_a_miss_and_written_anew(plain, folder, caplog, kind):
    expected, _ = start(plain, settings(folder))
    path = only_file(folder)
    whole = path.read_bytes()
    damage(path, kind)
    (folder / f"{path.stem}.verified.json").unlink(missing_ok=True)
    with caplog.at_level(logging.WARNING, "asyncllm"):
        found, state = start(plain, settings(folder))
    assert found == expected
    assert state == f"read from {path}"
    assert path.read_bytes() == whole
    lines = [each.getMessage() for each in caplog.records if "packed weights" in each.getMessage()]
    assert len(lines) == 1
    assert lines[0].endswith("; they are packed anew")


def test_another_models_file_is_a_miss(plain, folder, tmp_path, caplog):
    """Equal names and sizes: only the key in the header says whose weights these are."""
    other = tmp_path / "other"
    make_checkpoint(other, "Qwen3ForCausalLM", head_dim=32, num_hidden_layers=2, seed=1)
    expected, _ = start(plain, settings(folder))
    path = only_file(folder)
    start(other, settings(tmp_path / "elsewhere"))
    theirs = only_file(tmp_path / "elsewhere")
    assert theirs.stat().st_size - path.stat().st_size in range(-200, 200)
    shutil.copy(theirs, path)
    found, _ = start(plain, settings(folder))
    assert found == expected
    assert "has the weights of another model or form" in caplog.text


@pytest.mark.parametrize("kind", ["mode", "user", "link", "fifo", "folder"])
def test_files_writable_by_other_users_are_not_read(tmp_path, kind):
    own = context()
    path = write(tmp_path / "file", own, [("norm", torch.ones(3))])
    PackedFile(path, ME)
    owners = ME
    if kind == "mode":
        path.chmod(0o620)
    elif kind == "user":
        owners = {max(ME) + 1}
    else:
        path.rename(tmp_path / "moved")
        if kind == "link":
            path.symlink_to(tmp_path / "moved")
        elif kind == "fifo":
            os.mkfifo(path, 0o600)
        else:
            path.mkdir(0o700)
    with pytest.raises(PackedFileError, match=r"belongs to user|cannot be opened|no regular file"):
        PackedFile(path, owners)


def test_another_users_folder_is_not_used(plain, folder):
    folder.mkdir()
    folder.chmod(0o777)
    expected, _ = start(plain, settings(folder, packed_cache="off"))
    found, state = start(plain, settings(folder))
    assert found == expected
    assert "expected a folder that only user" in state
    assert list(folder.iterdir()) == []


# --- the disk --------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["reserve", "write", "sync", "rename", "folder"])
def test_a_disk_that_fails_costs_the_file_alone(plain, folder, monkeypatch, where):
    expected, _ = start(plain, settings(folder, packed_cache="off"))

    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    if where == "folder":
        folder.write_text("no folder")
    else:
        names = {"reserve": "posix_fallocate", "write": "pwrite", "sync": "fsync"}
        monkeypatch.setattr(os, names.get(where, "rename"), full)
    found, state = start(plain, settings(folder))
    monkeypatch.undo()
    assert found == expected
    assert state.startswith("packed at this start, and not written: ")
    assert where == "folder" or list(folder.iterdir()) == []


def test_a_folder_that_vanishes_costs_the_file_alone(plain, folder, monkeypatch):
    monkeypatch.setattr(PackedFolder, "make", lambda self: None)
    _, state = start(plain, settings(folder))
    assert state.startswith("packed at this start, and not written: [Errno 2]")


def test_file_appears_after_it_is_on_disk(tmp_path, monkeypatch):
    """What a reader would see at each call that the disk gets."""
    folder, own = PackedFolder(tmp_path / "folder", 10**9), context()
    folder.make()
    path, seen = folder.path / f"x{PACKED_FILE_SUFFIX}", []
    recorder = PackedWeightRecorder()
    recorder.pack(own, LinearWeights(torch.randn(64, 64)))

    def look(name: str) -> Any:
        original = getattr(os, name)

        def called(*arguments: Any) -> Any:
            seen.append((name, path.exists()))
            return original(*arguments)

        return called

    for name in ("pwrite", "fsync", "rename"):
        monkeypatch.setattr(os, name, look(name))
    with folder.lock(None):
        folder.write(
            path.name, lambda opened: write_packed_file(opened, own, 1, {}, [("w", recorder)])
        )
    names = [name for name, _ in seen]
    # The preamble is the last that is written, between two syncs; then comes the name.
    assert names[-5:] == ["fsync", "pwrite", "fsync", "rename", "fsync"]
    assert {exists for _, exists in seen[:-1]} == {False}
    PackedFile(path, ME).verify(own)


def test_the_least_recently_used_files_go(tmp_path):
    folder = PackedFolder(tmp_path / "folder", 3500)
    folder.make()

    def add(name: str, size: int = 1000) -> None:
        with folder.lock(None):
            folder.make_room(size)
            folder.write(name + PACKED_FILE_SUFFIX, lambda opened: os.write(opened, bytes(size)))
        os.utime(folder.path / (name + PACKED_FILE_SUFFIX), ns=(len(added), 0))
        added.append(name)

    added: list[str] = []
    for name in "abc":
        add(name)
    (folder.path / "b.calibration-1.json").write_text("{}")
    folder.mark_used("a" + PACKED_FILE_SUFFIX)
    used = (folder.path / ("a" + PACKED_FILE_SUFFIX)).stat()
    assert abs(used.st_atime - time.time()) < 60
    assert used.st_mtime_ns == 0
    (folder.path / "b.panels-tmp").write_text("a dead process's")
    add("d")
    assert {each.name for each in folder.path.iterdir()} == {
        f"{name}{PACKED_FILE_SUFFIX}" for name in "acd"
    }
    with pytest.raises(OSError, match="3501 bytes are more than packed_cache_size=3500"):
        folder.make_room(3501)
    add("e", 3500)
    assert {each.name for each in folder.path.iterdir()} == {"e" + PACKED_FILE_SUFFIX}


def test_the_disk_is_not_filled(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_folder, "MIN_FREE_DISK_SHARE", 1.0)
    folder = PackedFolder(tmp_path, 10**9)
    with pytest.raises(OSError, match="would leave less than 100% of the disk free"):
        folder.make_room(10)


def test_two_starts_at_once_write_one_file(plain, folder):
    expected, _ = start(plain, settings(folder, packed_cache="off"))
    found: list[Any] = []
    starts = [
        threading.Thread(target=lambda: found.append(start(plain, settings(folder))))
        for _ in range(2)
    ]
    for each in starts:
        each.start()
    for each in starts:
        each.join()
    assert found == [(expected, f"read from {only_file(folder)}")] * 2


@pytest.mark.parametrize("rounds", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_a_writer_that_is_killed_leaves_whole_files(folder, rounds):
    command = [sys.executable, "-m", "tests.packed_writer", str(folder), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Some were killed in the middle of a file.
    assert int(done.stdout) > rounds // 20


# --- shared ----------------------------------------------------------------------------


def test_shared_verifies_a_file_once_for_each_boot(plain, folder, monkeypatch):
    verified: list[Path] = []
    original = PackedFile.verify

    def verify(self: PackedFile, own: NativeContext) -> None:
        verified.append(self.path)
        original(self, own)

    monkeypatch.setattr(PackedFile, "verify", verify)
    start(plain, settings(folder))
    path = only_file(folder)
    assert verified == [path]
    start(plain, settings(folder))
    assert verified == [path]
    start(plain, settings(folder, packed_cache="auto"))
    assert verified == [path] * 2
    monkeypatch.setattr(packed_store, "_boot_id", lambda: "another")
    start(plain, settings(folder))
    assert verified == [path] * 3
    os.utime(path, ns=(0, 0))
    start(plain, settings(folder))
    assert verified == [path] * 4


PRIVATE = """
import sys, pathlib, re
from asyncllm.gpu.packed.packed_file import PackedFile
from asyncllm.native.context import NativeContext
from asyncllm.native.shared_library import Library
file = PackedFile(pathlib.Path(sys.argv[1]), {int(sys.argv[2])})
file.verify(NativeContext(Library(), 1))
kept = list(file.weights())
maps = pathlib.Path("/proc/self/smaps").read_text()
head = r"^[0-9a-f-]+ \\S+ \\S+ \\S+ \\S+ +" + re.escape(sys.argv[1])
own = re.search(head + r"\\n(?:\\w+:.*\\n)+", maps, re.M)[0]
amount = lambda name: int(re.search(name + r": +(\\d+) kB", own)[1])
print(amount("Rss"), amount("Private_Clean") + amount("Private_Dirty"))
"""


def test_a_second_process_has_no_copy_of_its_own(tmp_path):
    own = context()
    path = write(tmp_path / "file", own, [("table", torch.ones(1 << 22))])
    file = PackedFile(path, ME)
    file.verify(own)
    done = subprocess.run(
        [sys.executable, "-c", PRIVATE, str(path), str(*ME)], capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    resident, private = map(int, done.stdout.split())
    assert resident >= 16 << 10
    assert private <= resident // 20


# --- calibration -----------------------------------------------------------------------


def test_a_calibration_is_kept_for_its_settings(plain, folder, monkeypatch):
    timed: list[int] = []

    def time_prefill(runner: Any, count: int) -> float:
        timed.append(count)
        return 0.001 * count

    monkeypatch.setattr(calibration, "time_prefill", time_prefill)
    monkeypatch.setattr(calibration, "cpu_wait_seconds", lambda: 0.0)
    model = ModelConfig.from_directory(plain)

    def budget(**others: Any) -> int:
        timed.clear()
        config = settings(
            folder, max_num_batched_tokens="auto", async_scheduling=None, num_blocks=600, **others
        )
        runner = build_model_runner(config, model)
        store: Any = runner._packed_store
        if store._writer is not None:
            store._writer.join()
        found = runner.info
        runner.close()
        return found.max_num_batched_tokens

    assert budget() == 192
    assert timed
    assert budget() == 192
    assert timed == []
    assert budget(max_num_seqs=3) == 192
    assert timed
    (kept, _) = sorted(folder.glob("*.calibration-*.json"), key=lambda path: path.stat().st_mtime)
    kept.write_text('{"token_budget": 96, "min_async_tokens": null}')
    assert budget() == 96
    for broken in ("", "[]", '{"token_budget": 96}', '{"token_budget": -1, "min_async_tokens": 1}',
                   '{"token_budget": true, "min_async_tokens": 1}'):  # fmt: skip
        kept.write_text(broken)
        assert budget() == 192, broken
    kept.unlink()
    # The calibration of a machine that was busy.
    waits = iter(range(1000))
    monkeypatch.setattr(calibration, "cpu_wait_seconds", lambda: next(waits))
    assert budget() == 192
    assert not kept.exists()


# --- beside a model --------------------------------------------------------------------


def test_a_packed_image_is_found_by_the_content(model, folder, tmp_path, capsys, caplog):
    expected, _ = start(model, settings(folder, packed_cache="off"))
    assert main(["pack", str(model), "--dtype", "float32", "--num-threads", "1"]) == 0
    path = only_file(model)
    assert capsys.readouterr().out.startswith(f"{path}: ")
    weights = model / "model.safetensors"
    assert path.stat().st_mode & 0o777 == 0o600 | weights.stat().st_mode & 0o044
    # An image has the files with other times, inodes and paths.
    image = Path(shutil.copytree(model, tmp_path / "image", copy_function=shutil.copyfile))
    found, state = start(image, settings(folder, packed_cache="auto"))
    assert found == expected
    assert state == f"read from {image / path.name}"
    assert not folder.exists()
    # Another model's weights of equal names and sizes.
    make_checkpoint(
        tmp_path / "other", "Qwen3ForCausalLM", head_dim=32, num_hidden_layers=2, seed=1
    )
    other = tmp_path / "other" / "model.safetensors"
    assert other.stat().st_size == weights.stat().st_size
    shutil.copyfile(other, image / "model.safetensors")
    theirs, _ = start(image, settings(folder, packed_cache="off"))
    assert theirs != expected
    found, state = start(image, settings(folder))
    assert found == theirs
    assert state == f"read from {only_file(folder)}"
    assert "was made of other weights than the model's" in caplog.text


def test_pack_reports_unwritable_weights(model, monkeypatch, capsys):
    def full(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert main(["pack", str(model)]) == 1
    assert "cannot be written ([Errno 30] Read-only file system)" in capsys.readouterr().err
    assert files(model) == []
    monkeypatch.undo()
    assert main(["pack", str(model)]) == 1
    assert "less than 32 million parameters" in capsys.readouterr().err


def test_an_engine_says_where_its_weights_come_from(model, folder):
    copy_tokenizer(model)

    async def state() -> tuple[list[int], str]:
        config = settings(folder, max_model_len=64)
        async with AsyncLLMEngine(str(model), config=config) as engine:
            out = await engine.generate([1, 2, 3], max_tokens=4, temperature=0, ignore_eos=True)
            report = await engine.execution_report()
        return list(out.outputs[0].token_ids), report.packed_weights

    first, second = asyncio.run(state()), asyncio.run(state())
    assert first == second
    assert first[1] == f"read from {only_file(folder)}"


def test_missing_checkpoint_is_a_checkpoint_error(model, folder):
    config = ModelConfig.from_directory(model)
    (model / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"model\.safetensors"):
        build_model_runner(settings(folder), config)


def test_unsearchable_folder_costs_only_the_file(model, folder, monkeypatch):
    exists = Path.exists

    def refused(path: Path) -> bool:
        if folder in path.parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return exists(path)

    expected, _ = start(model, settings(folder, packed_cache="off"))
    monkeypatch.setattr(Path, "exists", refused)
    found, state = start(model, settings(folder))
    assert found == expected
    assert state.startswith("packed at this start")


def test_a_forked_child_does_not_keep_the_lock(folder):
    shared = PackedFolder(folder, 10**9)
    shared.make()
    with shared.lock(None):
        child = os.fork()
        if not child:
            time.sleep(30)
            os._exit(0)
    try:
        with PackedFolder(folder, 10**9).lock(None):
            pass
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_wait_for_the_lock_ends_when_it_is_asked_to(folder):
    one, other = PackedFolder(folder, 10**9), PackedFolder(folder, 10**9)
    one.make()
    looks = []

    def check() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise InterruptedError

    with one.lock(None), pytest.raises(InterruptedError), other.lock(check):
        pass
    assert len(looks) == 3


def test_non_files_do_not_stop_the_others(folder):
    shared = PackedFolder(folder, 1000)
    shared.make()
    (folder / f"a{PACKED_FILE_SUFFIX}").mkdir()
    (folder / "b.panels-tmp").mkdir()
    (folder / f"c{PACKED_FILE_SUFFIX}").symlink_to(folder / "nowhere")
    with shared.lock(None):
        shared.make_room(1000)
        shared.write(f"d{PACKED_FILE_SUFFIX}", lambda opened: os.write(opened, bytes(1000)))
    assert (folder / f"d{PACKED_FILE_SUFFIX}").stat().st_size == 1000


@pytest.mark.parametrize("budget", [10**12, int("9" * 30), 2049])
def test_a_calibration_beyond_its_range_is_a_miss(budget):
    assert (
        calibration.Calibration.from_json({"token_budget": budget, "min_async_tokens": 1}) is None
    )
    assert (
        calibration.Calibration.from_json({"token_budget": 64, "min_async_tokens": None})
        is not None
    )
