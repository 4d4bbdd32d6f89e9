"""Platforms without some features of Linux."""

from __future__ import annotations

import builtins
import ctypes
import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncllm.cli import main
from asyncllm.gpu import cache_sizing, threads

WITHOUT = {
    "darwin": (("sched_getaffinity",), ("_winapi", "msvcrt")),
    "win32": (
        ("sched_getaffinity", "sysconf", "getloadavg"),
        ("termios", "readline", "fcntl", "resource", "pwd", "grp"),
    ),
}
AVAILABLE = 40 * 2**20


class Kernel32:
    def GlobalMemoryStatusEx(self, status):
        length = ctypes.c_uint32.from_buffer(status).value
        assert length == ctypes.sizeof(status) == 64
        status[1], status[2] = 8 * AVAILABLE, AVAILABLE
        return 1


@pytest.fixture(params=WITHOUT)
def system(request, monkeypatch):
    """Another system, as far as the package can tell."""
    attributes, modules = WITHOUT[request.param]
    for name in attributes:
        monkeypatch.delattr(os, name)
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in sys.modules if name.startswith("asyncllm.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    read_text = Path.read_text

    def without_kernel_files(path, *args, **kwargs):
        if path.parts[:2] in (("/", "proc"), ("/", "sys")):
            raise FileNotFoundError(path)
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", without_kernel_files)
    monkeypatch.setattr(threads, "sys", SimpleNamespace(platform=request.param))
    if request.param == "win32":
        windll = SimpleNamespace(kernel32=Kernel32())
        monkeypatch.setattr(ctypes, "windll", windll, raising=False)
    return request.param


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("demo", "--streams", "2", "--max-tokens", "4"), "2 streams, "),
        (("bench", "--concurrency", "1", "--output-len", "2"), "streams  tok/s"),
        (("chat", "--max-tokens", "4"), "\n"),
    ],
)
def test_every_command_runs(system, command, shown, monkeypatch, capsys, small_bandwidth_probe):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello!\n"))
    assert main(command) == 0
    captured = capsys.readouterr()
    assert shown in captured.out
    assert captured.err == ""


def test_a_prompt_on_a_terminal(system, monkeypatch):
    """Nothing is marked for a readline that is not there, and echo stays where it is."""
    from asyncllm.cli.prompt_line import read_message, without_echo

    prompts = []
    monkeypatch.setattr(builtins, "input", lambda prompt: prompts.append(prompt) or "Hello!")
    assert read_message("› ") == "Hello!"
    if system == "win32":
        assert prompts == ["› "]
        with without_echo():
            pass


def test_memory_that_is_available(system):
    if system == "win32":
        assert cache_sizing.available_memory() == AVAILABLE
        assert cache_sizing.cpu_cache_bytes() == AVAILABLE // 4
    else:
        half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        assert cache_sizing.available_memory() == half


def test_threads_that_cannot_be_limited_are_refused(system, capsys):
    assert main(["chat", "--num-threads", "1"]) == 2
    assert capsys.readouterr().err.startswith("asyncllm: num_threads=1: ")
