"""Engines on the fake executor, without a model."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncllm import AsyncLLMEngine, EngineConfig, EngineGroup
from asyncllm.core.channel import Channel
from asyncllm.core.engine_core import EngineCore
from asyncllm.core.executor import Executor, ExecutorInfo
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.errors import InvalidRequestError
from asyncllm.runtime.engine_thread import EngineThread
from asyncllm.runtime.loading import LoadedModel, Loader
from asyncllm.runtime.mailbox import LoopMailbox
from asyncllm.sampling_params import SamplingParams
from asyncllm.stream import TokenStream
from asyncllm.testing import FakeExecutor
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.detokenizer import Detokenizer
from asyncllm.text.template_input import TemplateInput

VOCAB_SIZE = 1000


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(f"{token_id} " for token_id in token_ids)


class WordDecoder:
    """Token 17 is the text "17 "."""

    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def flush(self) -> str:
        return ""


class FakeTokenizer:
    """Every word is a number, and every number a token: "3 5 8" is [3, 5, 8]."""

    chat_template = ChatTemplate({}, {})
    fingerprint = b"numbers"
    response_template = None

    def __init__(self) -> None:
        self.gate: Any = None
        self.failing_tokens: dict[int, type[BaseException]] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if self.gate is not None:
            self.gate.wait(10)
        try:
            return [int(word) for word in text.split()]
        except ValueError as error:
            raise InvalidRequestError(f"prompt: {error}", param="prompt") from error

    def encode_short_texts(self, texts: Sequence[str]) -> Iterator[list[int]]:
        return (self.encode(text, add_special_tokens=False) for text in texts)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return text_of(token_ids)

    def id_to_bytes(self, token_id: int) -> bytes:
        return f"{token_id} ".encode()

    def id_to_text_and_bytes(self, token_id: int) -> tuple[str, list[int]]:
        data = self.id_to_bytes(token_id)
        return data.decode(), list(data)

    def encode_chat(
        self,
        conversation: TemplateInput,
        max_tokens: int | None = None,
        *,
        split_special_tokens: bool = True,
        none_if_slow: bool = False,
    ) -> list[int]:
        return self.encode(" ".join(m["content"] for m in conversation.values["messages"]))

    def detokenizer(
        self, params: Any, prompt_token_ids: Sequence[int] = (), *, stop: Any = None
    ) -> Detokenizer:
        return Detokenizer(
            FailingDecoder(self.failing_tokens),
            stop=stop or params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def min_num_tokens(self, num_characters: int) -> int:
        return (num_characters + 3) // 4


class FailingDecoder(WordDecoder):
    """Raises on tokens that the test names."""

    def __init__(self, failing: dict[int, type[BaseException]]) -> None:
        self._failing = failing

    def push(self, token_id: int) -> str:
        if token_id in self._failing:
            raise self._failing[token_id](f"token {token_id} has no text")
        return super().push(token_id)


@dataclass
class FakeModelConfig:
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: dict[str, Any] = field(default_factory=dict)


@dataclass
class Fake:
    """What a test holds on to."""

    info: ExecutorInfo
    executor: FakeExecutor
    tokenizer: FakeTokenizer
    model_config: FakeModelConfig
    load_error: BaseException | None = None
    load_gate: Any = None

    def load(self, config: EngineConfig, progress: Any) -> LoadedModel:
        progress(0, 100)
        if self.load_gate is not None:
            self.load_gate.wait(10)
        progress(100, 100)
        if self.load_error is not None:
            raise self.load_error
        # A fresh executor for each start, as a real loader makes one.
        return LoadedModel(self.executor, self.tokenizer, self.model_config)

    def engine(self, **overrides: Any) -> AsyncLLMEngine:
        return engine_with(self.load, **overrides)

    @property
    def executors(self) -> list[FakeExecutor]:
        return [self.executor]


@dataclass
class FakeGroup:
    """Fakes whose engines are one group."""

    rigs: list[Fake]

    @property
    def executors(self) -> list[FakeExecutor]:
        return [rig.executor for rig in self.rigs]

    @property
    def executor(self) -> FakeExecutor:
        """Any of them: all have the same tokens."""
        return self.rigs[0].executor

    def engine(self, retries: int = 0, **overrides: Any) -> EngineGroup:
        return EngineGroup([rig.engine(**overrides) for rig in self.rigs], retries=retries)


def fake_group(size: int = 2, **limits: Any) -> FakeGroup:
    """Arguments as for ``fake``."""
    return FakeGroup([fake(**limits) for _ in range(size)])


def engine_with(load: Loader, **overrides: Any) -> AsyncLLMEngine:
    """An engine whose model ``load`` brings."""
    return AsyncLLMEngine._with_loader(load, **overrides)


def engine_on(executor: Executor, **overrides: Any) -> AsyncLLMEngine:
    """An engine on an executor, with numbers for words."""
    loaded = LoadedModel(executor, FakeTokenizer(), FakeModelConfig())
    return engine_with(lambda config, progress: loaded, **overrides)


def thread_of(engine: AsyncLLMEngine) -> EngineThread:
    """The thread of a started engine."""
    assert engine._thread is not None
    return engine._thread


def core_of(engine: AsyncLLMEngine) -> EngineCore:
    """The core of a started engine."""
    return thread_of(engine).core


def channel_of(stream: TokenStream) -> Channel:
    """What the engine thread has written for a stream, and its reader has not read."""
    return stream._channel


def sampling_of(stream: TokenStream) -> SamplingParams:
    """The checked parameters of a submitted stream."""
    return stream._request.sampling


def engine_number(stream: TokenStream) -> int:
    """The number of the engine of a group that has the stream's request."""
    return stream._group.engine


def connections_of(server: Any) -> set[Any]:
    """The open connections of a server that has started."""
    return server._server.server_state.connections


def mailbox_of_this_loop(engine: AsyncLLMEngine) -> LoopMailbox:
    """Where the engine tells the running loop of what its streams have."""
    return engine._mailboxes.of_running_loop()


def engines_of(engine: AsyncLLMEngine) -> list[AsyncLLMEngine]:
    """The engines of a group, or the one engine."""
    return list(engine.engines.values()) if isinstance(engine, EngineGroup) else [engine]


def fake(
    *,
    num_blocks: int = 65,
    block_size: int = 4,
    max_model_len: int | None = None,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    pipeline_depth: int = 1,
    max_tokens_per_row: int = 1,
    step_time: float = 0.0,
    eos_token_ids: tuple[int, ...] = (),
    record: bool = False,
    gate: int | None = None,
) -> Fake:
    """Limits of the fake executor; ``gate`` is how many steps may end before its ``release``."""
    info = ExecutorInfo(
        vocab_size=VOCAB_SIZE,
        num_blocks=num_blocks,
        kv_groups=(KVCacheSpec((0,), block_size),),
        max_model_len=max_model_len or (num_blocks - 1) * block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        pipeline_depth=pipeline_depth,
        max_tokens_per_row=max_tokens_per_row,
    )
    executor = FakeExecutor(info, step_time=step_time, record=record)
    if gate is not None:
        executor.gate = threading.Semaphore(gate)
    return Fake(info, executor, FakeTokenizer(), FakeModelConfig(eos_token_ids))


def entered(rig: Fake) -> list[int]:
    """First prompt tokens of the requests, in the order in which they got their slots; needs
    ``record``."""
    return [a.token_ids[0] for batch in rig.executor.batches for a in batch.assignments]
