"""The smallest program: one stream, printed as it comes."""

import asyncio

from asyncllm import AsyncLLMEngine


async def main() -> None:
    # Without a model named, the small one in the package runs, on any CPU.
    async with AsyncLLMEngine() as engine:
        messages = [{"role": "user", "content": "Tell me a story about Mia and a boat."}]
        async for delta in engine.chat(messages):
            print(delta, end="", flush=True)
        print()


if __name__ == "__main__":
    asyncio.run(main())
