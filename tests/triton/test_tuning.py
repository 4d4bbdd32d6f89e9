"""Launch shapes, the toolchain check, and import cost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncllm.errors import EngineError
from asyncllm.gpu.ops.triton import toolchain
from asyncllm.gpu.ops.triton.tuning import (
    cdiv,
    decode_tiles,
    num_splits,
    prefill_tiles,
    wave_utilisation,
)


@pytest.mark.parametrize(
    ("batch", "max_len", "splits"),
    [(1, 0, 1), (1, 256, 1), (1, 257, 2), (1, 32768, 60), (24, 32768, 5), (64, 32768, 1)],
)
def test_num_splits(batch: int, max_len: int, splits: int) -> None:
    assert num_splits(batch, 8, max_len, 132) == splits


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


def test_tiles_are_found_for_every_gpu_from_ampere_on() -> None:
    for capability in (80, 86, 87, 89, 90, 100, 103, 120, 121):
        for head_dim in (32, 64, 80, 96, 128, 192, 256, 258, 320, 512):
            for size in (2, 4):
                assert decode_tiles(capability, head_dim, size).rows == 16
                assert prefill_tiles(capability, head_dim, size).keys >= 16
    # Consumer Blackwell has 99 KiB per program, as Ada has.
    for head_dim in (64, 128, 256, 512):
        assert prefill_tiles(120, head_dim) == prefill_tiles(89, head_dim)
        assert decode_tiles(120, head_dim) == decode_tiles(89, head_dim)
    with pytest.raises(ValueError, match=r"7\.5"):
        decode_tiles(75, 64)
    with pytest.raises(ValueError, match="at most 512"):
        prefill_tiles(90, 514)


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler and Python's headers are there."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(toolchain, "_python_header", lambda: Path(__file__))
    monkeypatch.delenv("CC", raising=False)


@pytest.mark.usefixtures("complete")
def test_a_missing_compiler_or_header_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain.check_triton()
    monkeypatch.setattr(toolchain, "_python_header", lambda: Path("/nowhere/Python.h"))
    with pytest.raises(EngineError, match=r"/nowhere/Python\.h is not there: install"):
        toolchain.check_triton()
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    with pytest.raises(EngineError, match="neither gcc nor clang is on the PATH: install gcc"):
        toolchain.check_triton()
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(EngineError, match=r"CC='/nowhere/cc' is not found"):
        toolchain.check_triton()


@pytest.mark.usefixtures("complete")
def test_unwritable_cache_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
