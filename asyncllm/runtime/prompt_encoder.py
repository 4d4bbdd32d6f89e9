"""PromptEncoder: converts texts and conversations to token ids, and token ids to text."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import InitVar, dataclass, field, fields
from functools import cached_property, partial
from typing import Any

from asyncllm import validation as check
from asyncllm.config import EngineConfig
from asyncllm.errors import ContextLengthExceededError
from asyncllm.runtime.loading import LoadedModel
from asyncllm.runtime.request_options import TemplateOptions
from asyncllm.runtime.worker_thread import Cooldown, TokenizerThreads
from asyncllm.text.template_input import TemplateInput
from asyncllm.tool_calls.chat_syntax import ChatSyntax, ChatSyntaxes
from asyncllm.tool_calls.tool_use import ToolUse

_MAX_VARIABLES = 1024
"""Maximum number of names in ``chat_template_kwargs``, copied while an event loop waits."""

EncodeFunction = Callable[[int | None], list[int] | None]
"""Thread-safe function that makes the token ids of a prompt. Its argument is the maximum number of
characters, or None for no maximum; with a maximum it returns None for a prompt that is longer, or
slow to render."""


@dataclass(eq=False, repr=False)
class PromptEncoder:
    """Converts prompts to token ids for one running engine.

    Attributes:
        tokenizer_threads: worker threads for ``tokenize`` and ``detokenize``. Prompts of requests
            are tokenised on the Submitter's threads.
    """

    loaded_model: LoadedModel
    config: EngineConfig
    cooldown: InitVar[Cooldown]
    tokenizer_threads: TokenizerThreads = field(init=False)

    def __post_init__(self, cooldown: Cooldown) -> None:
        self.tokenizer_threads = TokenizerThreads("asyncllm-tokenize", cooldown)

    def prepare_tokenize(
        self,
        prompt: Any,
        *,
        add_special_tokens: bool | None = None,
        add_generation_prompt: bool = True,
        max_tokens: int | None = None,
        **template: Any,
    ) -> tuple[int, EncodeFunction]:
        """Check the arguments of ``AsyncLLMEngine.tokenize``; returns the number of characters and
        a function that tokenises them.

        Args:
            max_tokens: maximum number of tokens; a prompt that certainly has more is refused before
                it is tokenised.
            template: fields of TemplateOptions.
        """
        special = check.boolean("add_special_tokens", add_special_tokens, optional=True)
        generation = check.boolean("add_generation_prompt", add_generation_prompt)
        options = TemplateOptions(**template)
        text = check.as_plain_str(prompt)
        if text is None:
            if special:
                accepted = "None or False with messages, whose special tokens the template writes"
                raise check.value_error("add_special_tokens", special, accepted)
            tool_use = ToolUse.parse(options.tools, "auto", True)
            self.find_chat_syntax(tool_use, options)
            chat = self.make_template_input(prompt, tool_use, options, generation)
            encode = partial(self.encode_chat, chat, max_tokens, options.split_special_tokens)
            return chat.num_characters, encode
        chat_only = {one.name: (getattr(options, one.name), one.default) for one in fields(options)}
        chat_only["add_generation_prompt"] = generation, True
        for name, (value, neutral) in chat_only.items():
            if value is not neutral:
                raise check.value_error(name, value, f"{neutral} with a text: it is for messages")
        min_tokens = self.loaded_model.tokenizer.min_num_tokens(len(text))
        if max_tokens is not None and min_tokens > max_tokens:
            raise self.too_long_error(min_tokens, "at least ")
        return len(text), partial(self.encode_text, text, special is not False)

    def detokenize(self, token_ids: Any, skip_special_tokens: bool) -> str:
        """Check the arguments of ``AsyncLLMEngine.detokenize``, and decode the tokens."""
        skip = check.boolean("skip_special_tokens", skip_special_tokens)
        ids = check.token_ids("token_ids", token_ids, 2**32)
        return self.loaded_model.tokenizer.decode(ids, skip_special_tokens=skip)

    def encode_text(
        self, text: str, add_special_tokens: bool, max_characters: int | None
    ) -> list[int] | None:
        if max_characters is not None and len(text) > max_characters:
            return None
        return self.loaded_model.tokenizer.encode(text, add_special_tokens)

    def encode_chat(
        self,
        chat: TemplateInput,
        max_tokens: int | None,
        split_special_tokens: bool,
        max_characters: int | None,
    ) -> list[int] | None:
        if max_characters is not None and chat.num_characters > max_characters:
            return None
        return self.loaded_model.tokenizer.encode_chat(
            chat,
            max_tokens,
            split_special_tokens=split_special_tokens,
            none_if_slow=max_characters is not None,
        )

    def make_template_input(
        self,
        messages: Any,
        tool_use: ToolUse | None,
        options: TemplateOptions,
        add_generation_prompt: bool = True,
    ) -> TemplateInput:
        """Check and copy the messages and variables of a conversation for its template."""
        kwargs: Any = {} if options.chat_template_kwargs is None else options.chat_template_kwargs
        variables: Any = None
        if isinstance(kwargs, dict):
            if dict.__len__(kwargs) > _MAX_VARIABLES:
                accepted = f"at most {_MAX_VARIABLES} names"
                raise check.value_error("chat_template_kwargs", kwargs, accepted)
            # Call dict's own ``items``: that of a subclass might never end.
            variables = dict(dict.items(kwargs))
        if variables is None or not all(isinstance(name, str) for name in variables):
            accepted = "a dict of names to values, or None"
            raise check.value_error("chat_template_kwargs", kwargs, accepted)
        if not add_generation_prompt:
            variables["add_generation_prompt"] = False
        schemas = None if tool_use is None else list(tool_use.schemas)
        for name, value in (("tools", schemas), ("chat_template", options.chat_template)):
            if value is None:
                continue
            if name in variables:
                accepted = f"no {name} beside {name}="
                raise check.value_error("chat_template_kwargs", kwargs, accepted)
            variables[name] = value
        return TemplateInput(
            messages,
            variables,
            arguments_as_text=self._chat_syntaxes.expects_text_arguments,
            tools_copier=None if tool_use is None else tool_use.copier,
        )

    def find_chat_syntax(
        self, tool_use: ToolUse | None, options: TemplateOptions
    ) -> ChatSyntax | None:
        """Format of the answer to a conversation.

        Raises:
            InvalidRequestError: for tools that the template cannot offer to the model.
        """
        template = self.loaded_model.tokenizer.chat_template
        if tool_use is not None and not template.reads_variable("tools", options.chat_template):
            raise check.argument_error("tools", "the chat template takes none")
        return self._chat_syntaxes.syntax_for(tool_use is not None)

    @cached_property
    def _chat_syntaxes(self) -> ChatSyntaxes:
        syntaxes = self.loaded_model.chat_syntaxes
        return syntaxes or ChatSyntaxes.from_tokenizer(self.loaded_model.tokenizer, self.config)

    def checked_token_ids(self, prompt: Any, max_kept_tokens: int | None) -> tuple[list[int], int]:
        """Check a prompt of token ids.

        Args:
            max_kept_tokens: maximum number of token ids to keep; None refuses a prompt that is too
                long.

        Returns:
            The last ``max_kept_tokens`` token ids, and the number of token ids cut off. Those are
            not read if the prompt can be sliced.
        """
        info = self.loaded_model.executor.info
        first = None
        with suppress(Exception):  # Methods of the caller's object may raise.
            first = prompt[0] if isinstance(prompt, (list, tuple)) else None
        if isinstance(prompt, dict) or isinstance(first, dict):
            raise check.value_error("prompt", prompt, "text or token ids; messages are for chat()")
        if isinstance(first, (str, list)):
            accepted = "one text or its token ids; several prompts are a call each, or LLM.generate"
            raise check.value_error("prompt", prompt, accepted)
        max_tokens, length, num_cut = info.max_model_len, 0, 0
        with suppress(Exception):  # The prompt may have no length, or one of more than 64 bits.
            length = len(prompt)
        if max_kept_tokens is None:
            if length >= max_tokens:
                raise self.too_long_error(length)
        else:
            max_tokens = max(check.MAX_LIST_ITEMS, max_tokens)
            if max_kept_tokens < length <= max_tokens:
                with suppress(Exception):  # A set has no order, so it cannot be sliced.
                    prompt, num_cut = prompt[-max_kept_tokens:], length - max_kept_tokens
        ids = check.token_ids("prompt", prompt, info.vocab_size, max_tokens)
        if max_kept_tokens is not None and len(ids) > max_kept_tokens:
            num_cut += len(ids) - max_kept_tokens
            ids = ids[-max_kept_tokens:]
        return list(ids), num_cut

    def too_long_error(self, num_tokens: int, count_prefix: str = "") -> ContextLengthExceededError:
        longest = self.loaded_model.executor.info.max_model_len
        return ContextLengthExceededError(
            f"prompt: has {count_prefix}{num_tokens} tokens, expected at most {longest - 1}, so "
            f"that one more fits into max_model_len={longest}"
        )
