"""InputProcessor: converts the arguments of a call to a request that can be submitted."""

from __future__ import annotations

import math
import random
import sys
import threading
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from asyncllm import validation as check
from asyncllm.config import EngineConfig
from asyncllm.core.channel import Channel
from asyncllm.core.output_processor import DetokenizerState
from asyncllm.core.request import Request, RequestGroup
from asyncllm.core.token_rules import TokenRules
from asyncllm.errors import ContextLengthExceededError
from asyncllm.json_copier import JsonCopier
from asyncllm.logits_processor import applicable_processors
from asyncllm.runtime.delimiter_tokens import DelimiterTokens
from asyncllm.runtime.loading import LoadedModel
from asyncllm.runtime.prompt_encoder import EncodeFunction, PromptEncoder
from asyncllm.runtime.request_options import ChatOptions, RequestOptions, pop_fields
from asyncllm.runtime.submitter import CallArguments, RawPrompt, RequestQueue, Submission
from asyncllm.sampling_params import SamplingParams, with_response_format
from asyncllm.text.bad_words import bad_words_token_ids
from asyncllm.text.detokenizer import NullDetokenizer, StopStrings
from asyncllm.text.long_text import SHORT_TEXT_CHARACTERS
from asyncllm.tool_calls.chat_syntax import ChatSyntax
from asyncllm.tool_calls.message_parser import MessageParser
from asyncllm.tool_calls.tool_grammar import with_tool_grammar
from asyncllm.tool_calls.tool_use import ToolUse

_TokenRuleParams = tuple[Sequence[int] | None, Sequence[str]]
"""``(allowed_token_ids, bad_words)`` of a request."""

_ANSWER_SEARCH_TOKENS = 32
"""Number of tokens at the end of a prompt that are searched for the beginning of the answer."""

_MAX_TRUNCATABLE_CHARACTERS = 2**19
"""Maximum number of characters of a prompt with ``truncate_prompt_tokens``, and of its bytes in
UTF-8. All of it is tokenised, which takes up to 420 bytes per byte."""

_MAX_INLINE_BAD_WORDS = 8
_MAX_INLINE_WORD_CHARACTERS = 256
_MAX_INLINE_ALLOWED_TOKENS = 4096
"""Maximum numbers of ``bad_words``, of their characters and of ``allowed_token_ids`` that are
prepared inline, on the caller's thread; a worker thread prepares longer lists. Lists at these
limits take a quarter of a millisecond. The limits are low, because a word takes 20 microseconds,
and many requests with small lists would fill an event loop."""

_CHARACTERS_PER_BAD_WORD = 16
"""Fixed cost of encoding a bad word, as the number of characters whose encoding takes as long."""

_BYTES_PER_BAD_WORD, _BYTES_PER_BAD_WORD_BYTE = 256, 8
"""Estimated memory of the token rules of a bad word: a constant, and bytes per UTF-8 byte of the
word. A word is encoded in two forms, with up to a token per byte, and a token takes four bytes."""

_BYTES_PER_INTEGER = 32
"""Size of an int or float object, in bytes."""

_MAX_CACHED_TOKEN_RULES = 16
"""Maximum number of cached TokenRules, one per long ``bad_words`` list: about 10 MB together."""


