"""ReasoningTracker: tracks by tokens whether a request's model is thinking."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(slots=True, eq=False)
class ReasoningTracker:
    """Tracker of the reasoning in one output; the engine thread pushes each token.

    Stop strings and grammars apply only to the answer after the reasoning. While ``may_begin`` is
    set, the output so far is a prefix of ``begin``: the model may still open reasoning, or answer.

    Attributes:
        begin, end: token ids that open and close reasoning.
        is_thinking: whether reasoning is open; initially, whether the prompt has opened it.
        may_begin: whether the output may still begin with reasoning; initially, whether the prompt
            has neither opened nor closed reasoning.
        only_at_start: ignore ``begin`` after the answer has begun. Set if there is a grammar,
            because ``begin`` is then part of the answer.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    is_thinking: bool
    may_begin: bool
    only_at_start: bool = False
    _recent_tokens: list[int] = field(default_factory=list)

    def copy(self) -> ReasoningTracker:
        """Make a tracker in the same state, for another output."""
        return replace(self, _recent_tokens=self._recent_tokens.copy())

    def next_begin_token(self) -> int | None:
        """Next token of ``begin``, if the output may still open reasoning; else None."""
        return self.begin[len(self._recent_tokens)] if self.may_begin else None

    def lacks_one_begin_token(self) -> bool:
        """Whether ``next_begin_token`` is the last token of ``begin``."""
        return len(self._recent_tokens) + 1 == len(self.begin)

    def push(self, token_id: int) -> bool:
        """Process the next token; returns whether it belongs to the reasoning or its delimiters."""
        recent = self._recent_tokens
        was_thinking = self.is_thinking
        if self.only_at_start and not was_thinking and token_id != self.next_begin_token():
            self.may_begin = False
            return False
        recent.append(token_id)
        if len(recent) > max(len(self.begin), len(self.end)):
            del recent[0]
        marker = self.end if was_thinking else self.begin
        if tuple(recent[-len(marker) :]) == marker:
            self.is_thinking = not was_thinking
            recent.clear()
        if self.may_begin:
            self.may_begin = not self.is_thinking and tuple(recent) == self.begin[: len(recent)]
        return was_thinking or self.is_thinking
