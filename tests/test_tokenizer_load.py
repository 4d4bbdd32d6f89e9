"""Tokenizers loaded beside the weights, and errors of either."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncllm import ModelLoadError
from asyncllm.gpu import build
from asyncllm.runtime.tokenizer_load import TokenizerLoad
from asyncllm.text.tokenizer import Tokenizer
from tests.checkpoints import copy_tokenizer, make_checkpoint
from tests.model_load import load, reading_thread

SECONDS = 20.0
READ = Tokenizer.from_directory


class Progress:
    """Counts the reports of loading; the second one may be awaited."""

    def __init__(self, at_first: Callable[[], None] = lambda: None) -> None:
        self.calls: list[tuple[int, int]] = []
        self.at_first = at_first
        self.moved = threading.Event()

    def __call__(self, done: int, total: int, stage: str = "weights") -> None:
        self.calls.append((done, total))
        if len(self.calls) == 1:
            self.at_first()
        else:
            self.moved.set()


def patch(monkeypatch: pytest.MonkeyPatch, read: Callable[..., Tokenizer]) -> None:
    monkeypatch.setattr(Tokenizer, "from_directory", read)


def wait_for_the_reading_thread() -> None:
    thread = reading_thread()
    if thread is not None:
        thread.join(SECONDS)


def test_weights_are_loaded_while_the_tokenizer_is_read(monkeypatch):
    progress, threads = Progress(), []

    def read(path: Path, **options: Any) -> Tokenizer:
        threads.append(threading.current_thread())
        assert progress.moved.wait(SECONDS)
        return READ(path, **options)

    patch(monkeypatch, read)
    loaded = load(progress)
    try:
        assert [thread.name for thread in threads] == ["asyncllm-tokenizer-load"]
        assert not threads[0].is_alive()
        assert loaded.tokenizer.vocab_size == loaded.model_config.vocab_size
        assert loaded.tokenizer.chat_template.sources
        assert loaded.chat_syntaxes is not None
    finally:
        loaded.executor.close()


def test_loading_ends_where_the_tokenizer_is_damaged(monkeypatch):
    def read(path: Path, **options: Any) -> Tokenizer:
        raise ModelLoadError("damaged")

    patch(monkeypatch, read)
    # Its thread has failed when the second tensor is reported.
    progress = Progress(wait_for_the_reading_thread)
    with pytest.raises(ModelLoadError, match=r"^damaged$"):
        load(progress)
    (done, total), *rest = progress.calls
    assert done < total
    assert not rest
    assert reading_thread() is None


def test_executor_is_closed_when_tokenizer_fails(monkeypatch):
    built, may_fail = [], threading.Event()

    def read(path: Path, **options: Any) -> Tokenizer:
        assert may_fail.wait(SECONDS)
        raise ModelLoadError("damaged")

    make = build.build_model_runner

    def build_and_tell(*args: Any, **named: Any) -> Any:
        built.append(make(*args, **named))
        may_fail.set()
        return built[0]

    patch(monkeypatch, read)
    monkeypatch.setattr(build, "build_model_runner", build_and_tell)
    with pytest.raises(ModelLoadError, match=r"^damaged$"):
        load()
    with pytest.raises(RuntimeError, match="closed"):
        built[0].collect()
    assert reading_thread() is None


@pytest.mark.parametrize("damaged", [False, True])
def test_weights_that_fail_leave_no_thread(monkeypatch, damaged):
    """The tokenizer's error is the one that is reported of two."""
    failed = threading.Event()

    def read(path: Path, **options: Any) -> Tokenizer:
        assert failed.wait(SECONDS)
        if damaged:
            raise ModelLoadError("damaged")
        return READ(path, **options)

    def fail() -> None:
        failed.set()
        raise ModelLoadError("no such tensor")

    patch(monkeypatch, read)
    with pytest.raises(ModelLoadError, match="^damaged$" if damaged else "^no such tensor$"):
        load(Progress(fail))
    assert reading_thread() is None


def test_configuration_is_refused_before_other_reads(monkeypatch):
    begun = []
    monkeypatch.setattr(TokenizerLoad, "begin", lambda self: begun.append(self))
    with pytest.raises(Exception, match="quantization"):
        load(quantization="int8", attention_backend="torch")
    assert not begun


def test_transformers_is_imported_by_one_thread(monkeypatch, tmp_path):
    make_checkpoint(tmp_path, "LlamaForCausalLM", num_hidden_layers=1)
    copy_tokenizer(tmp_path)
    threads = []

    def read(path: Path, **options: Any) -> Tokenizer:
        threads.append(threading.current_thread())
        return READ(path, **options)

    patch(monkeypatch, read)
    load(model=tmp_path, model_impl="transformers").executor.close()
    load(model=tmp_path, model_impl="native").executor.close()
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threads[0]


def test_cached_reads_are_not_repeated():
    reads = []
    text = TokenizerLoad(lambda: reads.append(1) or len(reads))
    assert text.result() == 1
    text.begin()
    assert text.result() == 1
    begun = TokenizerLoad(lambda: reads.append(1) or len(reads))
    begun.begin()
    assert begun.result() == 2
    begun.begin()
    assert begun.result() == 2
