"""Names of vLLM and earlier versions: errors with their replacements."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from inspect import signature
from typing import Any

import pytest

from asyncllm import LLM, AsyncLLMEngine, EngineConfig, InvalidRequestError, SamplingParams
from asyncllm.callbacks import stream_with_callbacks
from asyncllm.foreign_names import OUR_NAMES_BY_FOREIGN_NAME
from asyncllm.serving.chat_request import ChatRequest
from asyncllm.serving.completion_request import CompletionRequest
from asyncllm.serving.response_request import ResponseRequest
from asyncllm.testing import fake_engine, fake_llm

SETTINGS = {
    "cuda_graph_sizes": "cudagraph_capture_sizes",
    "enforce_eager": 'cuda_graphs="off"',
    "guided_decoding_backend": "structured_outputs_backend",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_blocks",
    "num_state_checkpoints": "num_state_snapshots",
    "tool_parser": "tool_call_parser",
}
SAMPLING = {
    "guided_choice": 'structured_outputs={"choice": …}',
    "guided_decoding": "structured_outputs",
    "guided_grammar": 'structured_outputs={"grammar": …}',
    "guided_json": 'structured_outputs={"json": …}',
    "guided_json_object": 'structured_outputs={"json_object": True}',
    "guided_regex": 'structured_outputs={"regex": …}',
}
MAKES: dict[str, Callable[..., Any]] = {
    "AsyncLLMEngine": AsyncLLMEngine,
    "AsyncLLMEngine with a config": lambda **given: AsyncLLMEngine(config=EngineConfig(), **given),
    "LLM": LLM,
    "EngineConfig": EngineConfig,
    "with_overrides": lambda **given: EngineConfig().with_overrides(given),
    "fake_engine": lambda **given: fake_engine("x", **given),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_setting(make, name):
    with pytest.raises(InvalidRequestError) as caught:
        make(**{name: 1})
    assert str(caught.value) == f"{name}: no such setting, expected {SETTINGS[name]}"
    assert caught.value.param == name


MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("name", [*SAMPLING, "params"])
async def test_a_sampling_parameter(name):
    given: dict[str, Any] = {name: SamplingParams()}
    ours = (SAMPLING | {"params": "sampling_params"})[name]
    async with fake_engine("x") as engine:
        with fake_llm("x") as llm:
            submits: list[Callable[[], Any]] = [
                lambda: SamplingParams(**given),
                lambda: replace(SamplingParams(), **given),
                lambda: engine.stream("x", **given),
                lambda: engine.chat(MESSAGES, **given),
                lambda: llm.generate("x", **given),
                lambda: llm.generate(["x", "y"], **given),
                lambda: llm.chat(MESSAGES, **given),
                lambda: llm.stream("x", **given),
                lambda: llm.stream_chat(MESSAGES, **given),
            ]
            for submit in submits:
                with pytest.raises(InvalidRequestError) as caught:
                    submit()
                said = f"{name}: no such sampling parameter, expected {ours}"
                assert (str(caught.value), caught.value.param) == (said, name)
        for read in (engine.generate("x", **given), stream_with_callbacks(engine, "x", **given)):
            with pytest.raises(InvalidRequestError) as caught:
                await (read if hasattr(read, "send") else read.result())
            assert caught.value.param == name
        assert engine.stats().num_requests == 0


def test_every_counterpart_exists():
    assert OUR_NAMES_BY_FOREIGN_NAME["setting"] == SETTINGS
    assert OUR_NAMES_BY_FOREIGN_NAME["sampling parameter"] == SAMPLING | {
        "params": "sampling_params"
    }
    for kind, known in {"setting": EngineConfig, "sampling parameter": SamplingParams}.items():
        names = OUR_NAMES_BY_FOREIGN_NAME[kind]
        here = {field.name for field in fields(known)}
        assert not here & names.keys()
        if kind == "sampling parameter":
            here |= signature(AsyncLLMEngine.stream).parameters.keys()
        assert {ours.partition("=")[0] for ours in names.values()} <= here
    assert EngineConfig(cuda_graphs="off").cuda_graphs == "off"
    for kind, value in {"json": {}, "regex": "a", "choice": ["a"], "json_object": True}.items():
        found = SamplingParams(structured_outputs={kind: value}).structured_outputs
        assert found.kind == kind


@pytest.mark.parametrize("body", [ChatRequest, CompletionRequest, ResponseRequest])
def test_every_counterpart_of_a_body_exists(body):
    names = OUR_NAMES_BY_FOREIGN_NAME[body.FOREIGN_NAMES_SECTION]
    assert not body.model_fields.keys() & names.keys()
    assert not body.ACCEPTED_VALUES.keys() & names.keys()
    ours = {re.split("[=;]", one)[0] for name, one in names.items() if "." not in name}
    assert ours - {"a message with the role system"} <= body.model_fields.keys()


def test_unknown_names_list_known_ones():
    with pytest.raises(InvalidRequestError, match=r"^best_of: no such sampling.*there are allowed"):
        SamplingParams(best_of=2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(InvalidRequestError, match=r"^swap_space: no such setting.*are async_sch"):
        EngineConfig(swap_space=4)  # pyright: ignore[reportCallIssue]


async def test_the_names_work():
    greedy = SamplingParams(max_tokens=2)
    async with fake_engine("abcd") as engine:
        for asked in (
            engine.generate("x", sampling_params=greedy),
            engine.chat(MESSAGES, sampling_params=greedy),
            engine.stream("x", sampling_params=greedy),
            stream_with_callbacks(engine, "x", sampling_params=greedy).result(),
        ):
            assert (await asked).text == "ab"
    with fake_llm("abcd") as llm:
        assert llm.generate("x", sampling_params=greedy).text == "ab"
        both = llm.generate(["x"] * 2, sampling_params=[greedy] * 2)
        assert [one.text for one in both] == ["ab"] * 2
        assert llm.chat(MESSAGES, sampling_params=greedy).text == "ab"
        assert llm.stream("x", sampling_params=greedy).result().text == "ab"
        assert llm.stream_chat(MESSAGES, sampling_params=greedy).result().text == "ab"
    config = EngineConfig(cudagraph_capture_sizes=(4, 2), tool_call_parser="hermes")
    assert (config.cudagraph_capture_sizes, config.tool_call_parser) == ((2, 4), "hermes")
