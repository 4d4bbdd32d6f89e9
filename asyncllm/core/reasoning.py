"""Reasoning: whether a request's model is thinking, told from its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Reasoning:
    """Where the thoughts of one output begin and end; the engine thread pushes each token.

    What applies to the answer begins behind them: stop strings, and the mask of a grammar. While
    ``may_begin`` is set nothing was generated, and the model opens its thoughts or answers.

    Attributes:
        begin, end: token ids that open and close thoughts.
        thinking: thoughts are open; as the request is made, the prompt opened them.
        may_begin: the output is empty and the prompt neither opened nor closed them.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    thinking: bool
    may_begin: bool
    _recent: list[int] = field(default_factory=list)

    def push(self, token_id: int) -> bool:
        """Takes the next token; whether it belongs to thoughts, with what opens and closes them."""
        self.may_begin = False
        recent = self._recent
        recent.append(token_id)
        if len(recent) > max(len(self.begin), len(self.end)):
            del recent[0]
        was_thinking = self.thinking
        marker = self.end if was_thinking else self.begin
        if tuple(recent[-len(marker) :]) == marker:
            self.thinking = not was_thinking
            recent.clear()
        return was_thinking or self.thinking
