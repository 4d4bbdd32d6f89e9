"""Models with sliding windows through the scheduler, against transformers: groups give blocks back,
and others write into them, while tokens and log-probabilities stay those of the whole sequence."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.config import EngineConfig
from asyncllm.core.scheduler import Scheduler
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.transformers_model.config import TransformersConfig
from asyncllm.gpu.weights import load_weights
from tests.checkpoints import make_checkpoint
from tests.families import CASES, make
from tests.integrity import check_scheduler
from tests.native_library import context
from tests.reference import MARGIN, Expected, Tally, compare, generate, score
from tests.scheduler_rig import Rig
from tests.slow import slow_but
from tests.static_runner import CPU, LateStream, TraceRecorder, make_decoder, make_runner

WINDOW = 7
OUTPUT = 20
LENGTHS = (1, 33, 16, 47)
SETTINGS = {
    "block_size": 4,
    "num_blocks": 400,
    "max_model_len": 96,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 64,
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
}
NATIVE_CASES = {
    "qwen3": {
        "architecture": "Qwen3ForCausalLM",
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "mistral": {"architecture": "MistralForCausalLM", "sliding_window": WINDOW},
}
OF_MODULES = ["Gemma2", "Gemma3", "Gemma4-shared", "GptOss"]
OF_BOTH = "native Gemma4-shared"
"""Natively as well: layers without KV of their own, and groups whose blocks hold other numbers of
tokens."""


@dataclass
class Case:
    """A checkpoint, and what transformers makes of it."""

    path: Path
    model: Any
    config: ModelConfig | TransformersConfig
    expect: Callable[[tuple[int, ...], int], Expected]
    prompts: list[list[int]]

    def runner(self, **overrides: Any) -> ModelRunner:
        settings: dict[str, Any] = {"attention_backend": "torch"}
        return build_model_runner(EngineConfig(**(SETTINGS | settings | overrides)), self.config)


@pytest.fixture(scope="module")
def load_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @cache
    def load(name: str) -> Case:
        path = tmp_path_factory.mktemp(name)
        config: ModelConfig | TransformersConfig
        if name in NATIVE_CASES:
            model = make_checkpoint(path, **NATIVE_CASES[name])
            config = ModelConfig.from_directory(path)
        else:
            family = name.removeprefix("native ")
            model = make(path, family, **CASES[family])
            of = TransformersConfig if name == family else ModelConfig
            config = of.from_directory(path)
        draw = random.Random(1)
        prompts = [[draw.randrange(255) for _ in range(n)] for n in LENGTHS]

        @cache
        def expect(prompt: tuple[int, ...], count: int) -> Expected:
            return generate(model, list(prompt), count)

        return Case(path, model, config, expect, prompts)

    return load


class ModelRig(Rig):
    """A scheduler and a model, driven by hand."""

    def __init__(self, case: Case, runner: ModelRunner, budget: int = 64) -> None:
        self.case, self.executor, self.info = case, runner, runner.info
        self.scheduler = Scheduler(runner.info, in_process=runner.in_process)
        self.scheduler.budget.tokens = budget
        self.in_flight, self.arrival_index = [], 0
        self.logprobs: dict[Any, list[Any]] = {}

    def collect(self):
        events = super().collect()
        for request, _, entry, error in events:
            assert error is None, error
            self.logprobs.setdefault(request, []).append(entry)
        return events

    def ask(self, prompt, count=OUTPUT, **sampling):
        request = self.add(prompt, count, logprobs=2, ignore_eos=True, **sampling)
        request.sampling = request.sampling.resolve({}, {}, lambda: 0)
        return request

    def run(self) -> None:
        """To the end, with as many steps in flight as the runner takes."""
        while self.scheduler.has_work() or self.in_flight:
            full = len(self.in_flight) == self.info.pipeline_depth
            if full or self.launch() is None:
                self.collect()
            check_scheduler(self.scheduler)
        assert not self.scheduler.failed
        pool = self.scheduler.kv.pool
        assert pool.num_free == pool.num_usable

    def check(self, *requests) -> None:
        tally = Tally()
        for request in requests:
            prompt = tuple(request.token_ids[: request.num_prompt_tokens])
            outputs = request.output_token_ids
            seq: Any = SimpleNamespace(
                error=None,
                outputs=outputs,
                logprobs=self.logprobs[request],
                max_tokens=request.sampling.max_tokens,
            )
            compare(seq, self.case.expect(prompt, len(outputs)), tally)
        assert len(tally.ties) <= 1


def backend_or_skip(backend: str) -> str:
    if backend == "native":
        context()
    return backend


BACKENDS = [
    *[(name, backend) for name in NATIVE_CASES for backend in ("torch", "native")],
    *[(name, "torch") for name in OF_MODULES],
    ("GptOss", "native"),
    (OF_BOTH, "torch"),
    (OF_BOTH, "native"),
]


OFTEN = [
    *[(name, "native") for name in (*NATIVE_CASES, "GptOss", OF_BOTH)],
    ("Gemma3", "torch"),
]


@pytest.mark.parametrize(("name", "backend"), slow_but(BACKENDS, *OFTEN))
def test_equals_transformers(load_case, name, backend):
    case = load_case(name)
    runner = case.runner(attention_backend=backend_or_skip(backend))
    assert any(spec.window == WINDOW for spec in runner.info.kv_groups)
    if backend == "native" and isinstance(case.config, ModelConfig):
        assert runner.execution.startswith("one native program")
    for budget in (5, 64):
        rig = ModelRig(case, runner, budget)
        first = [rig.ask(prompt) for prompt in case.prompts]
        for _ in range(9):
            rig.step()
        rig.scheduler.preempt(next(iter(rig.scheduler.running)))
        again = [rig.ask(case.prompts[3]), rig.ask(case.prompts[3][:40])]
        rig.run()
        later = rig.ask([*first[1].token_ids, 5, 6], 4)
        rig.run()
        assert later.num_cached_tokens >= 40
        rig.check(*first, *again, later)


@pytest.mark.parametrize("backend", slow_but(["torch", "native"], "native"))
def test_every_chunk_size_and_every_length_of_a_hit(load_case, backend):
    case = load_case("qwen3")
    runner, prompt = case.runner(attention_backend=backend_or_skip(backend)), case.prompts[1]
    for budget in range(1, 34):
        rig = ModelRig(case, runner, budget)
        one = rig.ask(prompt, 3)
        rig.run()
        rig.check(one)
    rig = ModelRig(case, runner)
    rig.ask(prompt, 1)
    rig.run()
    for length in range(1, len(prompt)):
        one = rig.ask([*prompt[:length], 9], 3)
        rig.run()
        assert one.num_cached_tokens == length // 4 * 4
        rig.check(one)


@pytest.mark.parametrize(
    ("name", "depth"), slow_but([("qwen3", 1), ("qwen3", 2), ("mistral", 2)], ("qwen3", 2))
)
def test_with_graphs_and_steps_in_flight(load_case, name, depth):
    case = load_case(name)
    weights = load_weights(case.config, torch.float32, CPU, None)
    decoder = make_decoder(case.config, weights)
    runner = make_runner(
        decoder,
        capturer=TraceRecorder(),
        stream=LateStream() if depth == 2 else None,
        sizes=(4,),
        max_num_seqs=4,
        num_blocks=70,
        depth=depth,
    )
    rig = ModelRig(case, runner, 10)
    requests = [rig.ask(prompt, 12) for prompt in case.prompts]
    rig.run()
    requests += [rig.ask([*requests[3].token_ids, 7], 5)]
    rig.run()
    rig.check(*requests)


def test_two_requests_take_turns_with_the_same_blocks(load_case):
    """The pool holds both windows and no more, so each writes what the other gave back."""
    case = load_case("mistral")
    runner = case.runner(num_blocks=12, max_model_len=72, max_num_batched_tokens=8)
    rig = ModelRig(case, runner, 8)
    requests = [rig.ask(case.prompts[3][:30]), rig.ask(case.prompts[1])]
    rig.run()
    rig.check(*requests)


def test_log_probabilities_of_a_prompt(load_case):
    case = load_case("qwen3")
    prompt = case.prompts[3]
    rig = ModelRig(case, case.runner(), 9)
    rig.ask(prompt, 2)
    rig.run()
    one = rig.ask(prompt, 2, prompt_logprobs=1)
    rig.run()
    rows, noise = score(case.model, prompt)
    assert len(one.prompt_logprobs) == len(prompt) - 1
    for row, token, found in zip(rows, prompt[1:], one.prompt_logprobs, strict=False):
        assert found.sampled.token_id == token
        assert abs(found.sampled.logprob - float(row[token])) < MARGIN * noise
