"""Launch shapes, the check of the toolchain, and what importing the ops costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncllm.errors import EngineError
from asyncllm.gpu.ops.triton import toolchain
from asyncllm.gpu.ops.triton.tuning import (
    cdiv,
    decode_tiles,
    next_power_of_2,
    num_splits,
    prefill_tiles,
    wave_utilisation,
)


@pytest.mark.parametrize(
    ("batch", "kv_heads", "max_len", "sms", "splits"),
    [
        (1, 8, 256, 132, 1),
        (1, 8, 257, 132, 2),
        (1, 8, 32768, 132, 60),
        (24, 8, 32768, 132, 5),
        (64, 8, 32768, 132, 1),
        (66, 8, 32768, 132, 1),
        (512, 8, 131072, 132, 1),
        (1, 1, 0, 132, 1),
    ],
)
def test_num_splits(batch: int, kv_heads: int, max_len: int, sms: int, splits: int) -> None:
    assert num_splits(batch, kv_heads, max_len, sms) == splits


@pytest.mark.parametrize("num_sms", [108, 132])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_waves_are_nearly_as_full_as_they_can_be(kv_heads: int, num_sms: int) -> None:
    """For every batch size, where sequences are long enough to be shared."""
    places = 4 * num_sms
    for batch in range(1, 513):
        programs = batch * kv_heads
        splits = num_splits(batch, kv_heads, 2**20, num_sms)
        assert splits <= max(8, cdiv(places, programs))
        share = wave_utilisation(programs * splits, places)
        assert share >= 0.72, (batch, splits, share)
        better = [n for n in range(1, splits) if wave_utilisation(programs * n, places) >= share]
        assert not better, (batch, splits, better)


def test_a_last_wave_of_a_few_programs_is_avoided() -> None:
    """8 key/value heads on 132 multiprocessors, four programs on each: rounding the number of
    splits up left half of the last wave's places idle at these batch sizes."""
    shares = {batch: wave_utilisation(batch * 8 * num_splits(batch, 8, 32768, 132), 528)
              for batch in (4, 8, 16, 24, 40, 48, 72, 80, 96, 136, 160)}  # fmt: skip
    assert min(shares.values()) > 0.88, shares


def test_tiles_are_found_for_every_gpu_from_ampere_on() -> None:
    for capability in (80, 86, 87, 89, 90, 100, 103, 120, 121):
        for head_dim in (32, 64, 80, 96, 128, 192, 256, 258, 320, 512):
            for size in (2, 4):
                assert decode_tiles(capability, head_dim, size).rows == 16
                assert prefill_tiles(capability, head_dim, size).keys >= 16
    with pytest.raises(ValueError, match=r"7\.5"):
        decode_tiles(75, 64)
    with pytest.raises(ValueError, match="at most 512"):
        prefill_tiles(90, 514)


def test_consumer_blackwell_has_the_shared_memory_of_ada() -> None:
    """12.0 has 99 KiB per program, not the 227 of 10.0."""
    for head_dim in (64, 128, 256, 512):
        assert prefill_tiles(120, head_dim) == prefill_tiles(89, head_dim)
        assert decode_tiles(120, head_dim) == decode_tiles(89, head_dim)


def test_whole_numbers() -> None:
    assert [next_power_of_2(n) for n in (1, 2, 3, 16, 17)] == [1, 2, 4, 16, 32]
    assert [cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_a_missing_compiler_or_header_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(EngineError, match=r"CC='/nowhere/cc' is not found"):
        toolchain.check_triton()
    monkeypatch.delenv("CC")
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    with pytest.raises(EngineError, match="neither gcc nor clang is on the PATH: install gcc"):
        toolchain.check_triton()
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(toolchain, "_python_header", lambda: Path(__file__))
    toolchain.check_triton()
    monkeypatch.setattr(toolchain, "_python_header", lambda: Path("/nowhere/Python.h"))
    with pytest.raises(EngineError, match=r"/nowhere/Python\.h is not there: install"):
        toolchain.check_triton()


def test_a_cache_folder_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(toolchain, "_python_header", lambda: Path(__file__))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new" / "folder"))
    toolchain.check_triton()
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "folder"))
    with pytest.raises(EngineError, match=r"file/folder'.*cannot be written.*set .*CACHE_DIR"):
        toolchain.check_triton()


def test_a_missing_or_old_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(EngineError, match="cannot be imported"):
        toolchain.check_triton()
    old = type(sys)("triton")
    old.__version__ = "3.5.1"  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "triton", old)
    with pytest.raises(EngineError, match=r"3\.5\.1 is too old"):
        toolchain.check_triton()


def test_importing_the_ops_does_not_import_triton() -> None:
    modules = "registry, torch_ops, gumbel, triton.tuning, triton.toolchain"
    code = "; ".join(f"import asyncllm.gpu.ops.{name}" for name in modules.split(", "))
    check = "import sys; assert 'triton' not in sys.modules, 'triton was imported'"
    subprocess.run([sys.executable, "-c", f"{code}; {check}"], check=True)
