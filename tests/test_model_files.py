"""Finding a model's files, with a stand-in for the hub on 127.0.0.1."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from asyncllm.checkpoint.model_files import resolve_model, resolve_tokenizer
from asyncllm.errors import ModelLoadError

MAIN = "1" * 40
TAGGED = "2" * 40
WEIGHTS = b"\x08\x00\x00\x00\x00\x00\x00\x00{}      " * 4096


def files_of(commit: str) -> dict[str, bytes]:
    return {
        "README.md": b"# model",
        "config.json": json.dumps({"commit": commit}).encode(),
        "generation_config.json": b"{ }",
        "model.safetensors": WEIGHTS,
        "consolidated.safetensors": WEIGHTS,
        "onnx/model.safetensors": WEIGHTS,
        "pytorch_model.bin": b"pickle",
        "original/consolidated.00.pth": b"pickle",
        "tokenizer.json": b'{"version": "1.0"}',
        "tokenizer_config.json": b"{}",
        "special_tokens_map.json": b"{  }",
        "chat_template.jinja": b"hello",
        "additional_chat_templates/tool_use.jinja": b"tools",
        "vocab.json": b"{   }",
        "merges.txt": b"#version: 0.2",
    }


UNWANTED = {
    "README.md",
    "consolidated.safetensors",
    "onnx/model.safetensors",
    "pytorch_model.bin",
    "original/consolidated.00.pth",
}
WANTED = files_of(MAIN).keys() - UNWANTED


class HubStandIn(ThreadingHTTPServer):
    """The part of the hub's protocol that fetching a snapshot needs."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.revisions = {"main": MAIN, "v1": TAGGED}
        self.requests: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: HubStandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4:])
        elif parts[2:3] == ["resolve"]:
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._fail(404, "EntryNotFound")

    do_HEAD = do_GET = _answer

    def _api(self, model: str, rest: list[str]) -> None:
        if model in ("org/absent", "org/private"):
            return self._fail(401 if model == "org/private" else 404, "RepoNotFound")
        if model == "org/broken":
            return self._fail(418, "Teapot")
        commit = self._commit(rest[1])
        if commit is None:
            return self._fail(404, "RevisionNotFound")
        files = files_of(commit)
        if rest[0] == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": _sha1(data)}
                for name, data in files.items()
            ]
            return self._send(json.dumps(entries).encode(), {})
        names = [{"rfilename": name} for name in files]
        info = {"id": model, "modelId": model, "sha": commit, "siblings": names}
        return self._send(json.dumps(info).encode(), {})

    def _file(self, model: str, revision: str, name: str) -> None:
        commit = self._commit(revision)
        if model == "org/gated":
            return self._fail(403, "GatedRepo")
        if commit is None or name not in files_of(commit):
            return self._fail(404, "EntryNotFound")
        data = files_of(commit)[name]
        return self._send(data, {"ETag": f'"{_sha1(data)}"', "X-Repo-Commit": commit})

    def _commit(self, revision: str) -> str | None:
        known = self.server.revisions
        return revision if revision in known.values() else known.get(revision)

    def _send(self, data: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def _fail(self, status: int, code: str) -> None:
        self._send(b"", {"X-Error-Code": code}, status)


def _sha1(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[HubStandIn]:
    server = HubStandIn()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


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
    before = set(threading.enumerate())
    path = resolve("org/model", progress=lambda done, total: seen.append((done, total)))
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
    assert relative_files(resolve("org/model", weights=False)) == WANTED - {"model.safetensors"}


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
    assert resolve_model(tmp_path, weights=False) == tmp_path
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
