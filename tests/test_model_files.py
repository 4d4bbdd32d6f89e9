"""Lookup and download of a model's files, on a stand-in for the hub."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from asyncllm.checkpoint.model_files import resolve_model, resolve_tokenizer
from asyncllm.errors import ModelLoadError
from tests.hub_stand_in import MAIN, TAGGED, WEIGHTS, HubStandIn, files_of, serve_hub

UNWANTED = {
    "README.md",
    "consolidated.safetensors",
    "onnx/model.safetensors",
    "pytorch_model.bin",
    "original/consolidated.00.pth",
}
WANTED = files_of(MAIN).keys() - UNWANTED

hub = pytest.fixture(serve_hub)


@pytest.fixture
def resolve(hub: HubStandIn, tmp_path: Path) -> Callable[..., Path]:
    """``resolve_model`` from the stand-in, with a cache of the test's."""
    return partial(resolve_model, endpoint=hub.endpoint, cache_dir=tmp_path)


@pytest.fixture
def unreachable() -> str:
    """An address without a listener."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def model_directory(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


def relative_files(path: Path) -> set[str]:
    return {str(f.relative_to(path)) for f in path.rglob("*") if f.is_file()}


def test_download(hub, resolve, capfd):
    seen: list[tuple[int, int]] = []
    stages: set[str] = set()

    def progress(done: int, total: int, stage: str = "weights") -> None:
        seen.append((done, total))
        stages.add(stage)

    before = set(threading.enumerate())
    path = resolve("org/model", progress=progress)
    assert stages == {"download"}
    assert relative_files(path) == WANTED
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert json.loads((path / "config.json").read_text()) == {"commit": MAIN}
    size = sum(len(data) for name, data in files_of(MAIN).items() if name in WANTED)
    assert max(done for done, _ in seen) == size
    assert seen[-1][1] == size
    fetched = [r for r in hub.requests if r.startswith("GET") and "/resolve/" in r]
    assert len(fetched) == len(WANTED)
    assert capfd.readouterr() == ("", "")
    left = {type(thread).__name__ for thread in set(threading.enumerate()) - before}
    assert left <= {"Thread"}  # the hub's own; no monitor of progress bars
    # A second time nothing is fetched.
    hub.requests.clear()
    assert resolve("org/model") == path
    assert not [r for r in hub.requests if r.startswith("GET") and "/resolve/" in r]


@pytest.mark.parametrize("revision", ["v1", TAGGED])
def test_revision(resolve, revision):
    path = resolve("org/model", revision)
    assert json.loads((path / "config.json").read_text()) == {"commit": TAGGED}


def test_offline_uses_the_cache(resolve, unreachable):
    with pytest.raises(ModelLoadError, match=r"org/model.* not in the cache") as caught:
        resolve("org/model", endpoint=unreachable)
    assert caught.value.__cause__ is not None
    assert resolve("org/model") == resolve("org/model", endpoint=unreachable)


def test_without_weights(resolve):
    assert relative_files(resolve("org/model", with_weights=False)) == WANTED - {
        "model.safetensors"
    }


def test_tokenizer_alone(hub, tmp_path):
    path = resolve_tokenizer("org/model", "v1", endpoint=hub.endpoint, cache_dir=tmp_path)
    assert relative_files(path) == WANTED - {"model.safetensors", "generation_config.json"}


@pytest.mark.parametrize(
    ("model", "revision", "message"),
    [
        ("org/absent", None, "no such model on the hub"),
        ("org/private", None, "HF_TOKEN"),
        ("org/gated", None, "accept its terms"),
        ("org/model", "v9", "no revision 'v9'"),
        ("org/broken", None, "418"),
        ("not a hub id!", None, "valid hub id"),
    ],
)
def test_hub_errors(resolve, model, revision, message):
    with pytest.raises(ModelLoadError) as caught:
        resolve(model, revision)
    assert message in str(caught.value)
    assert model in str(caught.value)
    assert caught.value.__cause__ is not None


def test_directory(tmp_path, monkeypatch):
    path = model_directory(tmp_path / "org" / "model")
    assert resolve_model(path) == path
    assert resolve_model(str(path)) == path
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/model") == Path("org/model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org/model") == path


@pytest.mark.parametrize("model", ["./absent", "/absent/model", "~/absent", "a/b/c", "", "file"])
def test_no_directory(hub, resolve, tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError):
        resolve(model)
    with pytest.raises(ModelLoadError, match="expected a directory"):
        resolve_model(Path("absent"))
    assert hub.requests == []


@pytest.mark.parametrize("resolved", [resolve_model, resolve_tokenizer])
@pytest.mark.parametrize("name", ["x" * 5000, "./" + "x" * 5000, "y/" * 3000])
def test_names_that_are_too_long_are_refused(resolved, name):
    with pytest.raises(ModelLoadError, match=r"cannot be read \(File name too long\)") as caught:
        resolved(name)
    assert str(caught.value).startswith(name[:200])
    assert len(str(caught.value)) < 400


def test_incomplete_directory(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json is missing; the directory is empty"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_text("")
    with pytest.raises(
        ModelLoadError, match=r"neither model\.safetensors nor .*pytorch_model\.bin"
    ):
        resolve_model(tmp_path)
    assert resolve_model(tmp_path, with_weights=False) == tmp_path
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"1 of 2 files .*missing: model-2\.safetensors"):
        resolve_model(tmp_path)
    (tmp_path / "model-2.safetensors").write_bytes(b"")
    assert resolve_model(tmp_path) == tmp_path
    with pytest.raises(ModelLoadError, match=r"expected tokenizer\.json; found config\.json"):
        resolve_tokenizer(tmp_path)


def test_revision_of_a_directory(tmp_path):
    path = model_directory(tmp_path)
    with pytest.raises(ModelLoadError, match="revision='main'"):
        resolve_model(path, "main")


def test_model_in_the_package(tmp_path, monkeypatch):
    import importlib.resources

    monkeypatch.setattr(importlib.resources, "files", lambda package: tmp_path / package)
    with pytest.raises(ModelLoadError, match="package's own model"):
        resolve_model(None)
    path = model_directory(tmp_path / "asyncllm" / "demo_model")
    assert resolve_model(None) == path
    with pytest.raises(ModelLoadError, match="revision"):
        resolve_model(None, "main")
