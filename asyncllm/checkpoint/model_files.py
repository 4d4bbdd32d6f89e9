"""Model files: finds them in the package, in a directory, or on the hub."""

from __future__ import annotations

import importlib.resources
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict, Unpack

from asyncllm.checkpoint.config_file import ConfigFile
from asyncllm.checkpoint.gguf_file import gguf_parts
from asyncllm.checkpoint.progress import Progress
from asyncllm.errors import ModelLoadError
from asyncllm.validation import explain

_INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
GGUF_SUFFIX = ".gguf"
_CONFIG_PATTERNS = ("config.json", "generation_config.json")
_WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")
_TOKENIZER_PATTERNS = tuple(
    "tokenizer* special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt "
    "*.tiktoken chat_template* additional_chat_templates/*.jinja tokenization_*.py".split()
)
# Files that the patterns above would also match, because "*" matches slashes too: a second copy of
# the weights, and folders with the weights in other formats.
_IGNORED_PATTERNS = ("consolidated*.safetensors", "*/*.safetensors", "*.bin", "*.pth", "*.pt")
_TOKENIZER_FILES = tuple(
    "tokenizer.json tokenizer.model tokenizer_config.json vocab.json vocab.txt".split()
)


class HubOptions(TypedDict, total=False):
    """Options of a download from the hub.

    Attributes:
        progress: callback that reports received bytes; no progress bar is printed.
        endpoint: address of the hub; huggingface_hub's default if absent.
        cache_dir: directory for downloads; huggingface_hub's default if absent. If the hub cannot
            be reached, the cached revision is used.
    """

    progress: Progress | None
    endpoint: str
    cache_dir: Path


def resolve_model(
    model: str | os.PathLike[str] | None,
    revision: str | None = None,
    *,
    weights: bool = True,
    code: bool = False,
    **hub: Unpack[HubOptions],
) -> Path:
    """Find a model's directory or GGUF file, and download it if needed.

    Blocks on files and the network, so it must not run on an event loop's thread.

    Args:
        model: one of

            - a directory, with safetensors or one GGUF file;
            - a GGUF file;
            - a hub id ("Qwen/Qwen3-0.6B");
            - None for the model in the package.

            A ``str`` is a path if it begins with ".", "/" or "~", has more than one separator, or
            names a file.
        revision: branch, tag or commit; for hub ids only.
        weights: fetch and require safetensors; False for a model with random weights.
        code: fetch Python files as well.

    Raises:
        ModelLoadError: if no usable model is found; ``__cause__`` is the hub's error, if any.
    """
    patterns = _CONFIG_PATTERNS + _TOKENIZER_PATTERNS + (_WEIGHT_PATTERNS if weights else ())
    patterns += ("*.py",) if code else ()
    with _lookup_errors(model):
        if model is None:
            directory = _bundled_model()
            _refuse_revision("the model in the package", revision)
        else:
            directory = _resolve_location(model, revision, patterns, hub)
        directory = _find_gguf_file(directory, directory / _SINGLE_FILE, directory / _INDEX_FILE)
        if directory.suffix == GGUF_SUFFIX:
            return directory
        if not (directory / "config.json").is_file():
            raise ModelLoadError(
                f"{directory}: config.json is missing; {_describe_contents(directory)}"
            )
        if weights:
            weight_files(directory)
        return directory


def resolve_tokenizer(
    tokenizer: str | os.PathLike[str], revision: str | None = None, **hub: Unpack[HubOptions]
) -> Path:
    """Find a tokenizer's directory or GGUF file; arguments and errors as for ``resolve_model``."""
    # If tokenizer.json is missing, transformers reads the tokenizer's class from config.json.
    patterns = ("config.json", *_TOKENIZER_PATTERNS)
    with _lookup_errors(tokenizer):
        directory = _resolve_location(tokenizer, revision, patterns, hub)
        directory = _find_gguf_file(directory, *(directory / name for name in _TOKENIZER_FILES))
        if directory.suffix == GGUF_SUFFIX:
            return directory
        if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
            raise ModelLoadError(
                f"{directory}: holds no tokenizer, expected tokenizer.json; "
                f"{_describe_contents(directory)}"
            )
        return directory


@contextmanager
def _lookup_errors(location: str | os.PathLike[str] | None) -> Iterator[None]:
    """Convert OSErrors to ModelLoadError. An unreadable folder, or a name that is too long, must
    not be treated as a missing one."""
    try:
        yield
    except OSError as error:
        raise ModelLoadError(
            f"{location!s:.300}: cannot be read ({error.strerror or error})"
        ) from error


