"""Parity with transformers: a checkpoint beside what transformers generates from it, the runs that
are compared, and what a comparison has to notice."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.config import EngineConfig
from asyncllm.gpu.build import build_model_runner
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.transformers_model.config import read_config
from asyncllm.gpu.weights import load_weights, weights_bytes
from tests.driver import Driver, Sequence
from tests.native_library import context
from tests.reference import Expected, Tally, check_tokens, compare, generate
from tests.static_runner import CPU, LateStream, TraceRecorder, make_decoder, make_runner

OUTPUT = 24
PROMPT_LENGTHS = (5, 33, 16)
LONG_LENGTHS = (33, 47, 40)
"""Where transformers' frequencies of longrope would change within a shorter one."""

SETTINGS: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 200,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
}


@dataclass
class Case:
    """A checkpoint, and what transformers generates from it.

    Attributes:
        config: of the engine's own decoder; None compares transformers' modules, whose
            configuration is read for each runner.
        backend: attention of its runners, unless they name another.
    """

    path: Path
    model: Any
    config: ModelConfig | None
    prompts: list[list[int]]
    expected: list[Expected]
    backend: str = "torch"

    @classmethod
    def of(
        cls,
        path: Path,
        model: Any,
        model_impl: str = "auto",
        *,
        lengths: tuple[int, ...] = PROMPT_LENGTHS,
        backend: str = "torch",
    ) -> Case:
        """Prompts of ``lengths`` tokens, and the model's outputs."""
        draw = random.Random(1)
        prompts = [[draw.randrange(256) for _ in range(n)] for n in lengths]
        expected = [generate(model, prompt, OUTPUT) for prompt in prompts]
        config = None if model_impl == "transformers" else read_config(path, model_impl)
        assert config is None or isinstance(config, ModelConfig)
        return cls(path, model, config, prompts, expected, backend)

    def runner(self, model_impl: str | None = None, **overrides: Any) -> ModelRunner:
        config: Any = self.config if model_impl is None else None
        config = config or read_config(self.path, model_impl or "transformers")
        settings = SETTINGS | {"attention_backend": self.backend} | overrides
        return build_model_runner(EngineConfig(**settings), config)

    def static_decoder(self) -> Decoder:
        """The engine's own decoder, of plain torch, for runners of ``tests.static_runner``."""
        assert self.config is not None
        return make_decoder(self.config, load_weights(self.config, torch.float32, CPU))


def case_loader(
    tmp_path_factory: pytest.TempPathFactory, make: Callable[[Path, str], Case]
) -> Callable[[str], Case]:
    """Makes each case once, by its name, in a directory of its own."""

    @cache
    def load(name: str) -> Case:
        return make(tmp_path_factory.mktemp(name), name)

    return load


def check(case: Case, seqs: list[Sequence], indices: list[int]) -> None:
    """Compares outputs with those of the prompts at ``indices``."""
    tally = Tally()
    for seq, index in zip(seqs, indices, strict=True):
        compare(seq, case.expected[index], tally)
    assert len(tally.ties) <= 1


def check_reference(case: Case) -> None:
    """That the comparison means something: its outputs vary, and noise decides few of them."""
    for expected in case.expected:
        assert len(set(expected.tokens)) >= 8
    assert sum(expected.num_ties for expected in case.expected) <= 1


