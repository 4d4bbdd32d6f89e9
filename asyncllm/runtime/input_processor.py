"""InputProcessor: converts the arguments of a call to a queued request."""

from __future__ import annotations

import math
import random
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from asyncllm import validation as check
from asyncllm.config import EngineConfig
from asyncllm.core.channel import Channel
from asyncllm.core.engine_core import EngineCore
from asyncllm.core.output_processor import Output
from asyncllm.core.request import Request, RequestGroup
from asyncllm.core.structured_output import StructuredOutput
from asyncllm.errors import ContextLengthExceededError, InvalidRequestError, RequestError
from asyncllm.logits_processor import claiming
from asyncllm.observer import ObserverNotifier, Observers, Operation, RequestInfo
from asyncllm.runtime.delimiter_tokens import DelimiterTokens
from asyncllm.runtime.event_loop import wait_for
from asyncllm.runtime.loading import LoadedModel
from asyncllm.runtime.mailbox import MailboxRegistry
from asyncllm.runtime.request_options import RequestOptions
from asyncllm.runtime.worker_thread import WorkerThread
from asyncllm.sampling_params import SamplingParams, with_response_format
from asyncllm.stream import TokenStream
from asyncllm.structured.compiler import GrammarCompiler
from asyncllm.structured.grammar import Grammar
from asyncllm.text.bad_words import bad_words_token_ids
from asyncllm.text.detokenizer import NoText
from asyncllm.text.long_text import LONG_TEXT
from asyncllm.text.template_input import TemplateInput
from asyncllm.tool_calls.message_parser import MessageParser
from asyncllm.tool_calls.response_format import ResponseFormat, ResponseFormats
from asyncllm.tool_calls.tool_grammar import with_tool_grammar
from asyncllm.tool_calls.tool_use import ToolUse

CallInfo = tuple[Operation, Any]
"""Operation and prompt; they become a RequestInfo only if there are observers."""

_PROMPT_END = 32
"""Last tokens of a prompt in which the beginning of the answer is searched."""

_MAX_TRUNCATED = 2**24
"""Most characters of a text with ``truncate_prompt_tokens``, because all of it is tokenised."""


@dataclass(slots=True, eq=False)
class Submission:
    """A checked call, to be queued.

    Attributes:
        request: first member of its group.
        num_tokens: tokens of the prompt, or an estimate if ``encode`` makes them.
        parser: parser of a conversation's answer; None for a plain prompt.
        encode: makes the prompt on a thread; None if the request has it.
        notifier: calls the observers; None without any.
    """

    request: Request
    call: CallInfo
    num_tokens: int
    parser: MessageParser | None = None
    encode: Callable[[], list[int] | None] | None = None
    notifier: ObserverNotifier | None = field(init=False, default=None)


