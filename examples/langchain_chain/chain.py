"""A LangChain chain with callbacks over the engine in this process.

Needs: pip install langchain-asyncllm
"""

import asyncio
import time
from typing import Any

from langchain_asyncllm import ChatAsyncLLM
from langchain_core.callbacks import AsyncCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from asyncllm import AsyncLLMEngine


class FirstToken(AsyncCallbackHandler):
    """Notes how long each run takes to its first token."""

    def __init__(self) -> None:
        self.started: dict[Any, float] = {}
        self.waited: list[float] = []

    async def on_chat_model_start(self, *args: Any, run_id: Any, **kwargs: Any) -> None:
        self.started[run_id] = time.perf_counter()

    async def on_llm_new_token(self, token: Any, *, run_id: Any, **kwargs: Any) -> None:
        if run_id in self.started:
            self.waited.append(time.perf_counter() - self.started.pop(run_id))


async def main() -> None:
    first_token, usage = FirstToken(), UsageMetadataCallbackHandler()
    prompt = ChatPromptTemplate.from_messages([("human", "Tell me a story about {thing}.")])
    async with AsyncLLMEngine() as engine:
        model = ChatAsyncLLM(engine=engine, max_tokens=120)
        chain = prompt | model | StrOutputParser()
        config: Any = {"callbacks": [first_token, usage]}

        async for part in chain.astream({"thing": "a fox"}, config):
            print(part, end="", flush=True)
        print("\n")

        # These run as one batch.
        things = [{"thing": thing} for thing in ("a boat", "a bear", "a bell", "a kite")]
        streaming = prompt | model.model_copy(update={"streaming": True}) | StrOutputParser()
        for story in await streaming.abatch(things, config):
            print("-", story.strip().splitlines()[0][:90])

    print(f"\nfirst token after {1000 * min(first_token.waited):.0f} ms at best")
    print("tokens:", {name: used["output_tokens"] for name, used in usage.usage_metadata.items()})


if __name__ == "__main__":
    asyncio.run(main())
