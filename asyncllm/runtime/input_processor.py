"""InputProcessor: from the arguments of a call to a request in the engine's queue."""

from __future__ import annotations

import math
import random
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any, get_args

from asyncllm import validation as check
from asyncllm.core.channel import Channel, OnSlow
from asyncllm.core.engine_core import EngineCore
from asyncllm.core.output_processor import Output
from asyncllm.core.request import Request
from asyncllm.core.request_group import RequestGroup
from asyncllm.errors import ContextLengthExceededError, InvalidRequestError
from asyncllm.observer import Observers, RequestInfo
from asyncllm.runtime.loading import LoadedModel
from asyncllm.runtime.mailbox import MailboxRegistry
from asyncllm.sampling_params import SamplingParams
from asyncllm.stream import TokenStream
from asyncllm.text.template_input import TemplateInput
from asyncllm.text.tokenizer_thread import LONG_TEXT, TokenizerThread


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Scheduling and delivery of a request; see ``AsyncLLMEngine.stream``.

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
        check.field(self, check.string, "request_id")
        check.field(self, check.integer, "priority", -check.MAX_INTEGER)
        check.field(self, check.seconds, "timeout", above=True)
        check.field(self, check.integer, "max_unread", 1)
        check.field(self, check.choice, "on_slow", get_args(OnSlow))
        check.field(self, check.string, "cache_salt", empty=True)


