"""DelimiterTokens: delimiters of a chat syntax as token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncllm.core.reasoning import ReasoningTracker
from asyncllm.structured.spec import StructuredOutputs
from asyncllm.tool_calls.chat_syntax import ChatSyntax
from asyncllm.validation import argument_error

if TYPE_CHECKING:
    from asyncllm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class DelimiterTokens:
    """Delimiters of a chat syntax as token ids.

    Attributes:
        special_ids: ids of the special tokens in delimiters, which detokenisation must not skip.
        reasoning_begin, reasoning_end, reasoning_end_before_call: token ids of delimiters; empty
            for a delimiter that may share a token with the text around it.
    """

    special_ids: frozenset[int]
    reasoning_begin: tuple[int, ...]
    reasoning_end: tuple[int, ...]
    reasoning_end_before_call: tuple[int, ...]

    @classmethod
    def of(cls, syntax: ChatSyntax, tokenizer: Tokenizer) -> DelimiterTokens:
        begin = tokenizer.encode_delimiter(syntax.reasoning_begin)
        end = tokenizer.encode_delimiter(syntax.reasoning_end)
        before_call = tokenizer.encode_delimiter(syntax.reasoning_end_before_call)
        return cls(tokenizer.special_ids_where(syntax.delimiters_contain), begin, end, before_call)

    def make_reasoning_tracker(
        self, syntax: ChatSyntax, prompt_end: str, grammar: StructuredOutputs | None
    ) -> ReasoningTracker | None:
        """Make an output's reasoning tracker, in its state after the prompt. None if no tokens
        delimit reasoning.

        Raises:
            InvalidRequestError: if the request has a grammar and the prompt opens reasoning that no
                token closes.
        """
        prompt_end = prompt_end.rstrip()
        opened = bool(syntax.reasoning_begin) and prompt_end.endswith(syntax.reasoning_begin)
        if not self.reasoning_begin or not self.reasoning_end:
            if opened and grammar is not None:
                raise argument_error(
                    "structured_outputs",
                    "the prompt has opened the model's thoughts, and the tokenizer has no token "
                    f"for their end, {syntax.reasoning_end!r}; expected a chat template that does "
                    "not open them",
                )
            return None
        may_begin = not opened and not prompt_end.endswith(syntax.reasoning_end)
        end = self.reasoning_end
        if self.reasoning_end_before_call and grammar is not None and grammar.param == "tools":
            end = self.reasoning_end_before_call
        return ReasoningTracker(
            self.reasoning_begin, end, opened, may_begin, only_at_start=grammar is not None
        )
