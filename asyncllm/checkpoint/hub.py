"""Hub: lists and downloads the files of a repository with huggingface_hub."""

from __future__ import annotations

import glob
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

from asyncllm.checkpoint.progress import ProgressCallback
from asyncllm.errors import ModelLoadError
from asyncllm.validation import describe_error

# Files to leave out although download patterns match them ("*" matches slashes too): a second copy
# of the weights, and weights in other formats.
_IGNORED_PATTERNS = ("consolidated*.safetensors", "*/*.safetensors", "*.bin", "*.pth", "*.pt")


class HubOptions(TypedDict, total=False):
    """Options of a download from the hub.

    Attributes:
        progress: callback that is told the number of received bytes, with the stage "download"; no
            progress bar is printed.
        announce: callback that gets the number of bytes to download, before the first of them. It
            is not called if the cache has all files, or the hub cannot be reached.
        endpoint: address of the hub; huggingface_hub's default if absent.
        cache_dir: directory for downloads; huggingface_hub's default if absent. If the hub cannot
            be reached, the cached revision is used.
    """

    progress: ProgressCallback | None
    announce: Callable[[int], None]
    endpoint: str
    cache_dir: Path


def list_files(model: str, revision: str | None, hub: HubOptions) -> list[str]:
    """List a repository's files, or its cached files when offline.

    Raises:
        ModelLoadError: if the model does not exist, or is neither reachable nor cached.
    """
    from huggingface_hub import HfApi, errors, snapshot_download

    with _converting_download_errors(model, revision):
        try:
            info = HfApi(endpoint=hub.get("endpoint"), library_name="asyncllm").model_info(
                model, revision=revision
            )
        except (
            errors.HFValidationError,
            errors.RepositoryNotFoundError,
            errors.RevisionNotFoundError,
        ):
            raise
        except Exception:  # huggingface_hub's HTTP errors have no common base class.
            # The empty pattern list requires no file, so an incomplete cache is accepted.
            cached = snapshot_download(
                model,
                revision=revision,
                cache_dir=hub.get("cache_dir"),
                local_files_only=True,
                allow_patterns=[],
            )
            return list_directory(Path(cached))
    return sorted(file.rfilename for file in info.siblings or ())


def list_directory(directory: Path) -> list[str]:
    """List all files below a directory, relative to that directory."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path.relative_to(directory).as_posix() for path in files)


def download_files(
    model: str, revision: str | None, names: Sequence[str], hub: HubOptions
) -> list[Path]:
    """Download some files of a repository and return their paths.

    Raises:
        ModelLoadError: if a file cannot be downloaded and is not in the cache.
    """
    directory = download(model, revision, tuple(map(glob.escape, names)), hub)
    paths = [directory / name for name in names]
    for path in paths:
        if not path.is_file():
            raise ModelLoadError(
                f"model={model!r}: {path.name} is not in the cache, and the hub cannot be reached"
            )
    return paths


def download(model: str, revision: str | None, patterns: tuple[str, ...], hub: HubOptions) -> Path:
    """Download the files of a repository that match ``patterns`` and return their directory.

    Raises:
        ModelLoadError: if the download fails. With the option ``announce`` in ``hub``, the free
            disk space is checked before the download begins, and too little is an error.
    """
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {
        "revision": revision,
        "allow_patterns": list(patterns),
        "ignore_patterns": list(_IGNORED_PATTERNS),
        "cache_dir": hub.get("cache_dir"),
        "endpoint": hub.get("endpoint"),
        "library_name": "asyncllm",
    }
    with _converting_download_errors(model, revision):
        if "announce" in hub:
            _announce_download_size(model, options, hub["announce"])
        progress = _make_quiet_bar(hub.get("progress"))
        return Path(snapshot_download(model, tqdm_class=progress, **options))


def _announce_download_size(
    model: str, options: dict[str, Any], announce: Callable[[int], None]
) -> None:
    """Pass a download's size to ``announce``; raise ModelLoadError if the disk has less space."""
    from huggingface_hub import constants, errors, snapshot_download

    try:
        files = snapshot_download(model, dry_run=True, tqdm_class=_make_quiet_bar(None), **options)
    except errors.DryRunError:  # The hub cannot be reached, so only cached files are available.
        return
    size = sum(file.file_size or 0 for file in files if file.will_download)
    if not size:
        return
    place = Path(options["cache_dir"] or constants.HF_HUB_CACHE).absolute()
    existing = next(folder for folder in (place, *place.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if size > free:
        raise ModelLoadError(
            f"model={model!r}: the download has {size} bytes, and {place} has {free} free; "
            "HF_HUB_CACHE names another folder"
        )
    announce(size)


@contextmanager
def _converting_download_errors(model: str, revision: str | None) -> Iterator[None]:
    """Convert every exception to ModelLoadError.

    huggingface_hub also raises exceptions of its HTTP library, which have no common base class.
    """
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(_explain_download_error(model, revision, error)) from error


def _explain_download_error(model: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import errors

    at = "" if revision is None else f" at revision {revision!r}"
    if isinstance(error, errors.HFValidationError):
        at, reason = "", f"neither a directory nor a valid hub id ({error})"
    elif isinstance(error, errors.GatedRepoError):
        reason = (
            "gated on the hub; accept its terms on its page, then set HF_TOKEN or run "
            "`hf auth login`"
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        at, reason = "", f"the hub has no revision {revision!r} of it"
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = (
            "no such directory here, and no such model on the hub or a private one (for which "
            "HF_TOKEN or `hf auth login` is needed)"
        )
    elif isinstance(error, errors.IncompleteSnapshotError):
        reason = f"only a part of it is in the cache ({error})"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        reason = (
            "not in the cache, and the hub cannot be reached or is switched off by "
            f"HF_HUB_OFFLINE. Pass a local directory instead. ({error})"
        )
    else:
        reason = f"the download failed ({describe_error(error)})"
    return f"model={model!r}{at}: {reason}"


def _make_quiet_bar(progress: ProgressCallback | None) -> type[Any]:
    """Make a tqdm class that prints nothing, starts no thread, and reports bytes to ``progress``.

    huggingface_hub counts bytes in several bars (received, written); the most advanced bar is
    reported.
    """
    from tqdm import tqdm

    bars: list[Any] = []

    class QuietBar(tqdm):
        monitor_interval = 0  # No monitor thread: tqdm's would outlive the download.

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **kwargs | {"disable": True})
            self.total = kwargs.get("total")
            if self.counts_bytes:
                bars.append(self)

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0  # A disabled tqdm bar does not update its count.
            self.refresh()
            return None

        def refresh(self, *args: Any, **kwargs: Any) -> None:
            # huggingface_hub also calls refresh() when it learns a file's size, before the first
            # bytes.
            if progress is not None and self.counts_bytes:
                furthest = max(bars, key=lambda bar: bar.n)
                if furthest.total:
                    progress(int(furthest.n), int(furthest.total), "download")

    # tqdm's default lock is a multiprocessing lock, which may start a resource-tracker process.
    QuietBar.set_lock(threading.RLock())
    return QuietBar
