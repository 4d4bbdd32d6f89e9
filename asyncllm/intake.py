"""Intake: from the arguments of a call to a request in the engine's queue."""

from __future__ import annotations

import math
import random
import uuid
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncllm.core.channel import Channel, OnSlow
from asyncllm.core.delivery import Output
from asyncllm.core.engine_core import EngineCore
from asyncllm.core.observer import Observers, Submission
from asyncllm.core.request import Request
from asyncllm.errors import ContextLengthExceededError, InvalidRequestError
from asyncllm.hosts import MailboxRegistry
from asyncllm.loading import LoadedModel
from asyncllm.sampling_params import SamplingParams
from asyncllm.stream import TokenStream
from asyncllm.template_input import TemplateInput
from asyncllm.text_worker import LONG_TEXT, TextWorker


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How a request is treated, whatever it asks; see ``AsyncLLMEngine.stream``.

    Raises:
        InvalidRequestError: for a value that makes no sense, with ``param`` set.
    """

    request_id: str | None = None
    priority: int = 0
    timeout: float | None = None
    max_unread: int = 256
    on_slow: OnSlow = "coalesce"
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        request_id, timeout = self.request_id, self.timeout
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise bad("request_id", request_id, "a non-empty string or None")
        if not _is_integer(self.priority):
            raise bad("priority", self.priority, "an integer; smaller is sooner")
        if timeout is not None and (
            isinstance(timeout, bool)
            or not isinstance(timeout, (int, float))
            or not 0 < timeout < math.inf
        ):
            raise bad("timeout", timeout, "a positive number of seconds or None")
        if not _is_integer(self.max_unread) or self.max_unread < 1:
            raise bad("max_unread", self.max_unread, "a number of tokens from 1")
        if self.on_slow not in ("coalesce", "pause", "abort"):
            raise bad("on_slow", self.on_slow, '"coalesce", "pause" or "abort"')
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise bad("cache_salt", self.cache_salt, "a string or None")


class Intake:
    """Turns prompts into requests of one running engine.

    Short texts are tokenised in the call. Long ones take their place in the queue at once and
    go to a worker thread: they keep their rank and hold nobody up.

    Args:
        policy: the scheduling policy; with "fcfs" a priority is refused.
        seed: of the seeds drawn for requests without one; None is the operating system's.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        core: EngineCore,
        mailboxes: MailboxRegistry,
        observers: Observers,
        *,
        policy: str,
        seed: int | None,
    ) -> None:
        self._loaded = loaded
        self._core = core
        self._mailboxes = mailboxes
        self._observers = observers
        self._policy = policy
        self._random = random.Random(seed)
        self._neutral_params = SamplingParams()
        self._worker = TextWorker("asyncllm-text")

    def prompt(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        sampling: dict[str, Any],
        options: RequestOptions,
    ) -> TokenStream:
        """Submits text or token ids."""
        asked = Submission("text_completion", prompt)
        if not isinstance(prompt, str):
            token_ids = _token_ids(prompt, self._loaded.executor.info.vocab_size)
            request = self._request(params, sampling, options)
            return self._submit(request, asked, token_ids)
        if not prompt:
            raise InvalidRequestError("prompt='': expected a non-empty prompt", param="prompt")
        request = self._request(params, sampling, options)
        tokenizer = self._loaded.tokenizer
        if len(prompt) < LONG_TEXT:
            return self._submit(request, asked, tokenizer.encode(prompt))
        least = tokenizer.min_tokens(len(prompt))
        self._check_length(least, "at least ")
        estimate = max(least, len(prompt) // 4)
        return self._submit_later(request, asked, estimate, lambda: tokenizer.encode(prompt))

    def conversation(
        self,
        messages: Sequence[dict[str, Any]],
        variables: dict[str, Any] | None,
        split_special_tokens: bool,
        params: SamplingParams | None,
        sampling: dict[str, Any],
        options: RequestOptions,
    ) -> TokenStream:
        """Submits messages, rendered by the model's chat template with ``variables``."""
        if variables is not None and (
            not isinstance(variables, dict) or not all(isinstance(k, str) for k in variables)
        ):
            raise bad("chat_template_kwargs", variables, "a dict of names to values, or None")
        if not isinstance(split_special_tokens, bool):
            raise bad("split_special_tokens", split_special_tokens, "True or False")
        chat = TemplateInput(messages, variables or {})
        request = self._request(params, sampling, options)
        asked = Submission("chat", messages)
        encode = partial(
            self._loaded.tokenizer.encode_chat,
            chat,
            self._loaded.executor.info.max_model_len - 1,
            split_special_tokens=split_special_tokens,
        )
        if chat.num_characters < LONG_TEXT and (token_ids := encode(at_once=True)) is not None:
            return self._submit(request, asked, token_ids)
        return self._submit_later(request, asked, chat.num_characters // 4, encode)

    def close(self) -> None:
        """Waits for the text that is being tokenised, for two seconds at most."""
        self._worker.close(timeout=2.0)

    def _request(
        self, params: SamplingParams | None, sampling: dict[str, Any], options: RequestOptions
    ) -> Request:
        """A request that is valid but for its prompt."""
        if options.priority and self._policy == "fcfs":
            accepted = '0 with scheduling_policy="fcfs"; "priority" honours it'
            raise bad("priority", options.priority, accepted)
        if params is not None and not isinstance(params, SamplingParams):
            raise bad("params", params, "SamplingParams or None")
        model = self._loaded.model_config
        info = self._loaded.executor.info
        resolved = (params or self._neutral_params).resolve(
            sampling,
            model.generation_defaults or {},
            draw_seed=lambda: self._random.getrandbits(64),
        )
        resolved.check_vocabulary(info.vocab_size)
        decode = self._loaded.tokenizer.decode
        now = self._core.clock()
        return Request(
            uuid.uuid4().hex if options.request_id is None else options.request_id,
            resolved,
            max_model_len=info.max_model_len,
            priority=options.priority,
            arrived_at=now,
            deadline=math.inf if options.timeout is None else now + options.timeout,
            eos_token_ids=model.eos_token_ids,
            cache_salt=options.cache_salt,
            output=Output(
                Channel(max_unread=options.max_unread, on_slow=options.on_slow),
                lambda token_ids: decode(token_ids, resolved.skip_special_tokens),
            ),
        )

    def _submit_later(
        self,
        request: Request,
        asked: Submission,
        estimate: int,
        encode: Callable[[], list[int] | None],
    ) -> TokenStream:
        """Submits a request whose tokens, about ``estimate``, ``encode`` makes on a thread."""
        core = self._core
        stream = self._accept(request, asked, min(estimate, request.max_model_len))
        if request.deadline < math.inf:
            core.send(core.on_watch_deadline, request)

        def job() -> None:
            if request.cancelled:
                return
            try:
                self._prepare(request, encode() or [])
            except BaseException as error:
                if not isinstance(error, Exception):  # as a panic inside the tokenizer
                    error = InvalidRequestError(f"prompt: {error!r}", param="prompt")
                core.send(core.on_fail, request, error)
                return
            core.admission.correct(request, request.num_prompt_tokens)
            core.send(core.on_add, request)

        self._worker.submit(job)
        return stream

    def _submit(self, request: Request, asked: Submission, token_ids: list[int]) -> TokenStream:
        self._prepare(request, token_ids)
        stream = self._accept(request, asked, len(token_ids))
        self._core.send(self._core.on_add, request)
        return stream

    def _prepare(self, request: Request, token_ids: list[int]) -> None:
        """Gives a request its prompt, and the decoder that continues it."""
        if not token_ids:
            raise InvalidRequestError(
                "prompt: has no tokens, expected at least one", param="prompt"
            )
        self._check_length(len(token_ids))
        tokenizer = self._loaded.tokenizer
        request.output.detokenizer = tokenizer.detokenizer(request.sampling, token_ids)
        request.set_prompt(token_ids)

    def _check_length(self, num_tokens: int, how: str = "") -> None:
        longest = self._loaded.executor.info.max_model_len
        if num_tokens >= longest:
            raise ContextLengthExceededError(
                f"prompt: has {how}{num_tokens} tokens, expected at most {longest - 1}, so "
                f"that one more fits into max_model_len={longest}"
            )

    def _accept(self, request: Request, asked: Submission, num_tokens: int) -> TokenStream:
        """Takes a place in the queue for the request, and announces it."""
        self._observers.watch(request)
        self._core.admission.reserve(request, num_tokens)
        if request.observation is not None:
            request.observation.submitted(asked)
        return TokenStream(request, self._core, self._mailboxes.of_running_loop)


def _token_ids(prompt: Any, vocab_size: int) -> list[int]:
    if isinstance(prompt, (bytes, bytearray, dict)) or not hasattr(prompt, "__iter__"):
        raise InvalidRequestError(
            f"prompt: is a {type(prompt).__name__}, expected text or token ids", param="prompt"
        )
    try:
        token_ids = array("q", prompt).tolist()
    except (TypeError, OverflowError) as error:
        raise InvalidRequestError(
            f"prompt: {error}; expected text or integer token ids", param="prompt"
        ) from None
    if not token_ids:
        raise InvalidRequestError("prompt=[]: expected at least one token", param="prompt")
    for worst in (min(token_ids), max(token_ids)):
        if not 0 <= worst < vocab_size:
            raise InvalidRequestError(
                f"prompt: has token id {worst}, expected ids from 0 to {vocab_size - 1}",
                param="prompt",
            )
    return token_ids


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def bad(name: str, value: object, accepted: str) -> InvalidRequestError:
    """The error for an argument that is not what it should be."""
    return InvalidRequestError(f"{name}={value!r}: expected {accepted}", param=name)
