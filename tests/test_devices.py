"""Choice of the device, and errors of unusable ones."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from asyncllm.errors import EngineError
from asyncllm.gpu.devices import resolve_device

NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and "
    "installed a driver from http://www.nvidia.com/Download/index.aspx"
)
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11070). Please update your GPU "
    "driver"
)
FORKED = "Cannot re-initialize CUDA in forked subprocess."


@dataclass
class Machine:
    """A machine by what CUDA says of it. Asking for devices before the start is a mistake."""

    is_built: bool = True
    failure: Exception | None = None
    gpus: list[tuple[str, tuple[int, int]]] = field(
        default_factory=lambda: [("H200", (9, 0)), ("A100", (8, 0)), ("T4", (7, 5))]
    )
    selected: int = 0
    started: bool = False

    def init(self) -> None:
        assert self.is_built
        if self.failure is not None:
            raise self.failure
        self.started = True

    def device_count(self) -> int:
        assert self.started
        return len(self.gpus)

    def current_device(self) -> int:
        assert self.started
        return self.selected

    def get_device_capability(self, index: int) -> tuple[int, int]:
        assert self.started
        return self.gpus[index][1]

    def get_device_name(self, index: int) -> str:
        assert self.started
        return self.gpus[index][0]


def resolve(name: str, machine: Any) -> torch.device:
    is_built = getattr(machine, "is_built", torch.backends.cuda.is_built())
    with mock.patch("torch.backends.cuda.is_built", return_value=is_built):
        return resolve_device(name, machine)


def refused(machine: Any, name: str = "cuda") -> EngineError:
    with pytest.raises(EngineError) as caught:
        resolve(name, machine)
    message = str(caught.value)
    assert f"device={name!r}" in message
    assert 'device="cpu"' in message
    return caught.value


@pytest.mark.parametrize(
    ("name", "selected", "expected"),
    [
        ("cuda", 0, "cuda:0"),
        ("cuda", 1, "cuda:1"),
        ("auto", 1, "cuda:1"),
        ("cuda:1", 0, "cuda:1"),
        ("cpu", 0, "cpu"),
    ],
)
def test_a_usable_device_comes_with_its_index(name, selected, expected, caplog):
    assert resolve(name, Machine(selected=selected)) == torch.device(expected)
    assert not caplog.records


def test_the_cpu_is_taken_without_a_look_at_cuda():
    machine = Machine(failure=RuntimeError(TOO_OLD))
    assert resolve("cpu", machine) == torch.device("cpu")
    assert not machine.started


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (Machine(is_built=False), [torch.__version__, "built without CUDA"]),
        (Machine(failure=RuntimeError(NO_DRIVER)), ["Found no NVIDIA driver"]),
        (Machine(failure=RuntimeError("No CUDA GPUs are available")), ["No CUDA GPUs"]),
        (Machine(failure=RuntimeError(TOO_OLD)), ["too old (found version 11070)"]),
        (Machine(failure=RuntimeError(FORKED)), ["forked subprocess"]),
    ],
)
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_failed_cuda_start_has_torchs_reason(name, machine, words):
    error = refused(machine, name)
    for word in words:
        assert word in str(error)
    assert error.__cause__ is machine.failure


def test_an_index_out_of_range_says_how_many_there_are():
    assert "there are 3 CUDA devices" in str(refused(Machine(), "cuda:3"))


def test_an_old_gpu_is_refused_with_both_capabilities():
    message = str(refused(Machine(), "cuda:2"))
    for word in ("T4", "7.5", "8.0"):
        assert word in message


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (Machine(is_built=False), []),
        (Machine(failure=RuntimeError(NO_DRIVER)), []),
        (Machine(failure=RuntimeError("No CUDA GPUs are available")), []),
        (Machine(failure=RuntimeError(TOO_OLD)), ["found version 11070"]),
        (Machine(failure=RuntimeError(FORKED)), ["forked subprocess"]),
        (Machine(failure=RuntimeError("CUDA unknown error")), ["CUDA unknown error"]),
        (Machine(selected=2), ["T4 has compute capability 7.5"]),
    ],
)
def test_auto_warns_of_a_gpu_that_it_cannot_use(machine, words, caplog):
    with caplog.at_level(logging.DEBUG):
        assert resolve("auto", machine) == torch.device("cpu")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * len(words)
    assert all(word in caplog.text for word in words)


def test_other_cuda_errors_are_not_swallowed():
    with pytest.raises(KeyError):
        resolve("auto", Machine(failure=KeyError("a mistake")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_torch_itself_gives_the_reason_here(caplog):
    """With a build of torch for CUDA this takes torch's own text through the same path."""
    error = refused(torch.cuda)
    if torch.backends.cuda.is_built():
        assert isinstance(error.__cause__, RuntimeError)
        assert str(error.__cause__) in str(error)
    else:
        assert "built without CUDA" in str(error)
    assert resolve("auto", torch.cuda) == torch.device("cpu")
