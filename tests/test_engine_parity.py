"""The whole engine on real arithmetic: transformers' tokens, and results that do not depend
on company. Random checkpoints with a tokenizer, in float32."""

from __future__ import annotations

import asyncio
import gc
import random
import shutil

import pytest
import torch

from asyncllm import (
    AsyncLLMEngine,
    EngineError,
    InvalidRequestError,
    KVCacheTooSmallError,
    ModelLoadError,
    RequestError,
    SamplingParams,
)
from tests.checkpoints import copy_tokenizer, make_checkpoint
from tests.reference import MARGIN, check_tokens, generate, score
from tests.sampling_ways import WAYS
from tests.slow import slow_but

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio"])

VOCAB_SIZE = 2048
ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")
SETTINGS = {"dtype": "float32", "device": "cpu", "num_threads": 1, "num_blocks": 120}
SETTINGS |= {"block_size": 8, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Architecture to (directory, transformers' model): random weights, a real tokenizer."""
    made = {}

    def make(architecture):
        if architecture not in made:
            path = tmp_path_factory.mktemp(architecture)
            model = make_checkpoint(path, architecture, vocab_size=VOCAB_SIZE, shard="100KB")
            copy_tokenizer(path)
            made[architecture] = (path, model)
        return made[architecture]

    return make


@pytest.mark.parametrize(
    "architecture", slow_but(ARCHITECTURES, "Qwen3ForCausalLM", "LlamaForCausalLM")
)
async def test_greedy_tokens_and_logprobs_equal_transformers(checkpoint, architecture):
    path, model = checkpoint(architecture)
    draw = random.Random(3)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(n)] for n in (1, 3, 8, 17, 40, 64)]
    async with AsyncLLMEngine(path, **SETTINGS) as engine:
        streams = [
            engine.stream(prompt, temperature=0, max_tokens=24, logprobs=3, ignore_eos=True)
            for prompt in prompts
        ]
        results = [await stream.result() for stream in streams]
        assert engine.tokenizer.decode(results[3].token_ids) == results[3].text
    ties = 0
    for prompt, result in zip(prompts, results, strict=True):
        expected = generate(model, prompt, 24)
        assert len(set(expected.tokens)) >= 10
        equal = check_tokens(result.token_ids, expected)
        ties += equal < 24
        for i, row in enumerate(expected.logprobs[:equal]):
            entry = result.logprobs[i]
            assert entry.token_id == result.token_ids[i]
            assert abs(row[entry.token_id] - entry.logprob) < expected.limit
            top = row.topk(3)
            assert [c.rank for c in entry.top] == [1, 2, 3]
            for candidate, logprob in zip(entry.top, top.values.tolist(), strict=True):
                assert abs(candidate.logprob - logprob) < expected.limit
    assert ties <= 1


COMPANY = {
    "one token a step": {"max_num_batched_tokens": 1},
    "chunks of three": {"max_num_batched_tokens": 3},
    "chunks of seven": {"max_num_batched_tokens": 7, "async_scheduling": True},
    "one step ahead": {"async_scheduling": True},
    "preemption": {"num_blocks": 20},
    "preemption, one step ahead": {"num_blocks": 20, "async_scheduling": True},
    "two slots": {"max_num_seqs": 2},
    "no prefix cache": {"enable_prefix_caching": False},
    "another block size": {"block_size": 16, "num_blocks": 60},
}


def requests():
    """Prompts that share prefixes, sampled in every way there is."""
    draw = random.Random(11)
    shared = [draw.randrange(VOCAB_SIZE) for _ in range(24)]
    made = []
    for i, way in enumerate(WAYS):
        prompt = shared[: draw.choice((0, 9, 16, 24))]
        prompt = prompt + [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 20))]
        made.append((prompt, {"seed": 100 + i, "max_tokens": 20, "ignore_eos": True} | way))
    return made


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Each request's tokens when it runs alone and nothing is cached."""
    path, _ = checkpoint("Qwen3ForCausalLM")

    async def main():
        results = []
        async with AsyncLLMEngine(path, **SETTINGS, enable_prefix_caching=False) as engine:
            for prompt, options in requests():
                results.append((await engine.generate(prompt, **options)).token_ids)
        return results

    results = asyncio.run(main())
    assert len(set(results)) == len(results)
    return results


OFTEN = "one token a step", "chunks of three", "preemption, one step ahead", "no prefix cache"


@pytest.mark.parametrize("company", slow_but(COMPANY, *OFTEN, "another block size"))
async def test_results_do_not_depend_on_company(checkpoint, alone, company):
    path, _ = checkpoint("Qwen3ForCausalLM")
    async with AsyncLLMEngine(path, **(SETTINGS | COMPANY[company])) as engine:
        await engine.pause()
        streams = [engine.stream(prompt, **options) for prompt, options in requests()]
        await engine.resume()
        batch = [(await stream.result()).token_ids for stream in streams]
        again = [(await engine.generate(p, **options)).token_ids for p, options in requests()]
        stats = engine.stats()
    assert batch == alone
    assert again == alone
    if company.startswith("preemption"):
        assert stats.num_preemptions > 0
    if company != "no prefix cache":
        assert stats.prefix_cache_hits > 0


async def test_different_seeds_and_equal_seeds(checkpoint):
    path, _ = checkpoint("Qwen3ForCausalLM")
    async with AsyncLLMEngine(path, **SETTINGS) as engine:
        results = await asyncio.gather(
            *(
                engine.generate([1, 2], temperature=1.0, seed=seed, max_tokens=12)
                for seed in (1, 2, 1, None, None)
            )
        )
    tokens = [result.token_ids for result in results]
    assert tokens[0] == tokens[2]
    assert len(set(tokens)) == 4


