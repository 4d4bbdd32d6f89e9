"""A function-calling loop: the model calls Python functions until it has an answer.

The packaged model is tiny: it was trained to call one tool at a time that resembles these, and to
repeat in its answer what the tool said. A larger model needs no other loop.
"""

import asyncio

from asyncllm import AsyncLLMEngine


def get_weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: which one.
    """
    return {"Oslo": "snow", "Lisbon": "sun"}.get(city, "rain")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


FUNCTIONS = {function.__name__: function for function in (get_weather, add)}


async def answer(engine: AsyncLLMEngine, question: str, max_rounds: int = 4) -> str:
    """The answer, after as many calls as the model makes."""
    messages = [{"role": "user", "content": question}]
    for _ in range(max_rounds):
        stream = engine.chat(messages, tools=list(FUNCTIONS.values()), temperature=0)
        completion = await stream.result()
        messages.append(completion.message)
        if not completion.tool_calls:
            return completion.text
        for call in completion.tool_calls:
            # The engine promises a tool on offer and a JSON object. That the object fits the
            # function is the model's doing, unless tool_choice="required" or a named one holds it
            # to the schema; so what it raises goes back to the model as well.
            try:
                result = FUNCTIONS[call.name](**call.kwargs)
            except Exception as error:
                result = f"error: {error}"
            print(f"  {call.name}({call.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    raise RuntimeError(f"no answer after {max_rounds} rounds")


async def main() -> None:
    async with AsyncLLMEngine() as engine:
        for question in ("What is the weather in Oslo?", "What is 12 + 30?"):
            print(question)
            print(await answer(engine, question))


if __name__ == "__main__":
    asyncio.run(main())
