"""parse_output: parses the text of an output as JSON or as a value of a type."""

from __future__ import annotations

import json
from typing import Any

from asyncllm.errors import InvalidOutputError, InvalidRequestError
from asyncllm.structured.python_types import parse_json_as


def parse_output(text: str, finish_reason: str | None, output_type: Any = None) -> Any:
    """Parse the text of an output as JSON, or as a value of the type ``output_type``.

    Raises:
        InvalidOutputError: if the text does not fit, for example because it was cut off.
        InvalidRequestError: if Pydantic does not support the type.
    """
    try:
        return json.loads(text) if output_type is None else parse_json_as(output_type, text, "type")
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
