"""The whole engine on a GPU: the CPU's tokens, and the same tokens however steps are run.

These tests skip where there is no GPU. They need no plugin of pytest, so that they run on a
machine that has little beside torch.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncLLMEngine, Completion, EngineError
from asyncllm.errors import AsyncLLMError
from asyncllm.gpu.graph.cuda_graphs import StepPart
from tests.checkpoints import copy_tokenizer, make_checkpoint
from tests.gpu_turns import beside_others  # noqa: F401 - pytest finds a fixture by its name
from tests.sampling_ways import WAYS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.usefixtures("beside_others"),
]

DEVICE = "cuda"
GRAPHS = ("off", "decode", "auto")
ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")
VOCAB_SIZE = 2048

NEAR = 1e-3
"""Log-probabilities so close are a tie: another device adds up in another order."""

Request = tuple[list[int], dict[str, Any]]


def settings(**changes: Any) -> dict[str, Any]:
    """Of a small engine on the GPU, in float32."""
    chosen = {"device": DEVICE, "dtype": "float32", "num_blocks": 400, "max_num_seqs": 64}
    return chosen | {"max_model_len": 256, "max_num_batched_tokens": 512} | changes


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Architecture to the directory of a random checkpoint with a real tokenizer."""
    made: dict[str, Path] = {}

    def make(architecture: str = "Qwen3ForCausalLM") -> Path:
        if architecture not in made:
            path = tmp_path_factory.mktemp(architecture)
            sizes = {"hidden_size": 128, "head_dim": 32, "vocab_size": VOCAB_SIZE}
            make_checkpoint(path, architecture, **sizes)
            copy_tokenizer(path)
            made[architecture] = path
        return made[architecture]

    return make


def draw_prompts(lengths: Sequence[int], seed: int = 3) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def equal_requests(count: int, *, max_tokens: int = 8) -> list[Request]:
    """Greedy and sampled ones in turns, which begin and end together: every decode step has
    ``count`` rows."""
    return [
        (
            prompt,
            {
                "temperature": 0.8 * (i % 2),
                "top_p": (1.0, 0.9, 1.0)[i % 3],
                "top_k": (0, 0, 0, 40)[i % 4],
                "seed": i,
                "max_tokens": max_tokens,
            },
        )
        for i, prompt in enumerate(draw_prompts([7] * count, seed=count))
    ]


def mixed_requests() -> list[Request]:
    """Prompts that share prefixes, sampled in every way there is: some need their token on
    the host before the next step, some never."""
    shared = draw_prompts([40], seed=11)[0]
    draw = random.Random(5)
    tails = draw_prompts([draw.randint(1, 40) for _ in WAYS], seed=12)
    return [
        (shared[: (0, 17, 32, 40)[i % 4]] + tail, {"seed": 100 + i, "max_tokens": 24 + i, **way})
        for i, (way, tail) in enumerate(zip(WAYS, tails, strict=True))
    ]


async def run_together(engine: AsyncLLMEngine, requests: Sequence[Request]) -> list[Completion]:
    """All of them enter the same step, as far as it has room."""
    await engine.pause()
    streams = [engine.stream(prompt, ignore_eos=True, **options) for prompt, options in requests]
    await engine.resume()
    return [await stream.result() for stream in streams]


def run(
    model: Path | None, requests: Sequence[Request], *, alone: bool = False, **changes: Any
) -> list[Completion]:
    """Results of an engine of its own; with ``alone``, one request after another."""

    async def main() -> list[Completion]:
        async with AsyncLLMEngine(model, **settings(**changes)) as engine:
            if not alone:
                return await run_together(engine, requests)
            return [await engine.generate(p, ignore_eos=True, **o) for p, o in requests]

    return asyncio.run(main())


