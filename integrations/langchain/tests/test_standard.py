"""langchain-tests' own classes on the packaged model, with sockets disabled."""

from __future__ import annotations

from typing import Any, ClassVar

from langchain_asyncllm import ChatAsyncLLM
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from asyncllm import AsyncLLMEngine


class _Common:
    engine: ClassVar[AsyncLLMEngine]

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAsyncLLM

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": self.engine}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def model_override_value(self) -> str:
        # One engine has one model: its own name is the only one that a call may give.
        return "asyncllm/demo"

    @property
    def has_structured_output(self) -> bool:
        return False


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
