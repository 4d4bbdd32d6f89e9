"""fake_engine: makes an engine with scripted answers, for tests of applications."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncllm import validation as check
from asyncllm.checkpoint.progress import ProgressCallback
from asyncllm.config import EngineConfig
from asyncllm.core.batch import StepBatch, StepResult
from asyncllm.core.executor import ExecutorInfo
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.engine import AsyncLLMEngine
from asyncllm.errors import KVCacheTooSmallError, with_cause
from asyncllm.llm import LLM
from asyncllm.runtime.loading import LoadedModel
from asyncllm.testing.byte_tokenizer import TURN_END, TURN_START, byte_tokenizer
from asyncllm.testing.fake_executor import FakeExecutor
from asyncllm.text.tokenizer import Tokenizer

Answer = str | Exception | Sequence[str | int | Exception]
"""An output's text; or an exception that ends its request; or a sequence of texts, token ids and
exceptions. An exception in a sequence ends the request after the items before it."""

Answers = Answer | Mapping[str, Answer] | Callable[[str], Answer]
"""One answer for every prompt; or a mapping from prompt to answer; or a function from prompt to
answer. For a conversation, the prompt is the user's last message."""

_ACCEPTED_ANSWERS_TEXT = "a text, an exception, or a sequence of texts, token ids and exceptions"
_USER_TURN_HEADER = b"user\n"


@dataclass(frozen=True)
class FakeModelConfig:
    """The fields of ModelConfig that engines, servers and commands read."""

    max_position_embeddings: int
    vocab_size: int = TURN_END + 1
    eos_token_ids: tuple[int, ...] = (TURN_END,)
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)


class ScriptedExecutor(FakeExecutor):
    """FakeExecutor that returns scripted tokens and ignores sampling parameters. It computes
    the fake KV cache too, so a read of a block that no step wrote raises an error.

    Args:
        info: limits that the executor reports to the engine.
        answers: the script. A request whose prompt has no answer fails.
    """

    def __init__(self, info: ExecutorInfo, tokenizer: Tokenizer, answers: Answers) -> None:
        super().__init__(info)
        self._tokenizer = tokenizer
        self._script = answers
        self._answers: dict[tuple[str, int | None], list[int | Exception]] = {}
        self._rows: dict[int, tuple[tuple[str, int | None], int]] = {}

    def _execute(self, batch: StepBatch) -> StepResult:
        for assignment in batch.assignments:
            length = assignment.num_prompt_tokens
            # The outputs of one request have the same request id, but different seeds.
            output = assignment.request_id, assignment.sampling.seed
            self._rows[assignment.req_index] = output, length
            # A preempted request returns with the tokens sampled so far, and continues its answer.
            if len(assignment.token_ids) == length or output not in self._answers:
                self._answers[output] = self._answer_tokens(assignment.token_ids[:length])
        return super()._execute(batch)

    def _token_digests(self, batch: StepBatch, row: int, digests: Sequence[int]) -> Sequence[int]:
        output, num_prompt_tokens = self._rows[batch.req_indices[row]]
        request_id, answer = output[0], self._answers[output]
        position = batch.starts[row] + batch.counts[row] - num_prompt_tokens
        token_id = answer[position] if position < len(answer) else TURN_END
        if isinstance(token_id, Exception):
            self.row_errors[request_id] = token_id
            token_id = TURN_END
        else:
            self.row_errors.pop(request_id, None)
        return (token_id,)

    def _answer_tokens(self, prompt: Sequence[int]) -> list[int | Exception]:
        try:
            answer = self._find_answer(self._question_text(prompt))
            if isinstance(answer, (str, Exception)):
                return self._piece_tokens(answer)
            if answer is None:
                raise check.value_error("answers", answer, _ACCEPTED_ANSWERS_TEXT)
            pieces = check.bounded_tuple(
                "answers", answer, _ACCEPTED_ANSWERS_TEXT, self.info.max_model_len
            )
            return [token for piece in pieces for token in self._piece_tokens(piece)]
        except Exception as error:  # ``answers`` is the test's own function, and may raise.
            return [error]
        except BaseException as error:
            # A BaseException that is not an Exception would end the engine instead of the request.
            return [with_cause(RuntimeError(f"answers raised {check.describe(error)}"), error)]

    def _piece_tokens(self, piece: str | int | Exception) -> list[int | Exception]:
        if isinstance(piece, str):
            return [*self._tokenizer.encode(piece)]
        if isinstance(piece, Exception):
            return [piece]
        return list(check.token_ids("answers", [piece], self.info.vocab_size))

    def _find_answer(self, question: str) -> Answer:
        if callable(self._script):
            return self._script(question)
        if not isinstance(self._script, Mapping):
            return self._script
        if question not in self._script:
            known = ", ".join(map(repr, self._script))
            raise LookupError(f"no answer to {question!r}, expected one of {known}")
        return self._script[question]

    def _question_text(self, prompt: Sequence[int]) -> str:
        for start in reversed(range(len(prompt))):
            begin = start + 1 + len(_USER_TURN_HEADER)
            if prompt[start] == TURN_START and list(prompt[start + 1 : begin]) == list(
                _USER_TURN_HEADER
            ):
                return self._tokenizer.decode(prompt[begin : prompt.index(TURN_END, begin)])
        return self._tokenizer.decode(prompt, skip_special_tokens=False)