@dataclass(eq=False, repr=False)
class InputProcessor:
    """Turns prompts into requests of one running engine.

    Short texts are tokenised in the call. Long ones take their place in the queue at once and are
    tokenised on a worker thread: they keep their arrival order and delay no other request.

    Args:
        grammars: compiler of the grammars of ``structured_outputs``.
        config: configuration of the engine.

    Attributes:
        long_texts: runs what takes long of ``tokenize`` and ``detokenize``, apart from prompts.
    """

    loaded: LoadedModel
    core: EngineCore
    mailboxes: MailboxRegistry
    observers: Observers
    grammars: GrammarCompiler
    config: EngineConfig
    _delimiter_tokens: dict[ResponseFormat, DelimiterTokens] = field(default_factory=dict)
    _neutral_params: SamplingParams = field(default_factory=SamplingParams)
    _worker: WorkerThread = field(default_factory=partial(WorkerThread, "asyncllm-text"))
    long_texts: WorkerThread = field(
        default_factory=partial(WorkerThread, "asyncllm-tokenize"), init=False
    )

    def __post_init__(self) -> None:
        self._draw_seed = partial(random.Random(self.config.seed).getrandbits, 64)

    def prompt(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None,
        options: RequestOptions,
        sampling: dict[str, Any],
    ) -> Submission:
        """Checks text or token ids."""
        text = check.plain_text(prompt)
        if prompt is None or text == "":
            raise check.invalid("prompt", prompt, "text or token ids, not empty")
        call: CallInfo = ("text_completion", prompt)
        request = self._build(sampling_params, sampling, options)
        if text is None:
            token_ids = self._checked_ids(prompt, self._max_prompt_tokens(request))
        else:
            tokenizer = self.loaded.tokenizer
            if len(text) >= LONG_TEXT:
                least = tokenizer.min_tokens(len(text))
                self._check_length(request, len(text), least)
                encode, estimate = partial(tokenizer.encode, text), max(least, len(text) // 4)
                return self._long(request, call, estimate, None, encode)
            token_ids = tokenizer.encode(text)
        self._set_prompt(request, token_ids)
        return Submission(request, call, request.num_prompt_tokens)

    def conversation(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None,
        options: RequestOptions,
        /,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: str | dict[str, Any] | None = "auto",
        parallel_tool_calls: bool = True,
        response_format: Any = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        split_special_tokens: bool = True,
        **sampling: Any,
    ) -> Submission:
        """Checks messages, rendered by the chat template; arguments as of
        ``AsyncLLMEngine.chat``."""
        use = ToolUse.of(tools, tool_choice, parallel_tool_calls)
        sampling = with_response_format(sampling, sampling_params, response_format)
        split_special_tokens = check.boolean("split_special_tokens", split_special_tokens)
        template = check.string("chat_template", chat_template, optional=True)
        form, free = self._response_format(use, template), True
        chat = self._template_input(messages, use, template, chat_template_kwargs)
        if use is not None:
            assert form is not None
            sampling, free = with_tool_grammar(sampling, sampling_params, use, form)
        request = self._build(sampling_params, sampling, options)
        asks_for_form = request.sampling.structured_outputs is not None
        if not request.sampling.detokenize and (form is not None or asks_for_form):
            accepted = (
                "true in a chat with tools, thoughts or a response format, which are read from "
                "the text; or stream(await engine.tokenize(messages))"
            )
            raise check.invalid("detokenize", False, accepted)
        parser = None
        if form is not None:
            parser = MessageParser(
                form,
                {} if use is None else use.parameters,
                one_call=use is not None and not use.parallel,
                text_is_free=free if use else request.sampling.structured_outputs is None,
            )
        call: CallInfo = ("chat", messages)
        longest = request.max_model_len - 1 if self._max_prompt_tokens(request) is None else None
        encode = partial(self._encode_chat, chat, longest, split_special_tokens)
        if (token_ids := encode(at_once=True)) is not None:
            self._set_prompt(request, token_ids, parser)
            return Submission(request, call, request.num_prompt_tokens, parser)
        return self._long(request, call, chat.num_characters // 4, parser, encode)

    def prepare_tokenize(
        self,
        prompt: Any,
        *,
        add_special_tokens: bool | None = None,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        split_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> Callable[..., list[int] | None]:
        """Checks the arguments of ``AsyncLLMEngine.tokenize``; returns a function that tokenises.
        Any thread may call it; with ``at_once=True`` it returns None for a prompt that takes
        long.

        Args:
            max_tokens: a prompt that certainly has more is refused before it is tokenised.
        """
        special = check.boolean("add_special_tokens", add_special_tokens, optional=True)
        generation = check.boolean("add_generation_prompt", add_generation_prompt)
        split = check.boolean("split_special_tokens", split_special_tokens)
        template = check.string("chat_template", chat_template, optional=True)
        text = check.plain_text(prompt)
        if text is None:
            if special:
                accepted = "None or False with messages, whose special tokens the template writes"
                raise check.invalid("add_special_tokens", special, accepted)
            use, variables = ToolUse.of(tools, "auto", True), chat_template_kwargs
            self._response_format(use, template)
            if not generation:
                variables = _checked_variables(variables) | {"add_generation_prompt": False}
            chat = self._template_input(prompt, use, template, variables)
            return partial(self._encode_chat, chat, max_tokens, split)
        of_chat: dict[str, tuple[Any, Any]] = {
            "tools": (tools, None),
            "add_generation_prompt": (generation, True),
            "chat_template": (template, None),
            "chat_template_kwargs": (chat_template_kwargs, None),
            "split_special_tokens": (split, True),
        }
        for name, (value, neutral) in of_chat.items():
            if value is not neutral:
                raise check.invalid(name, value, f"{neutral} with a text: it is for messages")
        least = self.loaded.tokenizer.min_tokens(len(text))
        if max_tokens is not None and least > max_tokens:
            raise self._too_long(least, "at least ")
        return partial(self._encode_text, text, special is not False)

    def prepare_detokenize(
        self, token_ids: Any, skip_special_tokens: bool
    ) -> tuple[int, Callable[[], str]]:
        """Checks the arguments of ``AsyncLLMEngine.detokenize``; returns the number of tokens and a
        function that decodes them."""
        skip = check.boolean("skip_special_tokens", skip_special_tokens)
        ids = check.token_ids("token_ids", token_ids, 2**32)
        return len(ids), partial(self.loaded.tokenizer.decode, ids, skip_special_tokens=skip)

    def _encode_text(
        self, text: str, add_special_tokens: bool, *, at_once: bool = False
    ) -> list[int] | None:
        if at_once and len(text) >= LONG_TEXT:
            return None
        return self.loaded.tokenizer.encode(text, add_special_tokens)

    def _encode_chat(
        self, chat: TemplateInput, most: int | None, split: bool, *, at_once: bool = False
    ) -> list[int] | None:
        if at_once and chat.num_characters >= LONG_TEXT:
            return None
        return self.loaded.tokenizer.encode_chat(
            chat, most, split_special_tokens=split, at_once=at_once
        )

    def _template_input(
        self,
        messages: Any,
        use: ToolUse | None,
        template: str | None,
        variables: dict[str, Any] | None,
    ) -> TemplateInput:
        given = _checked_variables(variables)
        own = {"tools": None if use is None else use.schemas, "chat_template": template}
        for name, value in own.items():
            if value is None:
                continue
            if name in given:
                accepted = f"no {name} beside {name}="
                raise check.invalid("chat_template_kwargs", variables, accepted)
            given[name] = value
        as_text = self._formats.arguments_as_text
        return TemplateInput(messages, given, arguments_as_text=as_text)

    def _response_format(self, use: ToolUse | None, template: str | None) -> ResponseFormat | None:
        """Format of the answer to a conversation.

        Args:
            template: the call's own chat template, or None.

        Raises:
            InvalidRequestError: for tools that the model cannot be offered.
        """
        if use is not None and not self.loaded.tokenizer.chat_template.reads("tools", template):
            raise InvalidRequestError("tools: the chat template takes none", param="tools")
        return self._formats.format_for(use is not None)

    @cached_property
    def _formats(self) -> ResponseFormats:
        made = self.loaded.response_formats
        return made or ResponseFormats.of_tokenizer(self.loaded.tokenizer, self.config)

    def close(self) -> list[threading.Thread]:
        """Drop texts that wait to be tokenised and grammars that wait to be compiled; returns the
        threads that still work."""
        workers = self._worker.close(), self.long_texts.close()
        return self.grammars.close() + [worker for worker in workers if worker is not None]

    def _max_prompt_tokens(self, request: Request) -> int | None:
        """Most prompt tokens that a request keeps; None for a prompt that is not cut."""
        kept = request.sampling.truncate_prompt_tokens
        return request.max_model_len - 1 if kept == -1 else kept

    def _check_length(self, request: Request, num_characters: int, least: int) -> None:
        """Refuse a text by its length alone. ``least`` is a lower bound of its tokens; a prompt
        that will be cut only has to be short enough to be tokenised."""
        if self._max_prompt_tokens(request) is None:
            if least >= request.max_model_len:
                raise self._too_long(least, "at least ")
        elif num_characters > _MAX_TRUNCATED:
            raise ContextLengthExceededError(
                f"prompt: has {num_characters} characters, expected at most {_MAX_TRUNCATED} "
                "with truncate_prompt_tokens"
            )

    def _checked_ids(self, prompt: Any, kept: int | None) -> list[int]:
        """Check a prompt of token ids; returns plain integers."""
        info = self.loaded.executor.info
        first = prompt[0] if isinstance(prompt, (list, tuple)) and prompt else None
        if isinstance(prompt, dict) or isinstance(first, dict):
            raise check.invalid("prompt", prompt, "text or token ids; messages are for chat()")
        if isinstance(first, (str, list)):
            accepted = "one text or its token ids; several prompts are a call each, or LLM.generate"
            raise check.invalid("prompt", prompt, accepted)
        if kept is not None:
            most = max(check.MAX_ITEMS, info.max_model_len)
            return list(check.token_ids("prompt", prompt, info.vocab_size, most))
        length = 0
        with suppress(Exception):  # the prompt has no length, or one beyond 64 bits
            length = len(prompt)
        if length >= info.max_model_len:
            raise self._too_long(length)
        return list(check.token_ids("prompt", prompt, info.vocab_size, info.max_model_len))

    def _resolve(
        self,
        sampling_params: SamplingParams | None,
        sampling: dict[str, Any],
        options: RequestOptions,
    ) -> tuple[SamplingParams, tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Resolved and checked parameters, indices of the engine's logits processors that apply,
        and bad words as token ids."""
        if options.priority and self.config.scheduling_policy == "fcfs":
            accepted = '0 with scheduling_policy="fcfs"; "priority" honours it'
            raise check.invalid("priority", options.priority, accepted)
        if sampling_params is not None and not isinstance(sampling_params, SamplingParams):
            raise check.invalid("sampling_params", sampling_params, "SamplingParams or None")
        info, model = self.loaded.executor.info, self.loaded.model_config
        resolved = (sampling_params or self._neutral_params).resolve(
            sampling, model.generation_defaults or {}, self._draw_seed
        )
        resolved.check_limits(info.vocab_size, self.config.max_logprobs, model.eos_token_ids)
        kept, longest = resolved.truncate_prompt_tokens, info.max_model_len - 1
        if kept is not None and kept > longest:
            accepted = f"at most {longest}, so that one more fits into max_model_len, -1 or None"
            raise check.invalid("truncate_prompt_tokens", kept, accepted)
        in_process = getattr(self.loaded.executor, "in_process", None)
        for name in ("logits_processors", "extra_args") if in_process is None else ():
            if getattr(resolved, name):
                accepted = "none with an executor that runs in another process"
                raise check.invalid(name, getattr(resolved, name), accepted)
        processors = () if in_process is None else in_process.logits_processors
        claimed_by: tuple[int, ...] = ()
        if processors or resolved.extra_args:
            claimed_by = claiming(processors, resolved)
        if resolved.structured_outputs is not None:
            self.grammars.check_installed()
            if info.max_tokens_per_row > 1:
                accepted = "None with an executor that drafts tokens"
                raise check.invalid("structured_outputs", resolved.structured_outputs, accepted)
        words: tuple[tuple[int, ...], ...] = ()
        if resolved.bad_words:
            words = bad_words_token_ids(resolved.bad_words, self.loaded.tokenizer, info.vocab_size)
        return resolved, claimed_by, words

    def _build(
        self,
        sampling_params: SamplingParams | None,
        sampling: dict[str, Any],
        options: RequestOptions,
    ) -> Request:
        """Make the group with its channel and members; returns the first member. Everything but the
        prompt is checked."""
        resolved, claimed_by, bad_words = self._resolve(sampling_params, sampling, options)
        model, info = self.loaded.model_config, self.loaded.executor.info
        now = self.core.clock()
        group = RequestGroup(
            uuid.uuid4().hex if options.request_id is None else options.request_id,
            Channel(max_unread=options.max_unread, on_slow=options.on_slow),
            arrived_at=now,
            deadline=math.inf if options.timeout is None else now + options.timeout,
        )
        limits, skip = info.sampling_limits, resolved.skip_special_tokens
        decode = partial(self.loaded.tokenizer.decode, skip_special_tokens=skip)
        if not resolved.detokenize:
            decode = NoText.decode
        needs_host = limits is not None and (
            bool(claimed_by) or limits.exceeded_by(resolved, bad_words)
        )
        for index in range(resolved.n):
            Request(  # the constructor adds it to the group
                group,
                resolved.of_output(index) if index else resolved,
                max_model_len=info.max_model_len,
                priority=options.priority,
                owner=options.owner,
                eos_token_ids=model.eos_token_ids,
                cache_salt=options.cache_salt,
                bad_words=bad_words,
                claimed_by=claimed_by,
                needs_host=needs_host,
                output=Output(decode),
                first=group.members[0] if index else None,
            )
        return group.members[0]

    def _set_prompt(
        self, request: Request, token_ids: list[int], parser: MessageParser | None = None
    ) -> None:
        """Set the prompt of a group's members, and make a detokenizer for each."""
        if not token_ids:
            raise InvalidRequestError(
                "prompt: has no tokens, expected at least one", param="prompt"
            )
        if (kept := self._max_prompt_tokens(request)) is not None and len(token_ids) > kept:
            request.group.num_truncated_tokens = len(token_ids) - kept
            token_ids = token_ids[-kept:]
        if len(token_ids) >= request.max_model_len:
            raise self._too_long(len(token_ids))
        vocab_size = self.loaded.executor.info.vocab_size
        if max(token_ids) >= vocab_size:
            # A tokenizer may know more tokens than the model has embeddings.
            accepted = f"tokens that the model has, 0 to {vocab_size - 1}"
            raise check.invalid("prompt", max(token_ids), accepted)
        tokenizer = self.loaded.tokenizer
        shown: dict[str, frozenset[int]] = {}
        if parser is not None:
            delimiters = self._delimiters(parser.form)
            shown["visible"] = delimiters.special
            end = tokenizer.decode(token_ids[-_PROMPT_END:], skip_special_tokens=False)
            parser.answer_begin = parser.form.answer_begins_in(end)
            for member in request.group.members:
                grammar = member.sampling.structured_outputs
                member.reasoning = delimiters.reasoning(parser.form, end, grammar)
        for member in request.group.members:
            sampling = member.sampling
            member.output.detokenizer = (
                tokenizer.detokenizer(sampling, token_ids, **shown)
                if sampling.detokenize
                else NoText()
            )
            member.set_prompt(token_ids if member is request else token_ids.copy())

    def _too_long(self, num_tokens: int, how: str = "") -> ContextLengthExceededError:
        longest = self.loaded.executor.info.max_model_len
        return ContextLengthExceededError(
            f"prompt: has {how}{num_tokens} tokens, expected at most {longest - 1}, so "
            f"that one more fits into max_model_len={longest}"
        )

    def _delimiters(self, form: ResponseFormat) -> DelimiterTokens:
        """A format's delimiters as tokens; cached, because each conversation asks for them."""
        found = self._delimiter_tokens.get(form)
        if found is None:
            found = DelimiterTokens.of(form, self.loaded.tokenizer)
            self._delimiter_tokens[form] = found
        return found

    def _long(
        self,
        request: Request,
        call: CallInfo,
        estimate: int,
        parser: MessageParser | None,
        encode: Callable[[], list[int] | None],
    ) -> Submission:
        """Submission of a prompt of about ``estimate`` tokens that a thread makes."""
        most = self._max_prompt_tokens(request) or request.max_model_len
        return Submission(request, call, min(estimate, most), parser, encode)

    def enqueue(self, submission: Submission) -> TokenStream:
        """Reserve the group's place in the queue, call the observers, and send the group to the
        engine thread once its prompt is known.

        Raises:
            EngineOverloadedError: if the queue is full.
        """
        self._observe(submission)
        self.core.admission.reserve(submission.request.group, submission.num_tokens)
        stream = self._make_stream(submission)
        self._begin(submission)
        return stream

    async def enqueue_or_wait(self, submission: Submission) -> TokenStream:
        """``enqueue``, once the queue has a place. The request's time begins with that."""
        core, group = self.core, submission.request.group
        self._observe(submission)
        is_gone = self.mailboxes.of_running_loop().is_closed
        reserved = core.admission.reserve_or_wait(group, submission.num_tokens, is_gone)
        stream = self._make_stream(submission)
        if reserved is not None:
            try:
                core.check_waiting()
                await wait_for(reserved)
            except BaseException:
                core.abandon(group)
                raise
            group.restart(core.clock())
        self._begin(submission)
        return stream

    def _observe(self, submission: Submission) -> None:
        if observers := self.observers.all:
            submission.notifier = ObserverNotifier(submission.request, observers)
            submission.request.group.notifier = submission.notifier

    def _make_stream(self, submission: Submission) -> TokenStream:
        mailbox_of_loop = self.mailboxes.of_running_loop
        return TokenStream(submission.request, self.core, mailbox_of_loop, submission.parser)

    def _begin(self, submission: Submission) -> None:
        """Begin a request that has its place in the queue and its stream: an observer that is
        interrupted drops the stream, which aborts the request."""
        if submission.notifier is not None:
            submission.notifier.submitted(RequestInfo(*submission.call))
        if submission.encode is None:
            self._send(submission.request)
        else:
            self._encode_elsewhere(submission.request, submission.encode, submission.parser)

    def _encode_elsewhere(
        self,
        request: Request,
        encode: Callable[[], list[int] | None],
        parser: MessageParser | None,
    ) -> None:
        """Send a request once a thread has made its prompt with ``encode``."""
        core, group = self.core, request.group
        if group.deadline < math.inf:
            core.send(core.on_watch_deadline, group)

        def job() -> None:
            if group.cancelled:
                return
            try:
                token_ids = encode() or []
                if group.cancelled:
                    return  # cancelled meanwhile; the engine may have ended
                self._set_prompt(request, token_ids, parser)
                core.admission.correct_estimate(group, request.num_prompt_tokens)
                self._send(request)
            except BaseException as error:
                if not issubclass(type(error), Exception):  # a panic inside the tokenizer
                    error = InvalidRequestError(f"prompt: {check.describe(error)}", param="prompt")
                core.send(core.on_fail, group, error)

        try:
            self._worker.submit(job)
        except RequestError as error:
            core.send(core.on_fail, group, error)

    def _send(self, request: Request) -> None:
        """Send the group to the engine thread once its grammar is compiled. Other requests do not
        wait for it."""
        core, group, spec = self.core, request.group, request.sampling.structured_outputs
        if spec is None:
            core.send(core.on_add, group)
            return
        grammar = self.grammars.find(spec)
        if grammar is not None:
            self._send_with_grammar(group, grammar, None)
            return
        if group.deadline < math.inf:
            core.send(core.on_watch_deadline, group)
        try:
            self.grammars.submit(spec, partial(self._send_with_grammar, group))
        except RequestError as error:
            core.send(core.on_fail, group, error)

    def _send_with_grammar(
        self, group: RequestGroup, grammar: Grammar | None, error: Exception | None
    ) -> None:
        core = self.core
        if grammar is None:
            core.send(core.on_fail, group, error)
            return
        try:
            for member in group.members:
                member.structured_output = StructuredOutput(grammar.new_matcher(), grammar.special)
        except BaseException as failure:  # native code of a backend may raise it
            core.send(core.on_fail, group, failure)
            return
        core.send(core.on_add, group)


def _checked_variables(given: Any) -> dict[str, Any]:
    accepted = "a dict of names to values, or None"
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise check.invalid("chat_template_kwargs", given, accepted)
    return dict(given)
