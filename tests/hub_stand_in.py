"""HubStandIn: a stand-in for the hub on 127.0.0.1."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

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


class HubStandIn(ThreadingHTTPServer):
    """The part of the hub's protocol that fetching a snapshot needs.

    Attributes:
        repositories: files by name, by repository; others have ``files_of``.
        cuts: number of answers with weights that end after half of their bytes.
        missing_bytes: number of bytes that the weights lack, of those that the hub says they have.
        hold: until it is set, no answer gets beyond half of its weights.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.revisions = {"main": MAIN, "v1": TAGGED}
        self.requests: list[str] = []
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.cuts = 0
        self.missing_bytes = 0
        self.hold = threading.Event()
        self.hold.set()

    def files(self, model: str, commit: str) -> dict[str, bytes]:
        return self.repositories.get(model) or files_of(commit)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: HubStandIn  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._api("/".join(parts[2:4]), parts[4:] or ["revision", "main"])
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
        files = self.server.files(model, commit)
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
        if commit is None or name not in self.server.files(model, commit):
            return self._fail(404, "EntryNotFound")
        data = self.server.files(model, commit)[name]
        headers = {"ETag": f'"{_sha1(data)}"', "X-Repo-Commit": commit}
        if self.command == "HEAD" or not name.endswith((".gguf", ".safetensors")):
            return self._send(data, headers)
        return self._send_weights(data[: len(data) - self.server.missing_bytes], headers)

    def _send_weights(self, data: bytes, headers: dict[str, str]) -> None:
        begin, status = 0, 200
        if wanted := self.headers.get("Range"):
            begin, status = int(wanted.removeprefix("bytes=").rstrip("-")), 206
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            self.server.requests.append(f"RANGE {begin}")
        self.command = "HEAD"
        self._send(data[begin:], headers, status)
        half = (begin + len(data)) // 2
        self.wfile.write(data[begin:half])
        if self.server.cuts:
            self.server.cuts -= 1
            self.close_connection = True
            return
        self.server.hold.wait(30)
        self.wfile.write(data[half:])

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


def serve_hub() -> Iterator[HubStandIn]:
    """The stand-in, until the generator is closed; a fixture's function."""
    server = HubStandIn()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
