"""What the smoke stage tries, each for itself: a kernel, a graph, an engine, an error.

Runs in a child process; see ``ProbeProcess``. A probe returns figures, as ``[name, value, unit,
note]``, and raises where something is wrong.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from asyncllm import AsyncLLMEngine, Completion
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.config import EngineConfig
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.graph.capturer import CudaGraphCapturer
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer
from asyncllm.gpu.memory import MemoryProbe
from asyncllm.outputs import TokenLogprobs
from benchmarks.gpu.checkpoint import write_checkpoint, write_config, write_weights
from benchmarks.gpu.clock import CudaClock
from benchmarks.gpu.probe import count_nodes
from benchmarks.gpu.shapes import QWEN3_06B
from benchmarks.gpu.smoke_models import MODELS

Figures = list[tuple[str, float | None, str, str]]
MIB = 2**20

NEAR = 1e-3
"""Log-probabilities so close are a tie: another kernel adds up in another order."""

ROUNDED = 0.1
"""Log-probabilities of bfloat16 are off by less, and two that are closer are a tie: plain torch in
bfloat16 is off by up to 0.04 on a CPU."""

REFERENCE: dict[str, Any] = {
    "attention_backend": "torch",
    "cuda_graphs": "off",
    "async_scheduling": False,
}
"""Plain torch, eager and in step."""


# --- the device -------------------------------------------------------------------------


def memory_pool() -> Figures:
    """The measure that the KV cache is sized by counts a tensor to the byte."""
    device, probe = torch.device("cuda", torch.cuda.current_device()), MemoryProbe()
    with probe.private_pool(device) as reserved:
        before = reserved()
        tensor = torch.ones(64 * MIB, dtype=torch.uint8, device=device)
        took = reserved() - before
        del tensor
    probe.empty_cache(device)
    assert took == 64 * MIB, f"a tensor of {64 * MIB} bytes took {took}"
    return []


def wake_up() -> Figures:
    """What an event that blocks costs the host beside one that spins."""
    blocking, spinning = CudaClock().wake_up()
    later = f"{(blocking - spinning) * 1e6:.0f} µs later than spinning"
    return [
        ("a kernel and the wait for it, spinning", spinning, "µs", ""),
        ("a kernel and the wait for it, blocking", blocking, "µs", later),
    ]


def failed_capture() -> Figures:
    """After an op that no capture allows, the process is as before: it draws random numbers,
    allocates, captures and replays."""
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.stream(torch.cuda.Stream(device)):
        check_failed_capture(CudaGraphCapturer(device), device)
    return []


def check_failed_capture(capturer: GraphCapturer, device: torch.device) -> None:
    target = torch.zeros(4, device=device)

    def illegal() -> None:
        target.add_(target.sum().item())

    assert capturer.capture(illegal) is None, "reading the device's memory was captured"
    torch.rand(4, device=device)
    torch.ones(MIB, device=device)

    def legal() -> None:
        target.add_(1.0)

    replay = capturer.capture(legal)
    assert replay is not None, "nothing can be captured any more"
    before = target.tolist()
    replay()
    assert target.tolist() == [value + 1.0 for value in before]


# --- kernels ----------------------------------------------------------------------------


def kernel(name: str, device: str = "cuda") -> Figures:
    """One of ``smoke_kernels.CHECKS``, against float64."""
    # Imported here, because it needs the tests' modules.
    from benchmarks.gpu.smoke_kernels import checks_of

    major, minor = torch.cuda.get_device_capability() if device == "cuda" else (8, 0)
    for check in checks_of(device, 10 * major + minor)[name]:
        check()
    return []


# --- engines ----------------------------------------------------------------------------

Request = tuple[list[int], dict[str, Any]]


def plain_requests(vocab: int) -> list[Request]:
    """Greedy and sampled, of which a step needs no more than the draw; some share a prefix."""
    draw = random.Random(3)
    shared = [draw.randrange(vocab) for _ in range(40)]
    requests: list[Request] = []
    for number, length in enumerate((1, 3, 17, 40, 64, 129, 5, 33)):
        prompt = shared[: 16 * (number % 3)] + [draw.randrange(vocab) for _ in range(length)]
        sampled = {"temperature": 0.8, "top_p": 0.9, "top_k": (0, 20)[number % 4 // 2]}
        options = sampled if number % 2 else {"temperature": 0.0}
        requests.append((prompt, {"seed": number, "max_tokens": 24, **options}))
    return requests


def staged_requests(vocab: int) -> list[Request]:
    """Those that need more of a step, beside plain ones."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
        {"temperature": 1.0, "presence_penalty": 0.5, "min_p": 0.02},
        {"temperature": 0.0, "logit_bias": {5: 3.0, 9: -100.0}, "logprobs": 2},
        {"temperature": 1.0, "allowed_token_ids": list(range(50, 90))},
        {"temperature": 1.0, "min_tokens": 10, "stop_token_ids": list(range(0, vocab, 9))},
    ]
    plain = plain_requests(vocab)
    mixed = [
        (prompt, {**options, **way}) for (prompt, options), way in zip(plain, ways, strict=False)
    ]
    return mixed + plain[len(ways) :]


