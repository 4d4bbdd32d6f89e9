"""Other engines under the traffic of the mixed stage, each in a child process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

from benchmarks.gpu.traffic import poisson_arrivals, run_traffic


def vllm(
    model: str, arrivals: dict[str, Any], max_model_len: int, max_num_seqs: int
) -> dict[str, Any]:
    """vLLM's AsyncLLM on random weights. Its engine is a process behind the one that streams."""
    from vllm import AsyncEngineArgs, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import (  # pyright: ignore[reportMissingImports]
        RequestOutputKind,
    )
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    async def main() -> dict[str, Any]:
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=model,
                load_format="dummy",
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                gpu_memory_utilization=0.8,
                enable_prefix_caching=False,
                disable_log_stats=True,
            )
        )
        number = 0

        async def submit(prompt: list[int], max_tokens: int) -> AsyncIterator[int]:
            nonlocal number
            number += 1
            params = SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
            )
            async for output in engine.generate({"prompt_token_ids": prompt}, params, str(number)):
                if count := len(output.outputs[0].token_ids):
                    yield count

        try:
            await run_traffic(submit, poisson_arrivals(**{**arrivals, "seconds": 1.0, "seed": 1}))
            return asdict(await run_traffic(submit, poisson_arrivals(**arrivals)))
        finally:
            engine.shutdown()

    return asyncio.run(main())


PROBES: dict[str, Callable[..., dict[str, Any]]] = {"vllm": vllm}