def tokens(results: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


def assert_equal_but_for_ties(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Token for token, until ``expected`` (which has log-probabilities) was about to tie."""
    compared = wanted = 0
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert len(ours.token_ids) == len(theirs.token_ids)
        assert theirs.logprobs is not None
        wanted += len(theirs.token_ids)
        for i, entry in enumerate(theirs.logprobs):
            token = ours.token_ids[i]
            if token != entry.token_id:
                near = {c.token_id: c.logprob for c in entry.top}
                assert token in near, f"row {row}, token {i}: {token} is not near {entry}"
                gap = abs(near[token] - entry.logprob)
                assert gap < NEAR, f"row {row}, token {i}: {token} for {entry.token_id}, {gap}"
                break
            compared += 1
    assert compared > 0.8 * wanted, f"{compared} of {wanted} tokens could be compared"


def graphs_of(engine: AsyncLLMEngine) -> Any:
    """The graphs of a started engine's runner."""
    assert engine._thread is not None
    return engine._thread.loaded_model.executor.graphs


def greedy_requests() -> list[Request]:
    options = {"temperature": 0, "max_tokens": 24, "logprobs": 5}
    return [(prompt, options) for prompt in draw_prompts([1, 3, 8, 17, 40, 64, 129, 200])]


@pytest.mark.parametrize("logprobs", [True, False], ids=["logprobs", "plain"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_the_cpus(checkpoint, architecture, logprobs):
    """Plain rows are sampled inside the graph, those with log-probabilities beside it."""
    path, requests = checkpoint(architecture), greedy_requests()
    expected = run(path, requests, device="cpu")
    if not logprobs:
        requests = [(prompt, {**options, "logprobs": None}) for prompt, options in requests]
    found = run(path, requests)
    assert_equal_but_for_ties(found, expected)
    assert len(set(tokens(found))) == len(requests)


def test_log_probabilities_equal_the_cpus(checkpoint):
    path, requests = checkpoint(), greedy_requests()
    for ours, theirs in zip(run(path, requests), run(path, requests, device="cpu"), strict=True):
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            if a.token_id != b.token_id:
                break
            assert abs(a.logprob - b.logprob) < NEAR
            for x, y in zip(a.top, b.top, strict=True):
                assert abs(x.logprob - y.logprob) < NEAR


def test_packaged_model_equals_cpu_output():
    prompt = "Tell me a story about Mia and a boat."

    async def main(device: str) -> Completion:
        async with AsyncLLMEngine(**settings(device=device, max_model_len=512)) as engine:
            messages = [{"role": "user", "content": prompt}]
            stream = engine.chat(messages, temperature=0, max_tokens=80, logprobs=5)
            return await stream.result()

    expected, found = asyncio.run(main("cpu")), asyncio.run(main(DEVICE))
    assert_equal_but_for_ties([found], [expected])
    assert found.text


def test_the_packaged_model_with_default_settings():
    async def main() -> tuple[str, Completion]:
        async with AsyncLLMEngine(device=DEVICE, kv_cache_memory="256MiB") as engine:
            stream = engine.stream("Once upon a time", temperature=0, max_tokens=40)
            text = "".join([delta.text async for delta in stream])
            return text, await engine.generate("Once upon a time", temperature=0, max_tokens=40)

    text, result = asyncio.run(main())
    assert text == result.text
    assert text.strip()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_graphs_equal_eager_steps_in_every_batch_size(checkpoint, dtype):
    """To the bit, so token for token: a captured step is the eager one."""

    async def main(sizes: Sequence[int] | None, graphs: str) -> dict[int, list[tuple[int, ...]]]:
        chosen = settings(dtype=dtype, cuda_graphs=graphs)
        async with AsyncLLMEngine(checkpoint(), **chosen) as engine:
            sizes = graphs_of(engine).buckets if sizes is None else sizes
            return {
                size: tokens(await run_together(engine, equal_requests(size))) for size in sizes
            }

    captured = asyncio.run(main(None, "auto"))
    assert {1, 2, 4, 8, 64} <= set(captured)
    eager = asyncio.run(main(list(captured), "off"))
    for size, found in captured.items():
        assert found == eager[size], f"batch size {size}"
        assert len(set(found)) > size / 2


def test_start_captures_every_batch_size(checkpoint):
    async def main() -> Any:
        chosen = settings(cudagraph_capture_sizes=(1, 3, 8), max_num_seqs=8)
        async with AsyncLLMEngine(checkpoint(), **chosen) as engine:
            graphs = graphs_of(engine)
            return tuple(graphs.buckets), list(graphs.capture_stats)

    buckets, records = asyncio.run(main())
    assert buckets == (1, 3, 8)
    assert {record.key.bucket for record in records if record.key.part is StepPart.STEP} == {
        1,
        3,
        8,
    }
    assert all(record.seconds > 0 and record.num_bytes >= 0 for record in records)


@pytest.mark.parametrize("count", [3, 5, 13, 61])
def test_padded_batches_equal_eager_ones(checkpoint, count):
    """Matrix products of a padded batch may round otherwise: ties are excused."""
    prompts = draw_prompts([5 + i % 30 for i in range(count)], seed=count)
    options = {"temperature": 0, "max_tokens": 12}
    expected = run(
        checkpoint(), [(p, {**options, "logprobs": 5}) for p in prompts], cuda_graphs="off"
    )
    found = run(checkpoint(), [(p, options) for p in prompts])
    assert_equal_but_for_ties(found, expected)


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "one step ahead"])
@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sampled_tokens_do_not_depend_on_how_steps_run(checkpoint, dtype, graphs, ahead):
    requests = equal_requests(8, max_tokens=30)
    expected = run(checkpoint(), requests, dtype=dtype, cuda_graphs="off", async_scheduling=False)
    found = run(checkpoint(), requests, dtype=dtype, cuda_graphs=graphs, async_scheduling=ahead)
    assert tokens(found) == tokens(expected)
    assert len(set(tokens(found))) == len(requests)


@pytest.mark.parametrize("pool", [{}, {"num_blocks": 16, "max_model_len": None}], ids=str)
@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "one step ahead"])
@pytest.mark.parametrize("graphs", GRAPHS)
def test_requests_of_every_kind_together_and_preempted(checkpoint, graphs, ahead, pool):
    requests = mixed_requests()
    expected = run(checkpoint(), requests, alone=True, cuda_graphs="off", async_scheduling=False)

    async def main() -> tuple[list[Completion], Any]:
        chosen = settings(cuda_graphs=graphs, async_scheduling=ahead, **pool)
        async with AsyncLLMEngine(checkpoint(), **chosen) as engine:
            return await run_together(engine, requests), engine.stats()

    found, stats = asyncio.run(main())
    assert tokens(found) == tokens(expected)
    assert found[6].logprobs is not None
    assert set(found[7].token_ids) <= set(range(50, 90))
    assert (stats.num_preemptions > 0) == bool(pool)
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("graphs", ["off", "auto"])
def test_aborts_leave_the_others_alone(checkpoint, graphs):
    """Half of the requests are aborted at some token or other, in a pool that is too small."""
    requests = mixed_requests() * 2
    expected = run(checkpoint(), requests, alone=True, cuda_graphs="off", async_scheduling=False)

    async def cut(stream: Any, after: int) -> tuple[int, ...]:
        got: list[int] = []
        async for delta in stream:
            got += delta.token_ids
            if len(got) >= after:
                stream.abort()
        return tuple(got)

    async def main() -> tuple[list[tuple[int, ...]], Any]:
        chosen = settings(num_blocks=24, max_model_len=None, cuda_graphs=graphs)
        async with AsyncLLMEngine(checkpoint(), **chosen) as engine:
            streams = [engine.stream(p, ignore_eos=True, **o) for p, o in requests]
            limits = [10_000 if i % 2 else 1 + i for i in range(len(streams))]
            got = await asyncio.gather(*map(cut, streams, limits))
            return got, engine.stats()

    found, stats = asyncio.run(main())
    for i, (ours, theirs) in enumerate(zip(found, tokens(expected), strict=True)):
        if i % 2:
            assert ours == theirs
        else:
            assert len(ours) >= min(1 + i, len(theirs))
            assert ours == theirs[: len(ours)]
    assert stats.num_aborted > 0
    assert stats.num_free_blocks == stats.num_blocks


