"""choose_gguf: finds the GGUF file of a quantisation among a repository's files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from asyncllm.errors import ModelLoadError

GGUF_SUFFIX = ".gguf"
_SPLIT_SUFFIX = re.compile(r"-(\d{5})-of-(\d{5})$")
_MAX_NAMES = 16
_LONGER_NAMES = frozenset("k s m l p xs xl xxs xxl nl moe".split())
"""Parts of file names that continue a quantisation's name, as "M" in "Q4_K_M" continues "Q4_K"."""


def is_gguf(path: Path) -> bool:
    """Whether a model's path is a GGUF file, not a directory."""
    return path.suffix == GGUF_SUFFIX and not path.is_dir()


def choose_gguf(names: Iterable[str], quantization: str | None, where: str) -> list[str]:
    """Names of the chosen GGUF file, or of its parts in order.

    Args:
        names: names of files, relative to a repository or directory; other files are ignored.
        quantization: as a file's name spells it, such as "Q4_K_M" or "UD-Q4_K_XL". Case does not
            matter, and "-" equals "_". It may also be one of ``names``; None if there must be a
            single file.
        where: the repository or directory, for errors.

    Raises:
        ModelLoadError: if no file or several files fit, or a split file lacks parts.
    """
    files: dict[str, list[str]] = {}
    for name in sorted(names):
        stem = name[: -len(GGUF_SUFFIX)]
        if name.endswith(GGUF_SUFFIX) and not _is_companion(stem):
            files.setdefault(_SPLIT_SUFFIX.sub("", stem), []).append(name)
    found = [stem for stem in files if quantization in (None, *files[stem])]
    found = found or [stem for stem in files if quantization and _has_part(stem, quantization)]
    if len(found) != 1:
        raise ModelLoadError(_explain_choice(files, found, quantization, where))
    return _all_parts(files[found[0]], where)


def _is_companion(stem: str) -> bool:
    """Whether a file is a vision encoder or an importance matrix."""
    return not {"mmproj", "imatrix"}.isdisjoint(_split_name(_file_name(stem)))


def _has_part(stem: str, quantization: str) -> bool:
    """Whether a file's name contains exactly this quantisation: "Q4_K" is not in "Q4_K_M"."""
    parts, wanted = _split_name(_file_name(stem)), _split_name(quantization)
    for start in range(len(parts) - len(wanted) + 1):
        end = start + len(wanted)
        if parts[start:end] != wanted or (start and parts[start - 1] == "ud"):
            continue
        following = parts[end] if end < len(parts) else ""
        if following not in _LONGER_NAMES and not (following.isdigit() and len(following) == 1):
            return True
    return False


def _file_name(stem: str) -> str:
    return stem.rsplit("/", 1)[-1]


def _split_name(name: str) -> list[str]:
    return re.split(r"[-_./ ]+", name.lower())


def _explain_choice(
    files: dict[str, list[str]], found: list[str], quantization: str | None, where: str
) -> str:
    shown = [files[stem][0][-100:] for stem in found or files]
    listed = ", ".join(shown[:_MAX_NAMES])
    if len(shown) > _MAX_NAMES:
        listed += f" and {len(shown) - _MAX_NAMES} more"
    if not files:
        return f"{where}: has no GGUF file"
    if quantization is None:
        return f"{where}: has several GGUF files, name one of them behind a colon: {listed}"
    if found:
        return (
            f"{where}: several GGUF files are {quantization}, name one of them behind the colon: "
            f"{listed}"
        )
    return f"{where}: no GGUF file is {quantization}, expected one of: {listed}"


def _all_parts(names: list[str], where: str) -> list[str]:
    first = _SPLIT_SUFFIX.search(names[0][: -len(GGUF_SUFFIX)])
    if first is None:
        return names
    total = int(first[2])
    stem = _SPLIT_SUFFIX.sub("", names[0][: -len(GGUF_SUFFIX)])
    wanted = [f"{stem}-{number:05}-of-{total:05}{GGUF_SUFFIX}" for number in range(1, total + 1)]
    missing = [_file_name(name) for name in wanted if name not in names]
    if len(names) > total:
        raise ModelLoadError(f"{where}: parts of several split files: {', '.join(names[:4])}")
    if missing:
        listed = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ModelLoadError(
            f"{where}: {names[0]}: {len(missing)} of its {total} parts are missing: {listed}"
        )
    return names
