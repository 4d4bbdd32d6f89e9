"""Batched logits processors: updates, claims and errors."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncllm import (
    AsyncLLMEngine,
    BatchUpdate,
    EngineConfig,
    EngineError,
    EngineOverloadedError,
    InvalidRequestError,
    LogitsProcessor,
    RequestError,
    SamplingParams,
)
from asyncllm.core import waiting_texts
from asyncllm.core.batch import SlotAssignment
from asyncllm.core.in_process import picklable_params
from asyncllm.gpu.graph.cuda_graphs import GraphCapturer
from asyncllm.gpu.model_runner import ModelRunner
from asyncllm.gpu.models.decoder import Decoder
from asyncllm.gpu.sample import batched_processors
from asyncllm.gpu.sample.batched_processors import BatchedProcessors, make_processors
from asyncllm.logits_processor import applicable_processors
from asyncllm.runtime.loading import LoadedModel, load_model
from asyncllm.testing import fake_engine
from tests.dummy_runner import MODEL
from tests.fakes import engine_on, engine_with
from tests.pickling_executor import Pickling
from tests.sampling_bench import Bench
from tests.static_runner import LateStream, make_decoder, make_runner

CPU = torch.device("cpu")
CONFIG = EngineConfig(max_num_seqs=8)


class Force(LogitsProcessor):
    """Token ``force`` plus the number of output tokens; raises where it is told to."""

    extra_args = ("force", "raise_at", "stop_at", "update_raises")

    def __init__(self, config: EngineConfig, device: Any, is_pin_memory: bool) -> None:
        assert isinstance(device, torch.device)
        assert not is_pin_memory
        self.max_num_seqs = config.max_num_seqs
        self.requests: dict[int, tuple[Mapping[str, Any], list[int], Sequence[int]]] = {}
        self.updates: list[BatchUpdate | None] = []
        self.applied: list[list[int]] = []

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        force = (sampling_params.extra_args or {}).get("force", 0)
        if not isinstance(force, int) or not 0 <= force < 100:
            raise ValueError(f"force={force}: expected a token from 0 to 99")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.updates.append(batch_update)
        if batch_update is None:
            return
        for index in batch_update.removed:
            del self.requests[index]
        for index, params, prompt, output in batch_update.added:
            assert params.extra_args is not None
            if "update_raises" in params.extra_args:
                raise SystemExit(4)
            self.requests[index] = params.extra_args, list(prompt), output
        assert len(self.requests) >= batch_update.batch_size
        assert not batch_update.moved

    def apply(self, logits: Tensor, indices: Any) -> Any:
        self.applied.append(list(indices))
        assert logits.shape[0] == len(indices)
        for row, index in enumerate(indices):
            args, _, output = self.requests[index]
            if args.get("raise_at") == len(output):
                logits[:] = torch.nan
                raise KeyboardInterrupt
            if args.get("stop_at") == len(output):
                raise StopIteration
            logits[row] = -torch.inf
            logits[row, (args.get("force", 0) + len(output)) % 100] = 0.0
        return logits


class Negate(LogitsProcessor):
    """Of every request that does not ask it not to."""

    extra_args = ("keep",)

    def __init__(self, config: EngineConfig, device: Any, is_pin_memory: bool) -> None:
        self.seen = 0

    @classmethod
    def claims(cls, sampling_params: SamplingParams) -> bool:
        return "keep" not in (sampling_params.extra_args or {})

    def is_argmax_invariant(self) -> bool:
        return True  # which is a lie, so that it shows where it has no part

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass

    def apply(self, logits: Tensor, indices: Any) -> Any:
        self.seen += len(indices)
        return -logits


class Broken(Negate):
    def __init__(self, config: EngineConfig, device: Any, is_pin_memory: bool) -> None:
        raise OSError("no such file: rules.txt")


def force() -> Force:
    return Force(CONFIG, CPU, False)


@pytest.fixture(scope="module")
def decoder(one_thread: None) -> Decoder:
    return make_decoder(MODEL)


def engine_of(runner: ModelRunner) -> AsyncLLMEngine:
    return engine_on(runner)


def runners(decoder: Decoder, make: Any, **settings: Any) -> dict[str, ModelRunner]:
    late: dict[str, Any] = {"capturer": GraphCapturer(), "stream": LateStream(), "sizes": (2, 8)}
    return {
        "cpu": make_runner(decoder, capturer=None, processors=make(), depth=1, **settings),
        "late": make_runner(decoder, processors=make(), **late, **settings),
    }


def test_a_request_is_claimed_by_its_extra_args():
    processors = [force(), Negate(CONFIG, CPU, False)]

    def found(**fields: Any) -> tuple[int, ...]:
        return applicable_processors(processors, SamplingParams(**fields))

    assert found(extra_args={"force": 3}) == (0, 1)
    assert found(extra_args={"force": 3, "keep": True}) == (0,)
    assert found() == (1,)
    assert found(extra_args={"keep": True}) == ()
    # An argmax-invariant one has no part in a greedy request.
    assert found(temperature=0.0) == ()
    assert found(temperature=0.0, extra_args={"force": 3}) == (0,)
    with pytest.raises(InvalidRequestError, match=r"'fource'.*\(force, keep, raise_at, stop_at"):
        found(extra_args={"fource": 3})
    with pytest.raises(InvalidRequestError, match="Force refused it: ValueError: force=100"):
        found(extra_args={"force": 100})
    with pytest.raises(InvalidRequestError, match="none: the engine has no such"):
        applicable_processors((), SamplingParams(extra_args={"force": 3}))


@pytest.mark.parametrize(
    "value",
    [
        5,
        [("a", 1)],
        {1: 2},
        {"a": object()},
        {"a": float("nan")},
        {"a": 2**64},
        {"a": "x" * 2**16},
        {"a": [0] * 2**16},
        {"a": np.zeros(2)},
        {"\ud800": 1},
    ],
)
def test_extra_args_are_plain_data(value):
    with pytest.raises(InvalidRequestError, match="a dict of plain data") as caught:
        SamplingParams(extra_args=value)
    assert caught.value.param == "extra_args"


def test_an_output_does_not_copy_extra_args():
    """Each would do so on the engine thread, when it is admitted."""
    params = SamplingParams(extra_args={"a": [[] for _ in range(100)]}, logit_bias={1: 2.0})
    assert picklable_params(params).extra_args is params.extra_args


def test_extra_args_are_copied_and_bounded_in_depth():
    given: dict[str, Any] = {"a": [1, np.int64(2), {"b": (None, True, "x")}], "c": np.float32(0.5)}
    params = SamplingParams(extra_args=given)
    given["a"].append(3)
    assert params.extra_args == {"a": [1, 2, {"b": [None, True, "x"]}], "c": 0.5}
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidRequestError, match="16 deep"):
        SamplingParams(extra_args={"a": endless})


def assigned(
    req_index: int, output: list[int], claiming_processors: tuple[int, ...]
) -> SlotAssignment:
    params = SamplingParams(temperature=0.0, seed=0, extra_args={"force": 10 * req_index})
    params = params.resolve({}, {}, lambda: 0)
    tokens = [1, 2, *output]
    return SlotAssignment(
        req_index,
        f"r{req_index}",
        tokens,
        2,
        ([1],),
        params,
        claiming_processors=claiming_processors,
    )


def test_state_follows_the_batch_and_outputs_grow():
    processor, bench = force(), Bench(100)
    bench.sampler.batched_processors = BatchedProcessors([processor])

    def enter(
        req_index: int, output: list[int], claiming_processors: tuple[int, ...] = (0,)
    ) -> None:
        assignment = assigned(req_index, output, claiming_processors)
        bench.assign(assignment)
        bench.length[req_index] = 2 + len(output)

    def sample(*req_indices: int) -> list[int]:
        logits = torch.zeros(len(req_indices), 100)
        logits[:, 99] = 1.0
        tokens = bench.sample(logits, list(req_indices)).token_ids.tolist()
        bench.append(list(req_indices), tokens)
        return tokens

    enter(1, [])
    enter(2, [], claiming_processors=())
    enter(3, [7, 7])  # preempted before
    assert sample(2, 3, 1) == [99, 32, 10]
    assert processor.applied == [[3, 1]]
    assert sample(2) == [99]
    assert len(processor.applied) == 1
    assert sample(1, 3) == [11, 33]
    assert processor.requests[3][1:] == ([1, 2], [7, 7, 32])
    bench.sampler.release(1)
    enter(1, [5])
    enter(4, [])
    bench.sampler.release(4)
    assert sample(1) == [11]
    first, none, last = processor.updates
    assert first is not None
    assert last is not None
    assert none is None
    assert (list(first.removed), [one[0] for one in first.added]) == ([], [1, 3])
    assert (list(last.removed), [one[0] for one in last.added]) == ([1], [1])
    bench.sampler.release(1)
    assert sample(3) == [34]
    assert set(processor.requests) == {3}


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda x: x[:-1], "tensor of shape"),
        (lambda x: None, "NoneType"),
        (lambda x: x * torch.nan, "not finite"),
        (lambda x: (x.untyped_storage().resize_(0), x)[1], "storage"),
        (lambda x: x.to("meta"), "logits processor Odd failed"),
    ],
)
def test_the_result_of_apply_is_checked(made, says):
    class Odd(Negate):
        def apply(self, logits: Tensor, indices: Any) -> Any:
            return made(logits)

    bench = Bench(100)
    bench.sampler.batched_processors = BatchedProcessors([Odd(CONFIG, CPU, False)])
    for req_index, claimed in enumerate([(), (0,), (0,), ()]):
        assignment = assigned(req_index, [], claimed)
        bench.assign(assignment)
        bench.length[req_index] = 2
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(4))
    output = bench.sample(logits, [0, 1, 2, 3])
    best = logits.argmax(-1).tolist()
    assert output.token_ids.tolist() == [best[0], -1, -1, best[3]]
    assert set(output.errors) == {1, 2}
    assert all(says in str(error) for error in output.errors.values())


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_the_same_tokens_on_every_path(decoder):
    """Two that are claimed among two that are not, which are in every step of a device that runs
    ahead; with a processor of their own behind it, and preempted."""
    asked = [
        {},
        {"extra_args": {"force": 20}},
        {"extra_args": {"force": 50}, "logits_processors": [lambda _, row: row.roll(1)]},
        {"repetition_penalty": 1.3},
    ]
    found: dict[str, list[Any]] = {}
    for name, runner in runners(decoder, lambda: [force()], num_blocks=12).items():
        async with engine_of(runner) as engine:
            await engine.pause()
            streams = [
                engine.stream([3 + i, 5, 8], temperature=0.0, max_tokens=12, **fields)
                for i, fields in enumerate(asked)
            ]
            await engine.resume()
            found[name] = [(await one.result()).token_ids for one in streams]
            assert engine.stats().num_preemptions > 0
    assert found["cpu"] == found["late"]
    assert list(found["late"][1]) == list(range(20, 32))
    assert list(found["late"][2]) == list(range(51, 63))
    plain = make_runner(decoder, capturer=None, depth=1)
    async with engine_of(plain) as engine:
        for i in (0, 3):
            alone = await engine.generate([3 + i, 5, 8], temperature=0.0, max_tokens=12, **asked[i])
            assert alone.token_ids == found["late"][i]


@pytest.mark.asyncio(loop_factories=["asyncio"])
@pytest.mark.parametrize("bad", [{"raise_at": 3}, {"stop_at": 3}, {"update_raises": True}])
@pytest.mark.parametrize("path", ["cpu", "late"])
async def test_raising_processor_ends_its_claimed_requests(decoder, bad, path):
    runner = runners(decoder, lambda: [force(), Negate(CONFIG, CPU, False)])[path]
    kept = {"keep": True}
    async with engine_of(runner) as engine:
        await engine.pause()  # so that all are in one batch
        streams = [
            engine.stream([4 + i, 9], temperature=0.8, seed=i, max_tokens=8, extra_args=args)
            for i, args in enumerate([kept, kept | {"force": 7}, kept | bad, {}])
        ]
        await engine.resume()
        results = await asyncio.gather(*(s.result() for s in streams), return_exceptions=True)
        for result in results[1:3]:
            assert type(result) is RequestError
            assert "logits processor Force failed" in str(result.__cause__)
        for result in (results[0], results[3]):
            assert not isinstance(result, BaseException)
            assert len(result.token_ids) == 8
        # The processor is as good as before for the next.
        again = await engine.generate([1], temperature=0.0, max_tokens=3, extra_args={"force": 2})
        assert list(again.token_ids) == [2, 3, 4]
        stats = engine.stats()
        assert (stats.num_failed, stats.num_free_blocks) == (2, stats.num_blocks)
        with pytest.raises(InvalidRequestError, match="force=-1"):
            engine.stream([1], extra_args={"force": -1})


def test_processors_come_from_classes_names_and_entry_points(monkeypatch):
    here = Force.__module__
    config = EngineConfig(logits_processors=[Force, f"{here}:Force"], max_num_seqs=3)
    (found,) = make_processors(config, CPU)
    assert isinstance(found, Force)
    assert found.max_num_seqs == 3
    entry = EntryPoint("negate", f"{here}:Negate", "asyncllm.logits_processors")

    def entry_points(*, group: str) -> list[EntryPoint]:
        return [entry] if group == "asyncllm.logits_processors" else []

    monkeypatch.setattr(batched_processors, "entry_points", entry_points)
    assert [type(one) for one in make_processors(config, CPU)] == [Force, Negate]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (f"{__name__}:Broken", r"test_logits_processors:Broken'.*OSError: no such file: rules"),
        (Broken, "Broken cannot be made: OSError: no such file"),
        ("nowhere_at_all:Force", "ModuleNotFoundError"),
        (f"{__name__}:Nothing", "AttributeError"),
        (f"{__name__}:CONFIG", "no subclass of asyncllm.LogitsProcessor"),
    ],
)
def test_a_processor_that_cannot_be_made_is_named(given, says):
    with pytest.raises(EngineError, match=says):
        make_processors(EngineConfig(logits_processors=[given]), CPU)


@pytest.mark.parametrize("given", [5, ["no colon"], [int], [3], "a:B"])
def test_a_configuration_of_anything_else_is_refused(given):
    with pytest.raises(InvalidRequestError, match="logits_processors"):
        EngineConfig(logits_processors=given)


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_extra_args_of_waiting_requests_count_once_where_they_are_shared(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_texts, "MAX_WAITING_TEXT_BYTES", 2**18)
    runner = make_runner(decoder, capturer=None, processors=[force()], depth=1)
    args = {"raise_at": [0.5] * 1000}  # Counts as 80,297 bytes.
    async with engine_of(runner) as engine:
        await engine.pause()
        shared = SamplingParams(extra_args=args)
        streams = [engine.stream([1, 2], shared) for _ in range(5)]
        streams += [engine.stream([1, 2], extra_args=args) for _ in range(2)]
        with pytest.raises(EngineOverloadedError, match="bytes of long texts"):
            engine.stream([1, 2], extra_args=args)
        for stream in streams:
            stream.abort()


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_the_packaged_model_with_a_processor():
    settings = {"num_blocks": 60, "max_model_len": 64, "num_threads": 1}
    page = (Path(__file__).parents[1] / "docs" / "sampling.md").read_text()
    scope: dict[str, Any] = {}
    exec(re.findall(r"^class Boost.*?(?=^async def)", page, re.S | re.M)[0], globals(), scope)
    processors = [Force, scope["Boost"]]
    async with AsyncLLMEngine(logits_processors=processors, **settings) as engine:
        done = await engine.generate([3, 5], extra_args={"force": 40}, max_tokens=4)
        assert list(done.token_ids) == [40, 41, 42, 43]
        alone = await engine.generate([3, 5], temperature=0.0, max_tokens=4)
        boosts = [{"boost": int(token)} for token in alone.token_ids[:2]]
        first, other = [
            await engine.generate([3, 5], temperature=0.0, max_tokens=4, extra_args=args)
            for args in boosts
        ]
        assert first.token_ids[0] == alone.token_ids[0]
        assert other.token_ids.count(alone.token_ids[1]) >= alone.token_ids.count(
            alone.token_ids[1]
        )
        with pytest.raises(InvalidRequestError, match="boost: expected a token id"):
            engine.stream([3, 5], extra_args={"boost": "x"})

    def behind_a_pickle(config: EngineConfig, progress: Any) -> LoadedModel:
        loaded = load_model(config, progress)
        return LoadedModel(Pickling(loaded.executor), loaded.tokenizer, loaded.model_config)

    with pytest.raises(InvalidRequestError, match=r"logits_processors.*another process"):
        await engine_with(behind_a_pickle, logits_processors=[Force], **settings).start()
    async with engine_with(behind_a_pickle, **settings) as engine:
        with pytest.raises(InvalidRequestError, match=r"extra_args.*another process"):
            engine.stream([1], extra_args={"force": 1})
    with pytest.raises(InvalidRequestError, match="or has no model"):
        await fake_engine("hello", logits_processors=[Force]).start()
    with pytest.raises(EngineError, match="Broken cannot be made"):
        await AsyncLLMEngine(logits_processors=[Broken], **settings).start()