def test_two_engines_on_one_card(checkpoint):
    first, second = checkpoint("Qwen3ForCausalLM"), checkpoint("LlamaForCausalLM")
    requests = equal_requests(8, max_tokens=40)
    expected = [tokens(run(path, requests)) for path in (first, second)]

    async def main() -> list[list[tuple[int, ...]]]:
        async with AsyncLLMEngine(first, **settings()) as a:
            async with AsyncLLMEngine(second, **settings()) as b:
                both = await asyncio.gather(run_together(a, requests), run_together(b, requests))
            again = await run_together(a, requests)
        return [tokens(results) for results in (*both, again)]

    assert asyncio.run(main()) == [*expected, expected[0]]


def device_memory() -> tuple[int, int]:
    """Bytes of tensors, and bytes that torch's allocator holds."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def test_memory_comes_back_after_closing(checkpoint):
    """The second open and close leave as much memory taken as the first."""
    held = []
    for _ in range(2):
        results = run(checkpoint(), equal_requests(5))
        assert len(results) == 5
        held.append(device_memory())
    assert held[0] == held[1]


def test_closing_gives_the_cache_back_to_the_device(checkpoint):
    """Not only to torch's allocator, and without a collection of garbage."""
    run(checkpoint(), equal_requests(1))
    before = torch.cuda.memory_reserved()
    gc.disable()
    try:
        run(checkpoint(), equal_requests(1), num_blocks=50_000)
        assert torch.cuda.memory_reserved() - before < 256 * 2**20
    finally:
        gc.enable()


def test_missing_device(checkpoint):
    with pytest.raises(EngineError, match=r"cuda:99.*CUDA devices"):
        run(checkpoint(), [], device="cuda:99")


def test_a_cache_larger_than_the_card(checkpoint):
    """Says which setting asks for too much; the next engine starts as if nothing had been."""
    _, total = torch.cuda.mem_get_info()
    before = device_memory()
    with pytest.raises(AsyncLLMError, match="kv_cache_memory"):
        run(checkpoint(), [], num_blocks=None, max_model_len=None, kv_cache_memory=2 * total)
    assert device_memory()[0] == before[0]
    assert len(run(checkpoint(), equal_requests(2))) == 2