async def run_requests(
    model: Path, requests: Sequence[Request], settings: dict[str, Any]
) -> list[Completion]:
    chosen = {
        "load_format": "dummy",
        "dtype": "float32",
        "num_blocks": 400,
        "max_num_seqs": 16,
        "max_model_len": 256,
        "max_num_batched_tokens": 128,
        "seed": 0,
    }
    async with AsyncLLMEngine(model, **chosen | settings) as engine:
        await engine.pause()
        streams = [engine.stream(prompt, ignore_eos=True, **given) for prompt, given in requests]
        await engine.resume()
        return [await stream.result() for stream in streams]


def engine(
    model: str,
    requests: str = "plain",
    device: str = "cuda",
    settings: dict[str, Any] | None = None,
) -> Figures:
    """An engine with ``settings`` has the tokens of one on plain torch, in float32."""
    with tempfile.TemporaryDirectory() as directory:
        config = MODELS[model]
        path = write_config(Path(directory), config)
        make = staged_requests if requests == "staged" else plain_requests
        wanted = make(config["vocab_size"])
        reference = {**REFERENCE, "device": device}
        greedy = [
            (prompt, {**given, "logprobs": 5} if given["temperature"] == 0 else given)
            for prompt, given in wanted
        ]
        expected = asyncio.run(run_requests(path, greedy, reference))
        found = asyncio.run(run_requests(path, wanted, {"device": device, **(settings or {})}))
    compared = compare(found, expected)
    return [("tokens compared", float(compared), "", f"{model}, {requests}")]


def bfloat16(device: str = "cuda", settings: dict[str, Any] | None = None) -> Figures:
    """A dense engine in bfloat16 with ``settings`` has the tokens and the log-probabilities of one
    on plain torch in float32, as far as bfloat16 can."""
    with tempfile.TemporaryDirectory() as directory:
        config = MODELS["dense"]
        path = write_weights(Path(directory), config)
        common = {"device": device, "load_format": "auto"}
        options = {"temperature": 0.0, "max_tokens": 24, "logprobs": 5}
        requests = [(prompt, options) for prompt, _ in plain_requests(config["vocab_size"])]
        expected = asyncio.run(run_requests(path, requests, REFERENCE | common))
        ours = {**common, "dtype": "bfloat16", **(settings or {})}
        found = asyncio.run(run_requests(path, requests, ours))
    compared = compare_rounded(found, expected)
    return [("tokens compared", float(compared), "", "dense, in bfloat16")]


def compare(found: Sequence[Completion], expected: Sequence[Completion]) -> int:
    """How many tokens are the same; raises AssertionError for one that is another, unless two
    were about to tie, after which a request is not looked at any more."""
    compared = 0
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert len(ours.token_ids) == len(theirs.token_ids), f"request {row} has another length"
        for i, (token, wanted) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
            if token != wanted:
                logprobs = theirs.logprobs
                gap = lead(logprobs[i], token) if logprobs is not None else float("inf")
                assert gap < NEAR, f"request {row}, token {i}: {token} instead of {wanted}"
                break
            compared += 1
    total = sum(len(each.token_ids) for each in expected)
    assert compared > 0.7 * total, f"only {compared} of {total} tokens could be compared"
    return compared


