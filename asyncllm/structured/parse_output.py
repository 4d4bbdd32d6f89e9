"""parse_output: parses the text of an output as JSON or as a type."""

from __future__ import annotations

import json
from typing import Any

from asyncllm.errors import InvalidOutputError, InvalidRequestError
from asyncllm.structured.python_types import from_json


def parse_output(text: str, finish_reason: str | None, kind: Any = None) -> Any:
    """Parse the text of an output as JSON, or as a value of the type ``kind``.

    Raises:
        InvalidOutputError: if the text does not fit, for example because it was cut off.
        InvalidRequestError: if Pydantic does not support the type.
    """
    try:
        return json.loads(text) if kind is None else from_json(kind, text, "type")
    except InvalidRequestError:
        raise
    except (ValueError, RecursionError) as error:
        is_cut_off = finish_reason in ("length", "abort")
        what = f"was cut off ({finish_reason})" if is_cut_off else "cannot be parsed"
        raise InvalidOutputError(
            f"the output {what} after {len(text)} characters: {error}",
            text=text,
            finish_reason=finish_reason,
        ) from error