def _find_gguf_file(directory: Path, *preferred_files: Path) -> Path:
    """The GGUF file in ``directory``, or its first part if it is split; ``directory`` itself if any
    of ``preferred_files`` exists.

    Raises:
        ModelLoadError: if the directory has several GGUF files, or parts of one are missing.
    """
    if directory.suffix == GGUF_SUFFIX:
        return gguf_parts(directory)[0]
    if any(file.is_file() for file in preferred_files):
        return directory
    files = sorted(directory.glob(f"*{GGUF_SUFFIX}"))
    found = list(dict.fromkeys(gguf_parts(file)[0] for file in files))
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:8])
        raise ModelLoadError(f"{directory}: has several GGUF files, name one of them: {names}")
    return found[0] if found else directory


def _resolve_location(
    location: str | os.PathLike[str],
    revision: str | None,
    patterns: tuple[str, ...],
    hub: HubOptions,
) -> Path:
    path = Path(location).expanduser()
    is_gguf = path.suffix == GGUF_SUFFIX and path.is_file()
    if is_gguf or (str(location) and path.is_dir()):
        _refuse_revision(str(path), revision)
        return path
    if isinstance(location, os.PathLike) or _looks_like_a_path(location):
        what = "is a file" if path.is_file() else "does not exist"
        raise ModelLoadError(f"{location!s}: {what}, expected a directory, a GGUF file or a hub id")
    return _download(location, revision, patterns, hub)


def _looks_like_a_path(location: str) -> bool:
    separators = location.count(os.sep)
    return location.startswith((".", os.sep, "~")) or separators > 1 or os.path.isfile(location)


def _refuse_revision(where: str, revision: str | None) -> None:
    if revision is not None:
        raise ModelLoadError(
            f"revision={revision!r}: {where} has no revisions; a revision goes with a hub id"
        )


def _bundled_model() -> Path:
    directory = Path(str(importlib.resources.files("asyncllm") / "demo_model"))
    if not directory.is_dir():
        raise ModelLoadError(
            f"{directory}: the package's own model is not there; it needs the package unpacked "
            "on disk, as pip installs it. Name a model instead."
        )
    return directory


def _describe_contents(directory: Path) -> str:
    names = sorted(entry.name for entry in directory.iterdir())
    if not names:
        return "the directory is empty"
    return "found " + ", ".join(names[:8]) + (", …" if len(names) > 8 else "")


def weight_files(directory: Path) -> list[Path]:
    """List a checkpoint's safetensors files: those in its index, or ``model.safetensors``.

    Raises:
        ModelLoadError: if a file is missing, or the index is damaged.
    """
    index = directory / _INDEX_FILE
    if not index.is_file():
        single = directory / _SINGLE_FILE
        if not single.is_file():
            raise ModelLoadError(
                f"{directory}: neither {_SINGLE_FILE} nor {_INDEX_FILE}, the only weight format "
                f"that is read; {_describe_contents(directory)}"
            )
        return [single]
    config = ConfigFile.read(index)
    shards = sorted({str(shard) for shard in config.section("weight_map").values.values()})
    missing = [s for s in shards if Path(s).name != s or not (directory / s).is_file()]
    if missing:
        raise ModelLoadError(
            f"{index}: {len(missing)} of {len(shards)} files in weight_map are missing: "
            + ", ".join(missing[:3])
            + (", …" if len(missing) > 3 else "")
        )
    if not shards:
        raise config.invalid_field("weight_map", "the file of each tensor")
    return [directory / shard for shard in shards]


def _download(model: str, revision: str | None, patterns: tuple[str, ...], hub: HubOptions) -> Path:
    from huggingface_hub import snapshot_download

    try:
        directory = snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(_IGNORED_PATTERNS),
            cache_dir=hub.get("cache_dir"),
            endpoint=hub.get("endpoint"),
            tqdm_class=_make_quiet_bar(hub.get("progress")),
            library_name="asyncllm",
        )
    # huggingface_hub also raises the errors of its HTTP library, which have no common base class.
    except Exception as error:
        raise ModelLoadError(_explain_download_error(model, revision, error)) from error
    return Path(directory)


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
        reason = f"the download failed ({explain(error)})"
    return f"model={model!r}{at}: {reason}"


def _make_quiet_bar(progress: Progress | None) -> type[Any]:
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
            if progress is not None and self.counts_bytes:
                furthest = max(bars, key=lambda bar: bar.n)
                progress(int(furthest.n), int(furthest.total or 0))
            return None

    # tqdm's default lock is a multiprocessing lock, which may start a resource-tracker process.
    QuietBar.set_lock(threading.RLock())
    return QuietBar
