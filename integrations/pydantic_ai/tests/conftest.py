"""One engine on the packaged model for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncllm import LLM


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM(num_blocks=256) as llm:
        yield llm