def compare_rounded(found: Sequence[Completion], expected: Sequence[Completion]) -> int:
    """How many greedy tokens are the same, each request until its first other one. Raises
    AssertionError for a log-probability of theirs that is off by ROUNDED, and where more than 5 %
    of all that were compared are others that were not about to tie."""
    same = others = total = 0
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.logprobs is not None
        assert theirs.logprobs is not None
        total += len(theirs.logprobs)
        for i, (one, wanted) in enumerate(zip(ours.logprobs, theirs.logprobs, strict=True)):
            if one.token_id != wanted.token_id:
                others += lead(wanted, one.token_id) >= ROUNDED
                break
            off = abs(one.logprob - wanted.logprob)
            assert off < ROUNDED, f"request {row}, token {i}: log-probability off by {off:.3g}"
            same += 1
    assert others <= 0.05 * (same + others), f"{others} of {same + others} tokens are others"
    assert same > 0.5 * total, f"only {same} of {total} tokens could be compared"
    return same


def lead(logprobs: TokenLogprobs, token: int) -> float:
    """By how much the chosen token is more likely than ``token``; infinity if that is not among
    the most likely."""
    near = {each.token_id: each.logprob for each in logprobs.top}
    return logprobs.logprob - near.get(token, -float("inf"))


def graphs(device: str = "cuda", sizes: Sequence[int] = (1, 8, 256)) -> Figures:
    """Captured steps of these batch sizes have the tokens of eager ones, to the bit."""
    with tempfile.TemporaryDirectory() as directory:
        config = MODELS["dense"]
        path = write_config(Path(directory), config)
        common = {"device": device, "dtype": "bfloat16", "max_num_seqs": max(sizes)}
        common |= {"num_blocks": 40 * max(sizes), "max_num_batched_tokens": 8192}
        captured: dict[str, Any] = {"cudagraph_capture_sizes": tuple(sizes)}
        if device == "cpu":
            captured = {}
        for size in sizes:
            requests = [
                (prompt[:16], {**given, "max_tokens": 8})
                for prompt, given in (plain_requests(config["vocab_size"]) * size)[:size]
            ]
            found, expected = (
                asyncio.run(run_requests(path, requests, common | settings))
                for settings in (captured, {"cuda_graphs": "off"})
            )
            same = [a.token_ids == b.token_ids for a, b in zip(found, expected, strict=True)]
            assert all(same), f"batch size {size}: {same.count(False)} rows have other tokens"
    return [("batch sizes whose graphs are right", float(len(sizes)), "", "")]


def nodes(device: str = "cuda") -> Figures:
    """Nodes of a decode step's graph, of the 0.6B shape; a split product has one more."""
    with tempfile.TemporaryDirectory() as directory:
        path = write_checkpoint(Path(directory), QWEN3_06B)
        settings = {"model": path, "device": device, "load_format": "dummy", "num_blocks": 2048}
        config = EngineConfig(max_num_seqs=256, max_model_len=4096, **settings)
        runner = build_model_runner(config, ModelConfig.from_directory(path))
        try:
            counts = {rows: count_nodes(runner, rows) for rows in (1, 64, 256)}
        finally:
            runner.close()
    return [(f"nodes of a step of {rows} rows", float(n), "", "") for rows, n in counts.items()]


def flash_attention(name: str, model: str = "dense") -> Figures:
    """The library's check at start, and an engine on it; in bfloat16, which has no equal tokens
    to be compared with."""
    with tempfile.TemporaryDirectory() as directory:
        config = MODELS[model]
        settings = {"device": "cuda", "dtype": "bfloat16", "attention_backend": name}
        requests = plain_requests(config["vocab_size"])
        path = write_config(Path(directory), config)
        found = asyncio.run(run_requests(path, requests, settings))
    assert all(len(each.token_ids) == 24 for each in found)
    return [(f"tokens with {name}", float(sum(len(each.token_ids) for each in found)), "", "")]


PROBES: dict[str, Callable[..., Figures]] = {
    probe.__name__: probe
    for probe in (
        memory_pool, wake_up, failed_capture, kernel, engine, bfloat16, graphs, nodes,
        flash_attention,
    )
}  # fmt: skip