def fake_engine(
    answers: Answers,
    *,
    step_time: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
    gate: threading.Semaphore | None = None,
    fail_at: Mapping[int, BaseException] | None = None,
    load_error: BaseException | None = None,
    **overrides: Any,
) -> AsyncLLMEngine:
    """Make a real engine on a fake device, with scripted answers.

    It needs no model and no torch, and yields one token (one byte) per step. Start it like any
    other engine.

    Args:
        answers: an ``Answer`` for all prompts, or a mapping or function from prompt to ``Answer``.
            EOS follows each answer. A function is called once per output of a request.
        step_time: duration of each step in seconds.
        sleep: function that is called with ``step_time`` in each step, on the engine thread. A test
            may pass one that only adds up the time.
        gate: semaphore that each step acquires. A test must release it often enough for the engine
            to close.
        fail_at: exceptions by step number, from 0; the device raises them in these steps.
        load_error: exception that starting the engine raises.
        overrides: fields of EngineConfig. Those of the scheduler, of names and of the chat template
            apply; those of weights and devices have no effect; logits processors are refused.
    """
    config = EngineConfig(**overrides)
    faults = {} if fail_at is None else fail_at
    if not isinstance(faults, Mapping):
        raise check.value_error("fail_at", faults, "a mapping of step to exception, or None")
    for step, fault in faults.items():
        check.integer("fail_at", step, 0)
        if not isinstance(fault, BaseException):
            raise check.value_error("fail_at", fault, "an exception for each step")

    def load(config: EngineConfig, progress: ProgressCallback) -> LoadedModel:
        if load_error is not None:
            raise load_error
        tokenizer = byte_tokenizer()
        if config.chat_template is not None:
            tokenizer = tokenizer.with_chat_template(config.chat_template)
        tokenizer.chat_template.compile()
        info = _executor_info(config, tokenizer.vocab_size)
        executor = ScriptedExecutor(info, tokenizer, answers)
        executor.gate, executor.step_time, executor.sleep = gate, step_time, sleep
        executor.faults.update(faults)
        return LoadedModel(executor, tokenizer, FakeModelConfig(info.max_model_len))

    return AsyncLLMEngine._with_loader(load, config=config)


def fake_llm(answers: Answers, **options: Any) -> LLM:
    """Make a started ``LLM`` on a fake engine; arguments as for ``fake_engine``."""
    engine = fake_engine(answers, **options)
    engine._start_blocking()
    llm = LLM(engine=engine)
    llm._owns_engine = True
    return llm


def _executor_info(config: EngineConfig, vocab_size: int) -> ExecutorInfo:
    block_size = config.block_size or 16
    num_blocks = config.num_blocks or 1024
    capacity = num_blocks * block_size
    max_model_len = config.max_model_len or min(capacity, 4096)
    if max_model_len > capacity:
        raise KVCacheTooSmallError(
            f"max_model_len={max_model_len}: expected at most {capacity}, the tokens of "
            f"num_blocks={num_blocks} of {block_size}"
        )
    budget = config.max_num_batched_tokens
    return ExecutorInfo(
        vocab_size=vocab_size,
        num_blocks=num_blocks + 1,
        kv_groups=(KVCacheSpec((0,), block_size),),
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs or 64,
        max_num_batched_tokens=2048 if budget == "auto" else budget,
        pipeline_depth=2 if config.async_scheduling else 1,
    )
