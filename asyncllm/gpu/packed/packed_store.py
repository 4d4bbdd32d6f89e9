"""PackedStore: finds, reads and writes the packed weights of one engine."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.checkpoint.progress import ProgressCallback
from asyncllm.checkpoint.small_file import read_small_file
from asyncllm.checkpoint.weights_identity import WeightsIdentity
from asyncllm.config import EngineConfig
from asyncllm.errors import ModelLoadError
from asyncllm.gpu.models.architectures import is_small_model, parameters
from asyncllm.gpu.ops.linear_weights import LinearWeights
from asyncllm.gpu.packed.packed_file import (
    FORMAT_VERSION,
    PackedFile,
    PackedFileError,
    PackedWeightRecorder,
    write_packed_file,
)
from asyncllm.gpu.packed.packed_folder import PACKED_FILE_SUFFIX, PackedFolder
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.logger import get_logger
from asyncllm.native.context import NativeContext
from asyncllm.validation import value_error
from asyncllm.version import VERSION

logger = get_logger(__name__)

T = TypeVar("T")

Weights = Iterable[tuple[str, Tensor | LinearWeights]]

_CHUNK_BYTES = 2**23
_MAX_SIDECAR_BYTES = 2**16
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


class _WriteStoppedError(Exception):
    """Stops the writing of a packed file, because the engine has ended."""


class PackedStore:
    """Packed weights of an engine: read from a file, or packed and then written to one.

    Weights are looked up first in the cache folder, by the metadata of the checkpoint's files, then
    beside the model (``asyncllm pack``), by the checksum of the checkpoint's content. A file's name
    is a digest of its key, which identifies checkpoint, quantisation, layout, processor and
    version.

    Args:
        in_model_folder: write beside the model and not into the cache folder.

    Attributes:
        state: phrase for the log: where the weights come from, and why no file was used.
        num_threads: number of threads of the native ops.
        path: the file to write.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        context: NativeContext,
        dtype: torch.dtype,
        progress: ProgressCallback | None = None,
        *,
        in_model_folder: bool = False,
    ) -> None:
        self._model, self._config, self._context = model, config, context
        self.num_threads = context.num_threads
        self._in_model_folder, self._stopped = in_model_folder, threading.Event()
        self._progress = progress or (lambda *_: None)
        self._recorded_tensors: list[tuple[str, Tensor | PackedWeightRecorder]] = []
        self._writer: threading.Thread | None = None
        self._logged_lines: set[str] = set()
        self._write_failed = False
        self.state = "packed at this start"
        self._identity = WeightsIdentity.of(model.path)
        # Leave out the fields that affect no weight.
        weights_config = replace(model, path=Path(), generation_defaults=None, eos_token_ids=())
        form = {
            "version": VERSION,
            "format": FORMAT_VERSION,
            "kernels": context.functions.sources().decode(),
            "layout": context.weights_layout,
            "dtype": str(dtype),
            "quantization": config.quantization,
            "model": _digest(repr(weights_config)),
            "config": self._identity.config_digest,
        }
        self._cache_key = form | {"files": [*self._identity.files]}
        self._model_folder_key = form | {
            "files": [[*each] for each in self._identity.names_and_sizes]
        }
        is_file = model.path.is_file()
        self._model_folder = PackedFolder(
            model.path.parent if is_file else model.path,
            None,
            # Users who can read the model can also read the packed file beside the model.
            0o600 | (self._identity.paths[0].stat().st_mode & 0o044),
        )
        assert isinstance(config.packed_cache_size, int)  # EngineConfig makes it an int.
        self._cache = PackedFolder(cache_folder(config), config.packed_cache_size)
        self._folder = self._model_folder if in_model_folder else self._cache
        self._key = self._model_folder_key if in_model_folder else self._cache_key
        self.path = self._folder.path / _file_name(self._key)

    # --- reading -----------------------------------------------------------------------

    def build(
        self,
        read_checkpoint: Callable[[], Weights],
        build_model: Callable[[Weights, bool], T],
    ) -> T:
        """Build a model from its file, or from the checkpoint.

        With ``packed_cache="shared"`` a missing file is written first, and the model is then built
        from the file. Other processes wait until the file is written.

        Args:
            read_checkpoint: reads the checkpoint.
            build_model: builds the model. Its second argument is whether the weights are packed
                already, and so must not be quantised.
        """
        if self._in_model_folder:
            return build_model(self._record_weights(read_checkpoint()), False)
        file = self._open_verified_file()
        if file is None and self._config.packed_cache == "shared":
            try:
                self._cache.make()
                with self._cache.lock(self._check_start_cancelled):
                    file = self._open_verified_file()
                    if file is None:
                        build_model(self._record_weights(read_checkpoint()), False)
                        self._write_locked()
                        file = self._open_verified_file()
            except OSError as error:
                self._report_failed_write(error)
                self._write_failed = True
        if file is None:
            return build_model(self._record_weights(read_checkpoint()), False)
        model = build_model(file.weights(), True)
        self._progress(file.size, file.size)
        return model

    def _open_verified_file(self) -> PackedFile | None:
        """Open and verify the weights' file; None if it is missing, or unusable (logged)."""
        own_users = {os.geteuid()} if hasattr(os, "geteuid") else set()
        model_owners = own_users | {0, self._identity.paths[0].stat().st_uid}
        for folder, key, owners in (
            (self._cache, self._cache_key, own_users),
            (self._model_folder, self._model_folder_key, model_owners),
        ):
            path = folder.path / _file_name(key)
            try:
                if not path.exists():
                    continue
                file = PackedFile(path, owners)
                if file.key != key:
                    raise PackedFileError("has the weights of another model or form")
                # Report progress now: other threads then begin work that does not need the weights.
                self._progress(0, file.size)
                if (
                    folder is self._model_folder
                    and file.checkpoint_checksums != self._checkpoint_checksums(self._context)
                ):
                    raise PackedFileError("was made of other weights than the model's")
                self._verify(file)
            except (PackedFileError, OSError) as error:
                line = f"packed weights {path}: {error}; they are packed anew"
                # Log once: for a shared cache this method runs again, under the folder's lock.
                if line not in self._logged_lines:
                    logger.warning("%s", line)
                self._logged_lines.add(line)
                continue
            folder.mark_used(path.name)
            self.state = f"read from {path}"
            return file
        return None

    def _verify(self, file: PackedFile) -> None:
        """Verify all checksums; with ``packed_cache="shared"`` only once per file and boot."""
        if self._config.packed_cache != "shared":
            file.verify(self._context)
            return
        name = f"{_file_stem(self._cache_key)}.verified.json"
        stamp = {"boot": _boot_id(), "file": [*file.identity]}
        if stamp["boot"] and self.read_sidecar(name) == stamp:
            return
        file.verify(self._context)
        self._write_sidecar(name, stamp)

    # --- writing -----------------------------------------------------------------------

    def _record_weights(self, weights: Weights) -> Iterator[tuple[str, Tensor | LinearWeights]]:
        """Yield the weights and record them for the file."""
        self._recorded_tensors = []
        linear = {each.name for each in parameters(self._model) if each.is_linear}
        for name, value in weights:
            if name not in linear and isinstance(value, Tensor):
                self._recorded_tensors.append((name, value))
                yield name, value
                continue
            recorder = PackedWeightRecorder()
            self._recorded_tensors.append((name, recorder))
            whole = LinearWeights(value) if isinstance(value, Tensor) else value
            yield name, replace(whole, panels=recorder)

    def write(self) -> None:
        """Write the file now, unless the weights were read from a file or another process wrote
        it.

        Raises:
            OSError: the folder cannot be written.
            ModelLoadError: the checkpoint was changed meanwhile.
        """
        if self._recorded_tensors:
            if not self._in_model_folder:
                self._cache.make()
            with self._folder.lock(self._check_stopped):
                self._write_locked()

    def write_in_background(self, sidecars: Mapping[str, Any]) -> None:
        """Write the file and ``sidecars``, JSON files by name, on a thread of low priority."""
        if self._write_failed:
            self._recorded_tensors = []
        if not self._recorded_tensors and not sidecars:
            return
        self._writer = threading.Thread(
            target=self._run_writer, args=(sidecars,), name="asyncllm-packed-writer", daemon=True
        )
        # If no thread can be started, the next start of the engine writes the file.
        with suppress(RuntimeError, MemoryError):
            self._writer.start()

    def _run_writer(self, sidecars: Mapping[str, Any]) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            self.write()
            for name, sidecar in sidecars.items():
                self._write_sidecar(name, sidecar)
        except _WriteStoppedError:
            self.state += "; the engine ended before the file was written"
        except (OSError, ModelLoadError, MemoryError) as error:
            self._report_failed_write(error)
        finally:
            self._recorded_tensors = []  # Release the weights, even if the writing failed.

    def _report_failed_write(self, error: BaseException) -> None:
        self.state = f"packed at this start, and not written: {error}"
        logger.warning("packed weights are not written to %s: %s", self._folder.path, error)

    def _write_locked(self) -> None:
        """Write the file. Needs the folder's lock."""
        path, recorded = self.path, self._recorded_tensors
        # Make a second context: only one thread at a time may use the engine's.
        context = NativeContext(self._context.functions, 1, self._context.isa)
        # Another process may have written the file while this process waited for the lock.
        with suppress(PackedFileError):
            written = PackedFile(path, {os.geteuid()})
            if written.key == self._key and not self._in_model_folder:
                written.verify(context)
                self._recorded_tensors = []
                self.state = f"packed at this start, and written to {path} by another engine"
                return
        checkpoint_checksums = self._checkpoint_checksums(context)
        if WeightsIdentity.of(self._model.path) != self._identity:
            raise ModelLoadError(f"{self._model.path}: was changed while it was loaded")
        num_bytes = sum(tensor.nbytes for _, tensor in recorded)
        self._folder.make_room(num_bytes)

        def write(fd: int) -> None:
            write_packed_file(
                fd, context, self._key, checkpoint_checksums, recorded, self._check_stopped
            )

        self._folder.write(path.name, write, num_bytes)
        self._recorded_tensors = []
        self.state = f"packed at this start, and written to {path}"
        logger.info("packed weights are written to %s: %.1f MiB", path, num_bytes / 2**20)

    def _checkpoint_checksums(self, context: NativeContext) -> dict[str, int]:
        """Checksum of each file of the checkpoint, by name."""
        buffer = (ctypes.c_char * _CHUNK_BYTES)()
        checksums: dict[str, int] = {}
        for path in self._identity.paths:
            digest = hashlib.blake2b(digest_size=7)
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    self._check_stopped()
                    (checksum,) = context.checksums(ctypes.addressof(buffer), [(0, count)])
                    digest.update(checksum.to_bytes(8, "little"))
            checksums[path.name] = int.from_bytes(digest.digest(), "little")
        return checksums

    def _check_stopped(self) -> None:
        if self._stopped.is_set():
            raise _WriteStoppedError

    def _check_start_cancelled(self) -> None:
        """Raise an exception if the caller has given up starting the engine."""
        self._check_stopped()
        self._progress(0, 1)

    def close(self) -> None:
        """Stop the writing of the file; an incomplete file is removed."""
        self._stopped.set()

    # --- sidecars: small JSON files beside a packed file ---------------------------------------

    def calibration_name(self, conditions: Mapping[str, Any]) -> str:
        """Name of the sidecar that stores a calibration.

        Args:
            conditions: JSON values on which the content depends; the name contains their digest.
        """
        digest = _digest(json.dumps(conditions, sort_keys=True))
        return f"{_file_stem(self._key)}.calibration-{digest}.json"

    def read_sidecar(self, name: str) -> Any:
        """Read a sidecar, a small JSON file; None if there is no such file."""
        for folder in (self._cache, self._model_folder):
            with suppress(OSError, ValueError, ModelLoadError):
                return json.loads(read_small_file(folder.path / name, _MAX_SIDECAR_BYTES))
        return None

    def _write_sidecar(self, name: str, sidecar: Any) -> None:
        """Write a sidecar, unless the folder is locked or read-only: then the next start writes
        it."""
        content = json.dumps(sidecar).encode()
        with suppress(OSError):
            if not self._in_model_folder:
                self._cache.make()
            with self._folder.lock(None):
                self._folder.write(name, lambda fd: os.write(fd, content))


