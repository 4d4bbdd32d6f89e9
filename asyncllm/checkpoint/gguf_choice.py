"""choose_gguf: finds the GGUF file of a quantisation among a repository's files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from asyncllm.errors import ModelLoadError

GGUF_SUFFIX = ".gguf"
_SPLIT_NAME_PATTERN = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""Pattern of the name of one part of a split file, as llama.cpp writes it."""
_SEPARATOR_PATTERN = re.compile(r"[-_./ ]+")
_MAX_LISTED_NAMES = 16
_QUANTIZATION_NAME_SUFFIXES = frozenset("k s m l p xs xl xxs xxl nl moe".split())
"""Parts of file names that belong to the preceding quantisation, as "M" in "Q4_K_M"."""


def is_gguf(path: Path) -> bool:
    """Whether a model's path is a GGUF file, not a directory."""
    return path.suffix == GGUF_SUFFIX and not path.is_dir()


def choose_gguf(names: Iterable[str], quantization: str | None, location: str) -> list[str]:
    """Choose the GGUF file of a quantisation; return its name, or those of its parts in order.

    Args:
        names: names of files, relative to a repository or directory; other files are ignored.
        quantization: as a file's name spells it, such as "Q4_K_M" or "UD-Q4_K_XL". Case does not
            matter, and "-" equals "_". It may also be one of ``names``; None if there must be a
            single file.
        location: the repository or directory, for errors.

    Raises:
        ModelLoadError: if no file or several files fit, or a split file lacks parts.
    """
    files: dict[str, list[str]] = {}
    for name in sorted(names):
        # Vision encoders and importance matrices are not models.
        if name.endswith(GGUF_SUFFIX) and {"mmproj", "imatrix"}.isdisjoint(_name_parts(name)):
            split = _SPLIT_NAME_PATTERN.fullmatch(name)
            files.setdefault(split[1] if split else name[: -len(GGUF_SUFFIX)], []).append(name)
    stems = [stem for stem in files if quantization in (None, *files[stem])]
    if not stems and quantization:
        stems = [stem for stem in files if _has_quantization(stem, quantization)]
    if len(stems) != 1:
        raise ModelLoadError(_explain_choice(files, stems, quantization, location))
    parts = files[stems[0]]
    expected = split_part_names(parts[0])
    if len(parts) > len(expected):
        raise ModelLoadError(f"{location}: parts of several split files: {', '.join(parts[:4])}")
    if missing := [name.rsplit("/", 1)[-1] for name in expected if name not in parts]:
        raise missing_parts_error(f"{location}: {parts[0]}", missing, len(expected))
    return parts


def split_part_names(name: str) -> list[str]:
    """Names of all parts if ``name`` is one part of a split GGUF file; otherwise ``name`` alone."""
    match = _SPLIT_NAME_PATTERN.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [name]
    numbers = range(1, int(match[3]) + 1)
    return [f"{match[1]}-{number:05}-of-{match[3]}{GGUF_SUFFIX}" for number in numbers]


def missing_parts_error(file: str, missing_parts: list[str], num_parts: int) -> ModelLoadError:
    """Make the error for a split file that lacks some of its ``num_parts`` parts."""
    listed = join_names(missing_parts, 3)
    return ModelLoadError(
        f"{file}: {len(missing_parts)} of its {num_parts} parts are missing: {listed}"
    )


def join_names(names: list[str], max_names: int) -> str:
    """Join the first ``max_names`` names for an error message."""
    return ", ".join(names[:max_names]) + (", …" if len(names) > max_names else "")


def _has_quantization(stem: str, quantization: str) -> bool:
    """Whether a file's name contains exactly this quantisation: "Q4_K" is not in "Q4_K_M"."""
    parts, quantization_parts = _name_parts(stem), _SEPARATOR_PATTERN.split(quantization.lower())
    for start in range(len(parts) - len(quantization_parts) + 1):
        end = start + len(quantization_parts)
        if parts[start:end] != quantization_parts or (start and parts[start - 1] == "ud"):
            continue
        following = parts[end] if end < len(parts) else ""
        if following not in _QUANTIZATION_NAME_SUFFIXES and not (
            following.isdigit() and len(following) == 1
        ):
            return True
    return False


def _name_parts(path: str) -> list[str]:
    return _SEPARATOR_PATTERN.split(path.rsplit("/", 1)[-1].lower())


def _explain_choice(
    files: dict[str, list[str]], stems: list[str], quantization: str | None, location: str
) -> str:
    shown = [files[stem][0][-100:] for stem in stems or files]
    listed = ", ".join(shown[:_MAX_LISTED_NAMES])
    if len(shown) > _MAX_LISTED_NAMES:
        listed += f" and {len(shown) - _MAX_LISTED_NAMES} more"
    if not files:
        return f"{location}: has no GGUF file"
    if quantization is None:
        return f"{location}: has several GGUF files, name one of them behind a colon: {listed}"
    if stems:
        return (
            f"{location}: several GGUF files are {quantization}, name one of them behind the "
            f"colon: {listed}"
        )
    return f"{location}: no GGUF file is {quantization}, expected one of: {listed}"
