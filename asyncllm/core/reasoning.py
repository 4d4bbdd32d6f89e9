"""Reasoning: whether a request's model is thinking, told from its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Reasoning:
    """Begin and end of the thoughts in one output; the engine thread pushes each token.

    What applies to the answer begins behind them: stop strings, and the mask of a grammar. While
    ``may_begin`` is set all that was generated are the first tokens of ``begin``, and the model
    opens its thoughts or answers.

    Attributes:
        begin, end: token ids that open and close thoughts.
        thinking: thoughts are open; as the request is made, the prompt opened them.
        may_begin: the output may yet begin with thoughts; as the request is made, the prompt
            neither opened nor closed them.
        once: no thoughts come behind an answer that has begun: under a grammar, what would open
            them is a part of the answer.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    thinking: bool
    may_begin: bool
    once: bool = False
    _recent: list[int] = field(default_factory=list)

    def next_of_begin(self) -> int | None:
        """The token by which the output goes on to open thoughts; None if it cannot."""
        return self.begin[len(self._recent)] if self.may_begin else None

    def is_last_of_begin(self) -> bool:
        """Whether that token is all that is missing."""
        return len(self._recent) + 1 == len(self.begin)

    def push(self, token_id: int) -> bool:
        """Takes the next token; whether it belongs to thoughts, with what opens and closes them."""
        recent = self._recent
        was_thinking = self.thinking
        if self.once and not was_thinking and token_id != self.next_of_begin():
            self.may_begin = False
            return False
        recent.append(token_id)
        if len(recent) > max(len(self.begin), len(self.end)):
            del recent[0]
        marker = self.end if was_thinking else self.begin
        if tuple(recent[-len(marker) :]) == marker:
            self.thinking = not was_thinking
            recent.clear()
        if self.may_begin:
            self.may_begin = not self.thinking and tuple(recent) == self.begin[: len(recent)]
        return was_thinking or self.thinking