@dataclass(eq=False, repr=False)
class InputProcessor:
    """Turns prompts into requests of one running engine.

    Short texts are tokenised in the call. Long ones take their place in the queue at once and
    go to a worker thread: they keep their arrival index and hold up no other.

    Args:
        max_logprobs: that a request may ask for; -1 is any number.
        policy: the scheduling policy; with "fcfs" a priority is refused.
        seed: of the seeds drawn for requests without one; None is the operating system's.
    """

    loaded: LoadedModel
    core: EngineCore
    mailboxes: MailboxRegistry
    observers: Observers
    policy: str
    seed: InitVar[int | None]
    max_logprobs: int = 20
    _neutral_params: SamplingParams = field(default_factory=SamplingParams)
    _worker: TokenizerThread = field(default_factory=partial(TokenizerThread, "asyncllm-text"))

    def __post_init__(self, seed: int | None) -> None:
        self._random = random.Random(seed)

    def prompt(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        sampling: dict[str, Any],
        options: RequestOptions,
    ) -> TokenStream:
        """Submits text or token ids."""
        asked = RequestInfo("text_completion", prompt)
        if prompt is None or check.same(prompt, ""):
            raise check.invalid("prompt", prompt, "text or token ids, not empty")
        if not isinstance(prompt, str):
            info = self.loaded.executor.info
            length = 0
            with suppress(Exception):  # of what has no length, or too large a one
                length = len(prompt)
            self._check_length(length)
            found = check.token_ids("prompt", prompt, info.vocab_size, info.max_model_len)
            request = self._request(params, sampling, options)
            return self._submit(request, asked, list(found))
        request = self._request(params, sampling, options)
        tokenizer = self.loaded.tokenizer
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
            raise check.invalid(
                "chat_template_kwargs", variables, "a dict of names to values, or None"
            )
        split_special_tokens = check.boolean("split_special_tokens", split_special_tokens)
        chat = TemplateInput(messages, variables or {})
        request = self._request(params, sampling, options)
        asked = RequestInfo("chat", messages)
        encode = partial(
            self.loaded.tokenizer.encode_chat,
            chat,
            self.loaded.executor.info.max_model_len - 1,
            split_special_tokens=split_special_tokens,
        )
        if chat.num_characters < LONG_TEXT and (token_ids := encode(at_once=True)) is not None:
            return self._submit(request, asked, token_ids)
        return self._submit_later(request, asked, chat.num_characters // 4, encode)

    def close(self) -> threading.Thread | None:
        """Forgets texts that wait to be tokenised; returns the thread of one that is."""
        return self._worker.close()

    def _request(
        self, params: SamplingParams | None, sampling: dict[str, Any], options: RequestOptions
    ) -> Request:
        """A request that is valid but for its prompt."""
        if options.priority and self.policy == "fcfs":
            accepted = '0 with scheduling_policy="fcfs"; "priority" honours it'
            raise check.invalid("priority", options.priority, accepted)
        if params is not None and not isinstance(params, SamplingParams):
            raise check.invalid("params", params, "SamplingParams or None")
        model = self.loaded.model_config
        info = self.loaded.executor.info
        resolved = (params or self._neutral_params).resolve(
            sampling,
            model.generation_defaults or {},
            draw_seed=lambda: self._random.getrandbits(64),
        )
        resolved.check_vocabulary(info.vocab_size)
        resolved.check_logprobs(self.max_logprobs)
        executor = self.loaded.executor
        if resolved.logits_processors and getattr(executor, "in_process", None) is None:
            accepted = "none with an executor that runs in another process"
            raise check.invalid("logits_processors", resolved.logits_processors, accepted)
        decode = self.loaded.tokenizer.decode
        now = self.core.clock()
        group = RequestGroup(
            uuid.uuid4().hex if options.request_id is None else options.request_id,
            Channel(max_unread=options.max_unread, on_slow=options.on_slow),
            arrived_at=now,
            deadline=math.inf if options.timeout is None else now + options.timeout,
        )
        return Request(
            group,
            resolved,
            max_model_len=info.max_model_len,
            priority=options.priority,
            eos_token_ids=model.eos_token_ids,
            cache_salt=options.cache_salt,
            bad_words=bad_words_token_ids(
                resolved.bad_words, self.loaded.tokenizer, info.vocab_size
            ),
            output=Output(lambda token_ids: decode(token_ids, resolved.skip_special_tokens)),
        )

    def _submit_later(
        self,
        request: Request,
        asked: RequestInfo,
        estimate: int,
        encode: Callable[[], list[int] | None],
    ) -> TokenStream:
        """Submits a request whose tokens, about ``estimate``, ``encode`` makes on a thread."""
        core, group = self.core, request.group
        stream = self._accept(request, asked, min(estimate, request.max_model_len))
        if group.deadline < math.inf:
            core.send(core.on_watch_deadline, group)

        def job() -> None:
            if group.cancelled:
                return
            try:
                self._prepare(request, encode() or [])
            except BaseException as error:
                if not issubclass(type(error), Exception):  # as a panic inside the tokenizer
                    error = InvalidRequestError(f"prompt: {check.describe(error)}", param="prompt")
                core.send(core.on_fail, group, error)
                return
            core.admission.correct(request, request.num_prompt_tokens)
            core.send(core.on_add, group)

        self._worker.submit(job)
        return stream

    def _submit(self, request: Request, asked: RequestInfo, token_ids: list[int]) -> TokenStream:
        self._prepare(request, token_ids)
        stream = self._accept(request, asked, len(token_ids))
        self.core.send(self.core.on_add, request.group)
        return stream

    def _prepare(self, request: Request, token_ids: list[int]) -> None:
        """Gives a request its prompt, and the decoder that continues it."""
        if not token_ids:
            raise InvalidRequestError(
                "prompt: has no tokens, expected at least one", param="prompt"
            )
        self._check_length(len(token_ids))
        vocab_size = self.loaded.executor.info.vocab_size
        if max(token_ids) >= vocab_size:
            # A tokenizer may know more tokens than the model has embeddings.
            accepted = f"tokens that the model has, 0 to {vocab_size - 1}"
            raise check.invalid("prompt", max(token_ids), accepted)
        tokenizer = self.loaded.tokenizer
        request.output.detokenizer = tokenizer.detokenizer(request.sampling, token_ids)
        request.set_prompt(token_ids)

    def _check_length(self, num_tokens: int, how: str = "") -> None:
        longest = self.loaded.executor.info.max_model_len
        if num_tokens >= longest:
            raise ContextLengthExceededError(
                f"prompt: has {how}{num_tokens} tokens, expected at most {longest - 1}, so "
                f"that one more fits into max_model_len={longest}"
            )

    def _accept(self, request: Request, asked: RequestInfo, num_tokens: int) -> TokenStream:
        """Takes a place in the queue for the request, and announces it."""
        group = request.group
        self.observers.watch(group)
        self.core.admission.reserve(group, num_tokens)
        # Made first: an observer that is interrupted drops it, which aborts the request.
        stream = TokenStream(request, self.core, self.mailboxes.of_running_loop)
        if group.notifier is not None:
            group.notifier.submitted(asked)
        return stream


def bad_words_token_ids(
    words: Sequence[str], tokenizer: Any, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Token sequences of ``bad_words``, as in vLLM: each as it is, and behind a space if that makes
    another sequence of the same length.

    Raises:
        InvalidRequestError: for one that has no tokens, or some that the model has not.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        if not bare or max(bare) >= vocab_size:
            raise check.invalid("bad_words", word, "texts whose tokens the model has")
        found.append(bare)
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        if len(spaced) == len(bare) and spaced[0] != bare[0] and max(spaced) < vocab_size:
            found.append(spaced)
    return tuple(found)