async def test_logits_processor_that_raises_ends_its_request_alone(checkpoint):
    path, _ = checkpoint("Qwen3ForCausalLM")

    def refuse_at_three(token_ids, logits):
        if len(token_ids) == 3:
            raise LookupError("no more")
        return logits

    async with AsyncLLMEngine(path, **SETTINGS) as engine:
        good = engine.stream([4], temperature=0, max_tokens=10, ignore_eos=True)
        bad = engine.stream([4], temperature=0, max_tokens=10, logits_processors=[refuse_at_three])
        got = []
        with pytest.raises(RequestError, match="no more") as caught:
            async for delta in bad:
                got += delta.token_ids
        assert isinstance(caught.value.__cause__, LookupError)
        result = await good.result()
        assert list(result.token_ids[:3]) == got
        assert len(result.token_ids) == 10


async def test_memory_comes_back_after_closing(checkpoint):
    """The second open and close leave as much memory taken as the first."""
    path, _ = checkpoint("LlamaForCausalLM")
    held = []
    for _ in range(2):
        async with AsyncLLMEngine(path, **SETTINGS) as engine:
            await engine.generate([1, 2, 3], max_tokens=3)
        gc.collect()
        held.append(tensor_bytes())
    assert held[0] == held[1]


def tensor_bytes():
    import torch

    return sum(o.numel() * o.element_size() for o in gc.get_objects() if type(o) is torch.Tensor)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"dtype": "float16"}, InvalidRequestError, "float16.*bfloat16"),
        ({"device": "cuda"}, EngineError, 'device="cpu"'),
        ({"attention_backend": "flash_attn"}, InvalidRequestError, "flash_attn"),
        ({"max_model_len": 10_000}, InvalidRequestError, "256"),
        ({"max_model_len": 256, "num_blocks": 10}, KVCacheTooSmallError, "num_blocks"),
        ({"cuda_graphs": "decode"}, InvalidRequestError, "cuda_graphs"),
        ({"cudagraph_capture_sizes": (1, 2)}, InvalidRequestError, "cudagraph_capture_sizes"),
        ({"tokenizer": "/no/such/directory"}, ModelLoadError, "/no/such/directory"),
        ({"revision": "v2"}, ModelLoadError, "revision"),
    ],
)
async def test_settings_that_cannot_be_honoured(checkpoint, settings, error, says):
    path, _ = checkpoint("Qwen3ForCausalLM")
    engine = AsyncLLMEngine(path, **(SETTINGS | settings))
    with pytest.raises(error, match=says) as caught:
        await engine.start()
    if error is InvalidRequestError:
        assert caught.value.param in settings


async def test_unset_max_model_len_is_the_pool_size(checkpoint):
    path, _ = checkpoint("Qwen3ForCausalLM")
    async with AsyncLLMEngine(path, **(SETTINGS | {"num_blocks": 5})) as engine:
        result = await engine.generate([1] * 30, max_tokens=None, ignore_eos=True)
        assert engine.stats().num_blocks == 5
    assert (len(result.token_ids), result.finish_reason) == (10, "length")


@pytest.mark.parametrize("damage", ["gone", "no weights", "truncated", "not safetensors", "shapes"])
async def test_damaged_checkpoints(checkpoint, tmp_path, damage):
    path, _ = checkpoint("Qwen3ForCausalLM")
    copy = tmp_path / "model"
    shutil.copytree(path, copy)
    shard = sorted(copy.glob("*.safetensors"))[0]
    if damage == "gone":
        shutil.rmtree(copy)
    elif damage == "no weights":
        for file in copy.glob("*.safetensors*"):
            file.unlink()
    elif damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif damage == "not safetensors":
        shard.write_bytes(b"PK\3\4" + bytes(1000))
    else:
        config = (copy / "config.json").read_text()
        assert '"intermediate_size": 96' in config
        (copy / "config.json").write_text(
            config.replace('"intermediate_size": 96', '"intermediate_size": 80')
        )
    engine = AsyncLLMEngine(copy, **SETTINGS)
    with pytest.raises(ModelLoadError) as caught:
        await engine.start()
    assert str(copy) in str(caught.value) or shard.name in str(caught.value)


@pytest.mark.parametrize(
    "company", slow_but(["one step ahead", "preemption", "chunks of seven"], "chunks of seven")
)
async def test_outputs_equal_single_requests_with_their_seeds(checkpoint, company):
    path, model = checkpoint("Qwen3ForCausalLM")
    draw = random.Random(5)
    prompt = [draw.randrange(VOCAB_SIZE) for _ in range(29)]
    params = SamplingParams(n=6, seed=11, max_tokens=16, ignore_eos=True, logprobs=0)
    async with AsyncLLMEngine(path, **SETTINGS, enable_prefix_caching=False) as engine:
        alone = [await engine.generate(prompt, params.of_output(i)) for i in range(6)]
    async with AsyncLLMEngine(path, **(SETTINGS | COMPANY[company])) as engine:
        completion = await engine.generate(prompt, params)
        stats = engine.stats()
    assert len({one.token_ids for one in alone}) == 6
    assert [o.token_ids for o in completion.outputs] == [one.token_ids for one in alone]
    assert [o.text for o in completion.outputs] == [one.text for one in alone]
    assert (stats.num_preemptions > 0) == (company == "preemption")
    for output in completion.outputs:
        tokens = [*prompt, *output.token_ids]
        logprobs, noise = score(model, tokens)
        own = torch.tensor(tokens[len(prompt) :]).unsqueeze(1)
        total = logprobs[len(prompt) - 1 : -1].gather(1, own).sum().item()
        assert abs(output.cumulative_logprob - total) < len(own) * MARGIN * noise
