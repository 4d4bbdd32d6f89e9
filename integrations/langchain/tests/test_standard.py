"""langchain-tests' own classes on the packaged model, with sockets disabled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from langchain_asyncllm import ChatAsyncLLM
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from asyncllm import LLM, AsyncLLMEngine
from asyncllm.testing import fake_llm


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _customer(prompt: str) -> str:
    name = "你好啊集团" if "你好啊集团" in prompt else "こんにちは株式会社"
    arguments = f'{{"customer_name": "{name}", "description": "A company"}}'
    return _call("unicode_customer", arguments)


SCRIPTS: dict[str, Any] = {
    "test_tool_calling": _call("magic_function", '{"input": 3}'),
    "test_tool_calling_async": _call("magic_function", '{"input": 3}'),
    "test_unicode_tool_call_integration": _customer,
    "test_json_mode": '{"setup": "Why?", "punchline": "Because."}',
}
"""Answers of an engine without a model, for tests that ask for what the packaged model, with its
1.7 million parameters, cannot do: copy a number out of such a question, or Chinese. Parsing,
grammars and all else are the engine's."""


class _Common:
    engine: ClassVar[AsyncLLMEngine]

    @pytest.fixture(autouse=True)
    def _engine_of_the_test(self, request: pytest.FixtureRequest, llm: LLM) -> Iterator[None]:
        """langchain-tests asks the test class for the model's arguments."""
        script = SCRIPTS.get(getattr(request.function, "__name__", ""))
        if script is None:
            type(self).engine = llm.engine
            yield
        else:
            with fake_llm(script) as scripted:
                type(self).engine = scripted.engine
                yield

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAsyncLLM

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine, "temperature": 0}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        # One engine has one model: its own name is the only one that a call may give.
        return "asyncllm/demo"


class TestUnit(_Common, ChatModelUnitTests):
    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        # An engine in the same process has no API key, and the model refuses arguments that
        # mean nothing to it.
        params = super().standard_chat_model_params
        return {name: value for name, value in params.items() if name != "api_key"}


class TestIntegration(_Common, ChatModelIntegrationTests):
    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> Any:
        model = ChatAsyncLLM(engine=self.engine, temperature=0, max_tokens=5)
        question = "Tell me a story about a fox, a boat, a kite, a river, and a very old red hat."
        answers: list[Any] = []
        for _ in range(2):
            if stream:
                chunks = list(model.stream(question * 2))
                answers.append(sum(chunks[1:], chunks[0]))
            else:
                answers.append(model.invoke(question * 2))
        assert answers[-1].usage_metadata["input_token_details"]["cache_read"] >= 32
        return answers[-1]
