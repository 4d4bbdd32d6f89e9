"""The description of the application: whole, with the engine's bounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from asyncllm.sampling_params import INTEGERS, NUMBERS
from asyncllm.serving.openapi import openapi

DOCUMENT = openapi(needs_token=True)
SCHEMAS = DOCUMENT["components"]["schemas"]


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for one in value.values():
            yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


def test_every_reference_leads_to_a_schema_and_each_schema_is_referred_to() -> None:
    found = set(references(DOCUMENT))
    assert found == {f"#/components/schemas/{name}" for name in SCHEMAS}


@pytest.mark.parametrize("name", ["ChatRequest", "CompletionRequest", "ResponseRequest"])
def test_the_bounds_of_sampling_parameters_are_described(name: str) -> None:
    described = SCHEMAS[name]["properties"]
    for field, (low, high) in {**INTEGERS, **NUMBERS}.items():
        # These fields are the protocol's: booleans, or with a meaning of their own.
        if field in described and field not in ("logprobs", "max_tokens"):
            least = "exclusiveMinimum" if field == "top_p" else "minimum"
            assert (described[field][least], described[field]["maximum"]) == (low, high), field
    bias = described["logit_bias"]["anyOf"][0]
    assert (bias["maxProperties"], bias["additionalProperties"]["maximum"]) == (1024, 100)
    words = described["bad_words"]["anyOf"][0]
    assert (words["maxItems"], words["items"]["maxLength"]) == (1024, 1024)


def test_a_field_of_the_protocols_keeps_its_own_bounds() -> None:
    chat, legacy = (SCHEMAS[name]["properties"] for name in ("ChatRequest", "CompletionRequest"))
    assert chat["max_tokens"]["minimum"] == 1
    assert legacy["max_tokens"]["anyOf"][0]["minimum"] == 0
    assert "minimum" not in legacy["max_tokens"]
    assert "minimum" not in chat["logprobs"]
