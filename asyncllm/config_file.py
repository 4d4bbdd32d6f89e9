"""ConfigFile: one JSON object on disk, read field by field with errors that name the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from asyncllm.errors import ModelLoadError


class _Required:
    """The default of a field that has none."""


REQUIRED: Final = _Required()


class ConfigFile:
    """The fields of a JSON object; JSON's null counts as absent.

    Every getter raises ModelLoadError, naming the file, the field, its value and what would
    have been accepted, for a value of the wrong kind, and for a missing field without a
    ``default``.

    Attributes:
        path: the file, for messages.
        values: the object as it was read.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Raises ModelLoadError if the file is missing, unreadable or no JSON object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be read ({error.strerror or error})") from error
        except ValueError as error:
            raise ModelLoadError(f"{path}: is not valid JSON in UTF-8 ({error})") from error
        if not isinstance(values, dict):
            kind = type(values).__name__
            raise ModelLoadError(f"{path}: holds a JSON {kind}, expected a JSON object")
        return cls(path, values)

    @classmethod
    def read_if_present(cls, path: Path) -> ConfigFile:
        """As ``read``; a missing file is one without fields."""
        return cls.read(path) if path.exists() else cls(path, {})

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def bad(self, name: str, accepted: str) -> ModelLoadError:
        """The error for the value that field ``name`` has."""
        value = self.values.get(name)
        if value is None:
            return ModelLoadError(f"{self.path}: {name} is missing, expected {accepted}")
        return ModelLoadError(f"{self.path}: {name} is {value!r}, expected {accepted}")

    def section(self, name: str) -> ConfigFile:
        """The object in field ``name``; without fields if there is none."""
        value = self.values.get(name)
        if value is None:
            return ConfigFile(self.path, {})
        if not isinstance(value, dict):
            raise self.bad(name, "a JSON object")
        return ConfigFile(self.path, value)

    def integer(
        self, name: str, default: Any = REQUIRED, *, low: int = 1, high: int | None = None
    ) -> Any:
        """An integer in ``[low, high]``."""
        accepted = f"an integer from {low}" + ("" if high is None else f" to {high}")
        value = self._get(name, default, accepted)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.bad(name, accepted)
        if value < low or (high is not None and value > high):
            raise self.bad(name, accepted)
        return value

    def number(
        self,
        name: str,
        default: Any = REQUIRED,
        *,
        low: float = 0.0,
        high: float = math.inf,
        open_low: bool = False,
    ) -> Any:
        """A finite number in ``[low, high]``, or above ``low`` with ``open_low``."""
        accepted = f"a finite number {'above' if open_low else 'from'} {low:g}"
        accepted += "" if high == math.inf else f" to {high:g}"
        value = self._get(name, default, accepted)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.bad(name, accepted)
        if not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
            raise self.bad(name, accepted)
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default, "true or false")
        if not isinstance(value, bool):
            raise self.bad(name, "true or false")
        return value

    def string(self, name: str, default: Any = REQUIRED) -> Any:
        value = self._get(name, default, "a string")
        if value is not default and not isinstance(value, str):
            raise self.bad(name, "a string")
        return value

    def choice(self, name: str, choices: Sequence[str], default: Any = REQUIRED) -> Any:
        accepted = " or ".join(repr(c) for c in choices)
        value = self._get(name, default, accepted)
        if value is not default and value not in choices:
            raise self.bad(name, accepted)
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One token id or a list of them, each below ``vocab_size``; empty if absent."""
        value = self.values.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise self.bad(name, "a token id or a list of token ids")
            if not 0 <= token_id < vocab_size:
                raise self.bad(name, f"token ids from 0 to {vocab_size - 1} (vocab_size)")
        return tuple(ids)

    def _get(self, name: str, default: Any, accepted: str) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise self.bad(name, accepted)
        return default
