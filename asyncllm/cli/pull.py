"""``asyncllm pull``: downloads a model's files before an engine needs them."""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

from asyncllm.cli.text import format_bytes, strip_control_characters

_POLL_SECONDS = 0.1


def run(arguments: argparse.Namespace) -> int:
    """Download the files of a model, and print their path."""
    download = _Download(arguments.model, arguments.revision)
    try:
        path = download.wait_with_progress()
    except BaseException:
        download.cancel()
        raise
    print(path)
    return 0


class _DownloadCancelled(Exception):
    """Exception that ends a cancelled download."""


class _Download:
    """Download of a model on a thread of its own. On the main thread, huggingface_hub would finish
    the current files before it obeys Ctrl-C."""

    def __init__(self, model: str, revision: str | None) -> None:
        self.model, self.revision = model, revision
        self.num_received, self.num_bytes = 0, 0
        self._is_cancelled = False
        self._result: Path | BaseException | None = None
        self._thread = threading.Thread(target=self._download, daemon=True)
        self._thread.start()

    def wait_with_progress(self) -> Path:
        """Show the progress until the download ends; returns the model's path."""
        if sys.stderr.isatty():
            self._show_bar()
        while self._thread.is_alive():
            self._thread.join(_POLL_SECONDS)
        if isinstance(self._result, Path):
            return self._result
        assert self._result is not None
        raise self._result

    def cancel(self) -> None:
        """Cancel the download at the next received bytes; wait for its end."""
        self._is_cancelled = True
        self._thread.join()

    def _download(self) -> None:
        from asyncllm.checkpoint.model_files import resolve_model

        try:
            self._result = resolve_model(
                self.model, self.revision, progress=self._on_progress, announce=self._on_size
            )
        except BaseException as error:
            self._result = error

    def _on_progress(self, done: int, total: int, stage: str = "download") -> None:
        if self._is_cancelled:
            raise _DownloadCancelled
        self.num_received = done

    def _on_size(self, size: int) -> None:
        self.num_bytes = size
        print(
            f"{strip_control_characters(self.model)}: {format_bytes(size)} to download",
            file=sys.stderr,
        )

    def _show_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

        columns = (DownloadColumn(), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=None)
            while self._thread.is_alive():
                bar.update(task, completed=self.num_received, total=self.num_bytes or None)
                self._thread.join(_POLL_SECONDS)
