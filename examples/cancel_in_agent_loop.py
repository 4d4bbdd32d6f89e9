"""An agent that asks several times at once, takes the first good answer and cancels the rest.

What is cancelled stops costing anything: its memory is free before the engine's next step.
"""

import asyncio
import json

from asyncllm import AsyncLLMEngine

TASK = 'Fill in this JSON: {"name": "", "age": 0}\nIda is 34 years old.'


async def attempt(engine: AsyncLLMEngine, seed: int) -> dict[str, object]:
    """One answer, read until it is valid JSON."""
    text = ""
    # Leaving the block aborts the request, however it is left: return, exception, cancellation.
    async with engine.chat([{"role": "user", "content": TASK}], seed=seed) as stream:
        async for delta in stream:
            text += delta.text
            if text.endswith("}"):
                return json.loads(text)
    raise ValueError(f"no JSON in {text!r}")


async def distraction(engine: AsyncLLMEngine) -> None:
    """Work that is not worth finishing once the agent has what it needs."""
    async for _ in engine.stream("Tell me a story.", ignore_eos=True):
        pass


async def main() -> None:
    async with AsyncLLMEngine() as engine:
        background = [asyncio.create_task(distraction(engine)) for _ in range(8)]
        attempts = [asyncio.create_task(attempt(engine, seed)) for seed in range(4)]
        try:
            async with asyncio.timeout(60):
                for finished in asyncio.as_completed(attempts):
                    try:
                        print("the answer:", json.dumps(await finished))
                        break
                    except ValueError as error:
                        print("not this one:", error)
        finally:
            for task in (*background, *attempts):
                task.cancel()
            await asyncio.gather(*background, *attempts, return_exceptions=True)

        await engine.pause()  # returns when no step is in flight
        stats = engine.stats()
        print(f"{stats.num_aborted} requests aborted")
        print(f"{stats.num_free_blocks} of {stats.num_blocks} KV blocks free")


if __name__ == "__main__":
    asyncio.run(main())
