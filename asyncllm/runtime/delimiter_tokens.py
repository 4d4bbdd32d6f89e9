"""DelimiterTokens: delimiters of a response format as token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncllm.core.reasoning import ReasoningTracker
from asyncllm.structured.spec import StructuredOutputs
from asyncllm.tool_calls.response_format import ResponseFormat
from asyncllm.validation import argument_error

if TYPE_CHECKING:
    from asyncllm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class DelimiterTokens:
    """Delimiters of a response format as token ids.

    Attributes:
        special: ids of the special tokens in delimiters, which detokenisation must not skip.
        begin, end, end_before_call: token ids of the reasoning delimiters; empty for a delimiter
            that may share a token with the text around it.
    """

    special: frozenset[int]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    end_before_call: tuple[int, ...]

    @classmethod
    def of(cls, form: ResponseFormat, tokenizer: Tokenizer) -> DelimiterTokens:
        begin, end = tokenizer.delimiter_ids(form.begin), tokenizer.delimiter_ids(form.end)
        before_call = tokenizer.delimiter_ids(form.end_before_call)
        return cls(tokenizer.special_ids_where(form.delimiters_contain), begin, end, before_call)

    def reasoning(
        self, form: ResponseFormat, prompt_end: str, grammar: StructuredOutputs | None
    ) -> ReasoningTracker | None:
        """Initial reasoning state of an output, after its prompt.

        Raises:
            InvalidRequestError: if the request has a grammar and the prompt opens reasoning that no
                token closes.
        """
        prompt_end = prompt_end.rstrip()
        opened = bool(form.begin) and prompt_end.endswith(form.begin)
        if not self.begin or not self.end:
            if opened and grammar is not None:
                raise argument_error(
                    "structured_outputs",
                    "the prompt has opened the model's thoughts, and the tokenizer has no token "
                    f"for their end, {form.end!r}; expected a chat template that does not open "
                    "them",
                )
            return None
        may_begin = not opened and not prompt_end.endswith(form.end)
        end = self.end
        if self.end_before_call and grammar is not None and grammar.param == "tools":
            end = self.end_before_call
        return ReasoningTracker(
            self.begin, end, opened, may_begin, only_at_start=grammar is not None
        )
