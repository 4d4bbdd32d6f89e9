"""A hundred streams at once, on one event loop."""

import asyncio
import time

from asyncllm import AsyncLLMEngine, TokenStream

NAMES = ("Mia", "Tom", "Lena", "Otto", "Ruby", "Max", "Ida", "Finn", "Alice", "Hugo")
THINGS = ("boat", "kite", "lamp", "drum", "map", "clock", "train", "violin", "bell", "robot")


def ask(engine: AsyncLLMEngine, name: str, thing: str) -> TokenStream:
    question = f"Tell me a story about {name} and a {thing}."
    return engine.chat([{"role": "user", "content": question}], max_tokens=32)


async def main() -> None:
    async with AsyncLLMEngine() as engine:
        began = time.perf_counter()
        # chat() submits at once, so all of them run as one batch before the first read.
        streams = [ask(engine, name, thing) for name in NAMES for thing in THINGS]
        stories = await asyncio.gather(*(stream.result() for stream in streams))
        took = time.perf_counter() - began

        for story in stories[:3]:
            print(story.text, end="\n\n")
        tokens = sum(len(story.token_ids) for story in stories)
        print(f"{len(stories)} streams, {tokens} tokens, {tokens / took:.0f} tokens a second")


if __name__ == "__main__":
    asyncio.run(main())