def open_store(
    config: EngineConfig,
    model: ModelConfig | TransformersConfig,
    context: NativeContext | None,
    dtype: torch.dtype,
    progress: ProgressCallback | None = None,
    *,
    in_model_folder: bool = False,
) -> PackedStore | str:
    """Make an engine's PackedStore, or return the reason why its weights are not stored.

    Args:
        in_model_folder: see PackedStore.

    Raises:
        InvalidRequestError: ``packed_cache`` is "shared", and the weights cannot be stored.
    """
    if config.packed_cache == "off":
        return 'packed_cache="off"'
    if is_small_model(model):
        return "packed at this start: a model of less than 32 million parameters gains nothing"
    if config.load_format == "dummy":
        reason = "random weights have no file"
    elif not isinstance(model, ModelConfig):
        reason = "transformers' modules hold weights of their own"
    elif context is None:
        reason = "only native ops on a CPU pack weights"
    else:
        try:
            return PackedStore(
                config, model, context, dtype, progress, in_model_folder=in_model_folder
            )
        except (OSError, RuntimeError) as error:
            reason = f"the checkpoint or the cache folder cannot be found ({error})"
    if config.packed_cache == "shared":
        raise value_error("packed_cache", config.packed_cache, f"'auto' or 'off': {reason}")
    return reason


def cache_folder(config: EngineConfig) -> Path:
    """Folder of packed files: ``packed_cache_dir``, or the user's own by the XDG convention.

    Raises:
        RuntimeError: the user has no home directory.
    """
    if config.packed_cache_dir is not None:
        return Path(config.packed_cache_dir).expanduser()
    xdg_folder = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG convention ignores a relative path.
    base = Path(xdg_folder) if os.path.isabs(xdg_folder) else Path.home() / ".cache"
    return base / "asyncllm" / "packed"


def _file_stem(key: Any) -> str:
    return _digest(json.dumps(key, sort_keys=True))


def _file_name(key: Any) -> str:
    return _file_stem(key) + PACKED_FILE_SUFFIX


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _boot_id() -> str:
    try:
        return _BOOT_ID_FILE.read_text(encoding="ascii").strip()
    except OSError:
        return ""