@dataclass(eq=False, repr=False)
class InputProcessor:
    """Converts prompts and conversations to requests for one running engine.

    Texts of up to SHORT_TEXT_CHARACTERS are tokenised in the call. Longer ones take their place in
    the queue at once and are tokenised on a worker thread: they keep their arrival order and delay
    no other request.
    """

    loaded_model: LoadedModel
    config: EngineConfig
    prompts: PromptEncoder
    submitter: RequestQueue
    _delimiter_tokens: dict[ChatSyntax, DelimiterTokens] = field(default_factory=dict)
    _neutral_params: SamplingParams = field(default_factory=SamplingParams)
    _cached_token_rules: OrderedDict[_TokenRuleParams, TokenRules | None] = field(
        default_factory=OrderedDict
    )
    _cache_lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._draw_seed = partial(random.Random(self.config.seed).getrandbits, 64)

    def make_prompt_submission(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None,
        request_options: RequestOptions,
        sampling_overrides: dict[str, Any],
    ) -> Submission:
        """Make a Submission from a text or token ids."""
        text = check.as_plain_str(prompt)
        if prompt is None or text == "":
            raise check.value_error("prompt", prompt, "text or token ids, not empty")
        call_arguments: CallArguments = ("text_completion", prompt)
        request = self._make_grouped_request(sampling_params, sampling_overrides, request_options)
        if text is None:
            token_ids, num_cut = self.prompts.checked_token_ids(
                prompt, self._max_prompt_tokens(request)
            )
            request.group.num_truncated_tokens = num_cut
            return self._prepare_submission(
                request, call_arguments, token_ids, lambda _: token_ids, 0, 0
            )
        min_num_tokens = 0
        if len(text) > SHORT_TEXT_CHARACTERS:
            min_num_tokens = self.loaded_model.tokenizer.min_num_tokens(len(text))
            self._check_length(request, (text,), min_num_tokens)
        encode = partial(self.prompts.encode_text, text, True)
        return self._prepare_submission(
            request,
            call_arguments,
            text,
            encode,
            len(text),
            sys.getsizeof(text),
            min_num_tokens=min_num_tokens,
        )

    def make_chat_submission(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None,
        request_options: RequestOptions,
        chat_options: ChatOptions,
        sampling_overrides: dict[str, Any],
    ) -> Submission:
        """Make a Submission from a conversation."""
        tool_use = ToolUse.parse(
            chat_options.tools, chat_options.tool_choice, chat_options.parallel_tool_calls
        )
        sampling_overrides = with_response_format(
            sampling_overrides, sampling_params, chat_options.response_format
        )
        syntax, calls_may_follow_text = self.prompts.find_chat_syntax(tool_use, chat_options), True
        template_input = self.prompts.make_template_input(messages, tool_use, chat_options)
        if tool_use is not None:
            assert syntax is not None
            sampling_overrides, calls_may_follow_text = with_tool_grammar(
                sampling_overrides, sampling_params, tool_use, syntax
            )
        request = self._make_grouped_request(sampling_params, sampling_overrides, request_options)
        has_grammar = request.sampling.structured_outputs is not None
        if not request.sampling.detokenize and (syntax is not None or has_grammar):
            accepted = (
                "true in a chat with tools, thoughts or a response format, which are read from "
                "the text; or stream(await engine.tokenize(messages))"
            )
            raise check.value_error("detokenize", False, accepted)
        parser = None
        if syntax is not None:
            parser = MessageParser(
                syntax,
                {} if tool_use is None else syntax.schemas_to_parse(tool_use.parameter_schemas),
                one_call=tool_use is not None and not tool_use.parallel,
                calls_may_follow_text=calls_may_follow_text if tool_use else not has_grammar,
            )
        call_arguments: CallArguments = ("chat", messages)
        is_truncated = self._max_prompt_tokens(request) is not None
        max_tokens = None if is_truncated else request.max_model_len - 1
        self._check_length(request, template_input.texts, 0)
        split = chat_options.split_special_tokens
        encode = partial(self.prompts.encode_chat, template_input, max_tokens, split)
        return self._prepare_submission(
            request,
            call_arguments,
            template_input.values["messages"],
            encode,
            template_input.num_characters,
            template_input.num_bytes,
            parser,
        )

    def make_submission(
        self, prompt: Any, sampling_params: SamplingParams | None, options: dict[str, Any]
    ) -> Submission:
        """Make a Submission from a conversation, or from a text or token ids."""
        request_options, first = pop_fields(RequestOptions, options), None
        with suppress(Exception):  # Methods of the caller's object may raise.
            first = prompt[0]
        if isinstance(first, Mapping):
            chat_options = pop_fields(ChatOptions, options)
            return self.make_chat_submission(
                prompt, sampling_params, request_options, chat_options, options
            )
        return self.make_prompt_submission(prompt, sampling_params, request_options, options)

    def check_options(self, sampling_params: Any, options: dict[str, Any]) -> None:
        """Check options that are the same for many calls of ``make_submission``."""
        options = dict(options)
        request_options = pop_fields(RequestOptions, options)
        pop_fields(ChatOptions, options)
        resolved, _ = self._resolve_params(sampling_params, options, request_options)
        self._make_token_rules(resolved)

    def _prepare_submission(
        self,
        request: Request,
        call_arguments: CallArguments,
        checked_prompt: str | Sequence[int] | Sequence[dict[str, Any]],
        encode: EncodeFunction,
        num_characters: int,
        num_text_bytes: int,
        parser: MessageParser | None = None,
        min_num_tokens: int = 0,
    ) -> Submission:
        """Make a submission. If its prompt and token rules are quick to prepare, the prompt is set
        at once; else a worker thread sets it.

        Args:
            checked_prompt: text, messages or token ids: what ``encode`` tokenises.
            num_characters: number of characters that ``encode`` tokenises.
            num_text_bytes: memory of the texts and messages that ``encode`` holds.
            min_num_tokens: lower bound on the number of tokens of these characters.
        """
        group = request.group
        group.param_bytes = _measure_params(request)
        token_ids = encode(SHORT_TEXT_CHARACTERS)
        has_rules = request.token_rules is not None or not any(_token_rule_params(request.sampling))
        if token_ids is not None and has_rules:
            self._set_prompt(request, token_ids, parser)
            return self._make_submission(
                request, call_arguments, request.num_prompt_tokens, parser, 0
            )

        def prepare(request: Request, max_characters: int | None) -> bool:
            made = token_ids or encode(max_characters)
            if made is None:
                return False
            if request.token_rules is None:
                rules = self._make_token_rules(request.sampling)
                self._set_token_rules(request.group.members, rules)
            self._set_prompt(request, made, parser)
            return True

        estimate = max(num_characters // 4, min_num_tokens) if token_ids is None else len(token_ids)
        estimate = min(estimate, self._max_prompt_tokens(request) or request.max_model_len)
        group.raw_prompt = RawPrompt(checked_prompt, prepare)
        group.num_text_bytes = num_text_bytes
        words = request.sampling.bad_words
        num_characters += sum(map(len, words)) + _CHARACTERS_PER_BAD_WORD * len(words)
        return self._make_submission(request, call_arguments, estimate, parser, num_characters)

    def _make_submission(
        self,
        request: Request,
        call_arguments: CallArguments,
        num_tokens: int,
        parser: MessageParser | None,
        num_characters: int,
    ) -> Submission:
        submission = Submission(request, call_arguments, num_tokens, parser, num_characters)
        if request.sampling.n > 1:
            submission.make_members = partial(self._make_members, request)
        return submission

    def _max_prompt_tokens(self, request: Request) -> int | None:
        """Maximum number of prompt tokens that a request keeps; None if the prompt is not
        truncated."""
        num_kept = request.sampling.truncate_prompt_tokens
        return request.max_model_len - 1 if num_kept == -1 else num_kept

    def _check_length(self, request: Request, texts: Sequence[str], min_num_tokens: int) -> None:
        """Refuse a text by its length alone. For a prompt that will be truncated, the only limit is
        _MAX_TRUNCATABLE_CHARACTERS.

        Args:
            texts: the text, or the strings of a conversation.
            min_num_tokens: lower bound on the number of the text's tokens.
        """
        if self._max_prompt_tokens(request) is None:
            if min_num_tokens >= request.max_model_len:
                raise self.prompts.too_long_error(min_num_tokens, "at least ")
            return
        size, unit = sum(map(len, texts)), "characters"
        if size <= _MAX_TRUNCATABLE_CHARACTERS < 4 * size:
            size, unit = sum(len(text.encode("utf-8", "replace")) for text in texts), "UTF-8 bytes"
        if size > _MAX_TRUNCATABLE_CHARACTERS:
            raise ContextLengthExceededError(
                f"prompt: has {size} {unit}, expected at most "
                f"{_MAX_TRUNCATABLE_CHARACTERS} with truncate_prompt_tokens"
            )

    def _resolve_params(
        self,
        sampling_params: SamplingParams | None,
        sampling_overrides: dict[str, Any],
        request_options: RequestOptions,
    ) -> tuple[SamplingParams, tuple[int, ...]]:
        """Check the parameters. Returns them with the engine's defaults filled in, and the indices
        of the engine's logits processors that apply."""
        if request_options.priority and self.config.scheduling_policy == "fcfs":
            accepted = '0 with scheduling_policy="fcfs"; "priority" honours it'
            raise check.value_error("priority", request_options.priority, accepted)
        if sampling_params is not None and not isinstance(sampling_params, SamplingParams):
            raise check.value_error("sampling_params", sampling_params, "SamplingParams or None")
        info, model = self.loaded_model.executor.info, self.loaded_model.model_config
        resolved = (sampling_params or self._neutral_params).resolve(
            sampling_overrides, model.generation_defaults or {}, self._draw_seed, info.vocab_size
        )
        resolved.check_limits(info.vocab_size, self.config.max_logprobs, model.eos_token_ids)
        num_kept, max_kept = resolved.truncate_prompt_tokens, info.max_model_len - 1
        if num_kept is not None and num_kept > max_kept:
            accepted = f"at most {max_kept}, so that one more fits into max_model_len, -1 or None"
            raise check.value_error("truncate_prompt_tokens", num_kept, accepted)
        in_process = getattr(self.loaded_model.executor, "in_process", None)
        for name in ("logits_processors", "extra_args") if in_process is None else ():
            if getattr(resolved, name):
                accepted = "none with an executor that runs in another process"
                raise check.value_error(name, getattr(resolved, name), accepted)
        processors = () if in_process is None else in_process.logits_processors
        claiming_processors: tuple[int, ...] = ()
        if processors or resolved.extra_args:
            claiming_processors = applicable_processors(processors, resolved)
        if resolved.structured_outputs is not None:
            self.submitter.grammar_compiler.backends.check_installed()
            if info.max_tokens_per_row > 1:
                accepted = "None with an executor that drafts tokens"
                raise check.value_error("structured_outputs", resolved.structured_outputs, accepted)
        return resolved, claiming_processors

    def _inline_token_rules(self, sampling: SamplingParams) -> TokenRules | None:
        """Token rules that are cached or quick to make. None if ``_make_token_rules`` would take
        long, or if there are no rules."""
        allowed, words = lists = _token_rule_params(sampling)
        if allowed is None and not words:
            return None
        if (
            len(words) <= _MAX_INLINE_BAD_WORDS
            and sum(map(len, words)) <= _MAX_INLINE_WORD_CHARACTERS
            and len(allowed or ()) <= _MAX_INLINE_ALLOWED_TOKENS
        ):
            return self._make_token_rules(sampling)
        with self._cache_lock:
            return self._cached_token_rules.get(lists)

    def _make_token_rules(self, sampling: SamplingParams) -> TokenRules | None:
        """Make the token rules, and cache them if they have many bad words.

        Raises:
            InvalidRequestError: for a bad word that the model cannot write.
        """
        allowed, words = lists = _token_rule_params(sampling)
        vocab_size = self.loaded_model.executor.info.vocab_size
        word_token_ids = bad_words_token_ids(words, self.loaded_model.tokenizer, vocab_size)
        rules = TokenRules.create(allowed, word_token_ids, vocab_size)
        if (
            len(words) > _MAX_INLINE_BAD_WORDS // 2
            and len(allowed or ()) <= _MAX_INLINE_ALLOWED_TOKENS
        ):
            with self._cache_lock:
                self._cached_token_rules[lists] = rules
                if len(self._cached_token_rules) > _MAX_CACHED_TOKEN_RULES:
                    self._cached_token_rules.popitem(last=False)
        return rules

    def _set_token_rules(self, members: Sequence[Request], rules: TokenRules | None) -> None:
        limits = self.loaded_model.executor.info.sampling_limits
        for member in members:
            member.token_rules = rules
            member.needs_host = limits is not None and (
                bool(member.claiming_processors) or limits.exceeded_by(member.sampling, rules)
            )

    def _make_grouped_request(
        self,
        sampling_params: SamplingParams | None,
        sampling_overrides: dict[str, Any],
        request_options: RequestOptions,
    ) -> Request:
        """Check the sampling parameters, and make the group with its channel and first member;
        returns that member."""
        resolved, claiming_processors = self._resolve_params(
            sampling_params, sampling_overrides, request_options
        )
        model, info = self.loaded_model.model_config, self.loaded_model.executor.info
        now = self.submitter.core.clock()
        group = RequestGroup(
            uuid.uuid4().hex if request_options.request_id is None else request_options.request_id,
            Channel(max_unread=request_options.max_unread, on_slow=request_options.on_slow),
            arrived_at=now,
            deadline=math.inf if request_options.timeout is None else now + request_options.timeout,
            num_outputs=resolved.n,
        )
        skip = resolved.skip_special_tokens
        decode = partial(self.loaded_model.tokenizer.decode, skip_special_tokens=skip)
        if not resolved.detokenize:
            decode = NullDetokenizer.decode
        request = Request(  # The constructor adds the request to the group.
            group,
            resolved,
            max_model_len=info.max_model_len,
            priority=request_options.priority,
            owner=request_options.owner,
            eos_token_ids=model.eos_token_ids,
            cache_salt=request_options.cache_salt,
            claiming_processors=claiming_processors,
            output=DetokenizerState(decode),
        )
        self._set_token_rules((request,), self._inline_token_rules(resolved))
        return request

    def _make_members(self, first: Request) -> None:
        """Make a group's members after the first; they share its parameters and its prompt until
        each of them runs."""
        for _ in range(1, first.sampling.n):
            Request(
                first.group,
                first.sampling,
                max_model_len=first.max_model_len,
                priority=first.priority,
                owner=first.owner,
                eos_token_ids=first.eos_token_ids,
                cache_salt=first.cache_salt,
                claiming_processors=first.claiming_processors,
                output=DetokenizerState(first.output.decode),
                first_member=first,
                token_rules=first.token_rules,
                needs_host=first.needs_host,
            )
        if first.token_ids:
            _share_prompt(first)

    def _set_prompt(
        self, request: Request, token_ids: list[int], parser: MessageParser | None = None
    ) -> None:
        """Set the prompt of a group's members."""
        if not token_ids:
            raise check.argument_error("prompt", "has no tokens, expected at least one")
        if (num_kept := self._max_prompt_tokens(request)) is not None and len(token_ids) > num_kept:
            request.group.num_truncated_tokens = len(token_ids) - num_kept
            token_ids = token_ids[-num_kept:]
        if len(token_ids) >= request.max_model_len:
            raise self.prompts.too_long_error(len(token_ids))
        vocab_size = self.loaded_model.executor.info.vocab_size
        if max(token_ids) >= vocab_size:
            # A tokenizer may know more tokens than the model has embeddings.
            accepted = f"tokens that the model has, 0 to {vocab_size - 1}"
            raise check.value_error("prompt", max(token_ids), accepted)
        tokenizer, sampling = self.loaded_model.tokenizer, request.sampling
        detokenizer_options: dict[str, Any] = {}
        if sampling.stop:
            detokenizer_options["stop"] = StopStrings(sampling.stop)
        if parser is not None:
            delimiters = self._find_delimiter_tokens(parser.syntax)
            detokenizer_options["visible_ids"] = delimiters.special_ids
            end = tokenizer.decode(token_ids[-_ANSWER_SEARCH_TOKENS:], skip_special_tokens=False)
            parser.answer_begin = parser.syntax.answer_prefix_in_prompt(end)
            request.reasoning = delimiters.make_reasoning_tracker(
                parser.syntax, end, sampling.structured_outputs
            )
        output: DetokenizerState = request.output
        output.make_detokenizer = (
            partial(tokenizer.detokenizer, sampling, **detokenizer_options)
            if sampling.detokenize
            else NullDetokenizer.of_prompt
        )
        # Make the first member's detokenizer now: a prompt that cannot be decoded is then refused.
        output.detokenizer = output.make_detokenizer(token_ids)
        request.set_prompt(token_ids)
        _share_prompt(request)

    def _find_delimiter_tokens(self, syntax: ChatSyntax) -> DelimiterTokens:
        """Token ids of the delimiters of reasoning and tool calls; cached, because every
        conversation needs them."""
        delimiters = self._delimiter_tokens.get(syntax)
        if delimiters is None:
            delimiters = DelimiterTokens.of(syntax, self.loaded_model.tokenizer)
            self._delimiter_tokens[syntax] = delimiters
        return delimiters


def _share_prompt(first: Request) -> None:
    """Set the prompt of a group's members after the first: one copy for all until they run."""
    members = first.group.members[1:]  # Empty if the group has ended meanwhile.
    token_ids = first.token_ids.copy() if members else []
    for member in members:
        member.set_prompt(token_ids)
        if first.reasoning is not None:
            member.reasoning = first.reasoning.copy()


def _token_rule_params(sampling: SamplingParams) -> _TokenRuleParams:
    """``allowed_token_ids`` and ``bad_words``, from which token rules are made."""
    return sampling.allowed_token_ids, tuple(sampling.bad_words)


def _measure_params(request: Request) -> dict[int, int]:
    """Estimate the memory of a request's parameters.

    Returns the bytes of the grammar's text, of the token rules and of each list and dict, by object
    id. If the token rules are not made yet, their estimated bytes are added to those of
    ``bad_words``.
    """
    sampling, rules = request.sampling, request.token_rules
    num_bytes: dict[int, int] = {}
    if sampling.structured_outputs is not None:
        text = sampling.structured_outputs.text
        num_bytes[id(text)] = sys.getsizeof(text)
    for texts in (sampling.stop, sampling.bad_words):
        if texts:
            num_bytes[id(texts)] = sum(map(sys.getsizeof, texts))
    if words := sampling.bad_words:
        num_word_bytes = len("".join(words).encode())
        rules_id = id(words if rules is None else rules)
        num_bytes[rules_id] = num_bytes.get(rules_id, 0) + (
            _BYTES_PER_BAD_WORD * len(words) + _BYTES_PER_BAD_WORD_BYTE * num_word_bytes
        )
    if ids := sampling.allowed_token_ids:
        num_bytes[id(ids)] = sys.getsizeof(ids) + _BYTES_PER_INTEGER * len(ids)
    # Twice: a request copies its stop token ids to a set, and a dict entry has two objects.
    for ids in (sampling.stop_token_ids, sampling.logit_bias):
        if ids:
            num_bytes[id(ids)] = 2 * (sys.getsizeof(ids) + _BYTES_PER_INTEGER * len(ids))
    if sampling.extra_args:
        counter = JsonCopier(sys.maxsize, sys.maxsize, sys.maxsize)
        counter.copy(sampling.extra_args, is_parsed=True)  # ``SamplingParams`` has copied them.
        num_bytes[id(sampling.extra_args)] = counter.num_bytes
    return num_bytes