def run_everything(case: Case, runner: ModelRunner, chunk: int = 7) -> None:
    """A batch in chunks, with a prefix hit on its longest prompt, where the model keeps no states,
    and a preemption."""
    driver = Driver(runner)
    seqs = [driver.add(prompt, OUTPUT) for prompt in case.prompts]
    again = driver.add(case.prompts[1], OUTPUT)
    step = 0
    while not all(seq.done for seq in (*seqs, again)):
        if step == 8 and not runner.info.has_states:
            driver.share(seqs[1], again, num_blocks=24 // runner.info.block_size)
        if step == 12:
            driver.release(seqs[0])
        live = [seq for seq in seqs if not seq.done]
        live += [again] if step >= 8 and not again.done else []
        driver.launch([(seq, min(chunk, seq.known - seq.computed)) for seq in live])
        driver.collect()
        step += 1
    assert step > 24
    check(case, [*seqs, again], [0, 1, 2, 1])


def run_matrix(case: Case, backend: str, chunks: tuple[int, ...] = (3, 10)) -> None:
    """Each prompt alone, one in chunks of every size, all in a batch, and with run-ahead. Skips
    where there are no native ops for a ``backend`` "native".

    Args:
        chunks: of the batches.
    """
    if backend == "native":
        context()
    check_reference(case)
    runner = case.runner(attention_backend=backend)
    for index, prompt in enumerate(case.prompts):
        driver = Driver(runner)
        seq = driver.add(prompt, OUTPUT)
        driver.run([seq])
        check(case, [seq], [index])
    for chunk in range(1, 34):
        driver = Driver(runner)
        seq = driver.add(case.prompts[1], 3)
        driver.run([seq], chunk=chunk)
        compare(seq, case.expected[1], Tally())
    for chunk in chunks:
        run_everything(case, runner, chunk)
    driver = Driver(case.runner(attention_backend=backend, async_scheduling=True))
    seqs = [driver.add(prompt, OUTPUT) for prompt in case.prompts]
    driver.run(seqs, chunk=7, depth=2)
    check(case, seqs, [0, 1, 2])


def run_static_step(case: Case) -> None:
    """Traced, so that nothing is read on the host, with two steps in flight and padded rows."""
    graphs = {"capturer": TraceRecorder(), "stream": LateStream(), "sizes": (4,)}
    driver = Driver(make_runner(case.static_decoder(), **graphs))
    seqs = [driver.add(prompt, 10) for prompt in case.prompts]
    driver.run(seqs, chunk=20, depth=2)
    for seq, expected in zip(seqs, case.expected, strict=True):
        check_tokens(seq.outputs, expected.first(10))


def check_sizes(config: ModelConfig) -> None:
    """The bytes of the parameters that are announced are those that are loaded."""
    held: Any = load_weights(config, torch.float32, CPU)
    assert weights_bytes(config, torch.float32) == sum(each.nbytes for _, each in held)


def with_tensors(case: Case, target: Path, tensors: dict[str, torch.Tensor | None]) -> ModelConfig:
    """The configuration of a copy of a checkpoint with other tensors; None takes one out."""
    found: dict[str, Any] = load_file(case.path / "model.safetensors") | tensors
    found = {name: tensor for name, tensor in found.items() if tensor is not None}
    save_file(found, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((case.path / "config.json").read_text())
    return ModelConfig.from_directory(target)


def setting(
    parts: Callable[[ModelRunner], Iterable[Any]], path: str, value: Any
) -> Callable[[ModelRunner], None]:
    """A mistake: in each of these parts of a runner, an attribute has another value."""
    *way, name = path.split(".")

    def mutate(runner: ModelRunner) -> None:
        for part in parts(runner):
            setattr(reduce(getattr, way, part), name, value)

    return mutate


def check_fails(case: Case, runner: ModelRunner) -> None:
    """That the comparison sees the mistake in a runner."""
    driver = Driver(runner)
    seq = driver.add(case.prompts[1], OUTPUT)
    driver.run([seq], chunk=10)
    with pytest.raises(AssertionError):
        check(case, [seq], [1])


def check_greedy(model: ModelConfig, reference: Any, count: int = 16) -> None:
    """Compares greedy tokens of a checkpoint that may be packed with those of transformers' model
    with the same weights."""
    decoder = make_decoder(model, load_weights(model, torch.float32, CPU))
    driver = Driver(make_runner(decoder, capturer=None))
    tally, prompts = Tally(), ([3], [1, 4, 1, 5, 9, 2, 6], list(range(40)))
    sequences = [driver.add(prompt, count) for prompt in prompts]
    driver.run(sequences)
    for seq, prompt in zip(sequences, prompts, strict=True):
        compare(seq, generate(reference, prompt, count), tally)
    assert tally.tokens == count * len(prompts)
    assert len({token for seq in sequences for token in seq.outputs}) > 10


def check_longrope(case: Case) -> None:
    """Short and long factors are chosen by the longest sequence that the runner takes."""
    prompt = case.prompts[0][:7]
    expected = generate(case.model, prompt, OUTPUT)  # 31 tokens of 32: the short factors
    for max_model_len, equal in ((32, True), (33, False)):
        driver = Driver(case.runner(max_model_len=max_model_len))
        seq = driver.add(prompt, OUTPUT)
        driver.run([seq])
        if equal:
            check_tokens(seq.outputs, expected)
        else:
            with pytest.raises(AssertionError):
                check_tokens(seq.outputs, expected)
