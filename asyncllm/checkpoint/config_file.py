"""ConfigFile: one JSON object on disk, read field by field with errors that name the field."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from asyncllm import validation as check
from asyncllm.checkpoint.small_file import converting_read_errors, read_small_file
from asyncllm.errors import ModelLoadError

MAX_INTEGER = 2**24
"""Maximum of any size or count in a configuration. Buffers and loops grow with these numbers, so a
damaged file must not make them arbitrarily large. Real models stay far below."""


class _RequiredSentinel:
    """Type of REQUIRED, the marker for fields without a default."""


REQUIRED: Final = _RequiredSentinel()


class ConfigFile:
    """JSON object of a file, read field by field; null counts as absent.

    Every getter raises ModelLoadError for a value of the wrong kind, and for a missing field
    without a ``default``. The error names the file, the field, its value and the accepted values.

    Attributes:
        path: the file, for messages.
        values: the JSON object as it was read.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Read a file.

        Raises:
            ModelLoadError: if it is missing, unreadable, too large or not a JSON object.
        """
        with converting_read_errors(path):
            content = read_small_file(path)
        try:
            values = json.loads(content.decode())
        except (ValueError, RecursionError) as error:
            raise ModelLoadError(f"{path}: is not valid JSON in UTF-8 ({error})") from error
        if not isinstance(values, dict):
            kind = type(values).__name__
            raise ModelLoadError(f"{path}: holds a JSON {kind}, expected a JSON object")
        return cls(path, values)

    @classmethod
    def read_if_present(cls, path: Path) -> ConfigFile:
        """Read a file; a missing file counts as an empty object."""
        return cls.read(path) if path.exists() else cls(path, {})

    def with_overrides(self, overrides: Mapping[str, Any] | None) -> ConfigFile:
        """Copy with ``EngineConfig.hf_overrides`` applied.

        Raises:
            InvalidRequestError: for an override of ``quantization_config``.
        """
        if not overrides:
            return self
        path = self.path.with_name(f"{self.path.name} with hf_overrides")
        return ConfigFile(path, _merge_overrides(self.values, overrides))

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def field_error(self, name: str, accepted_values: str) -> ModelLoadError:
        """Make the error for an invalid field; ``accepted_values`` describes valid ones."""
        return self._value_error(name, self.values.get(name), accepted_values)

    def section(self, name: str) -> ConfigFile:
        """Read the JSON object in field ``name``; an absent field counts as an empty object."""
        value = self.values.get(name)
        if value is None:
            return ConfigFile(self.path, {})
        if not isinstance(value, dict):
            raise self.field_error(name, "a JSON object")
        return ConfigFile(self.path, value)

    def integer(
        self, name: str, default: Any = REQUIRED, *, low: int = 1, high: int = MAX_INTEGER
    ) -> Any:
        """Read an integer in ``[low, high]``."""
        return self._read_field(name, default, check.integer, low, high)

    def number(
        self,
        name: str,
        default: Any = REQUIRED,
        *,
        low: float = 0.0,
        high: float = 1e12,
        exclusive_low: bool = False,
    ) -> Any:
        """Read a finite number in ``[low, high]``, or in ``(low, high]`` if ``exclusive_low``."""
        return self._read_field(
            name, default, partial(check.number, exclusive_low=exclusive_low), low, high
        )

    def boolean(self, name: str, default: bool) -> bool:
        return self._read_field(name, default, check.boolean)

    def choice(self, name: str, choices: Sequence[str], default: Any = REQUIRED) -> Any:
        return self._read_field(name, default, check.choice, choices)

    def checked_list(
        self,
        name: str,
        accepted_values: str,
        is_valid: Callable[[Any], bool],
        length: int | None = None,
    ) -> list[Any]:
        """Read the list in field ``name``; refuse it unless ``is_valid`` is true for each entry.

        Args:
            length: required number of entries; None for any.
        """
        value = self.values.get(name)
        if (
            not isinstance(value, list)
            or length not in (None, len(value))
            or not all(map(is_valid, value))
        ):
            raise self.field_error(name, accepted_values)
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Read field ``name``, a token id or a list of ids below ``vocab_size``; empty if
        absent."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, list):
            value = [value]
        return check.token_ids(name, value, vocab_size, make_error=self._value_error)

    def _read_field(self, name: str, default: Any, read: Callable[..., Any], *limits: Any) -> Any:
        value = self.values.get(name)
        if value is None and default is not REQUIRED:
            return default
        return read(name, value, *limits, make_error=self._value_error)

    def _value_error(self, name: str, value: object, accepted_values: str) -> ModelLoadError:
        actual = "missing" if value is None else check.describe(value)
        return ModelLoadError(f"{self.path}: {name} is {actual}, expected {accepted_values}")


def _merge_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of ``values`` with ``overrides`` applied as in vLLM: an object whose name ends in
    ``_config`` is merged field by field; any other value is replaced, even the RoPE parameters."""
    merged = dict(values)
    for name, value in overrides.items():
        if name == "quantization_config":
            accepted = "no quantization_config, which says how the weights are stored"
            raise check.value_error("hf_overrides", {name: value}, accepted)
        old = values.get(name)
        if name.endswith("_config") and isinstance(old, dict) and isinstance(value, dict):
            value = _merge_overrides(old, value)
        merged[name] = value
    return merged
