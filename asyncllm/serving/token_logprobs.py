"""Log-probabilities in the two formats of OpenAI's protocols."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from asyncllm.outputs import TokenLogprobs
from asyncllm.serving.answers import CompletionLogprobs, TokenLogprob, TopLogprob

LOWEST_LOGPROB = -1e9
"""JSON value for minus infinity, the log-probability of a token that cannot be sampled."""


def logprobs_size(tokens: Sequence[TokenLogprobs | None] | None) -> int:
    """Approximate number of JSON bytes of log-probabilities."""
    return 32 * len(tokens) * (1 + len(tokens[-1].top)) if tokens and tokens[-1] else 0


@dataclass(frozen=True, slots=True)
class LogprobWriter:
    """Writer for chat completions and responses: ``{"token", "logprob", "bytes", "top_logprobs"}``.

    Args:
        bytes_of: function from token id to bytes.
        num_top: number of alternatives per token.
    """

    bytes_of: Callable[[int], bytes]
    num_top: int

    def write(self, tokens: Iterable[TokenLogprobs]) -> list[TokenLogprob]:
        return [
            {
                **self._make_entry(item.token_id, item.logprob),
                "top_logprobs": [
                    self._make_entry(one.token_id, one.logprob) for one in item.top[: self.num_top]
                ],
            }
            for item in tokens
        ]

    def _make_entry(self, token_id: int, logprob: float) -> TopLogprob:
        data = self.bytes_of(token_id)
        return {
            "token": data.decode(errors="replace"),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(data),
        }


@dataclass(slots=True)
class LegacyLogprobs:
    """Writer for completions: parallel lists, with each token's offset in the text. An offset
    is the number of characters of the tokens before it, each decoded alone.

    Args:
        bytes_of: function from token id to bytes.
        num_top: number of alternatives per token.
    """

    bytes_of: Callable[[int], bytes]
    num_top: int
    _offset: int = field(default=0, init=False)

    def write(
        self, tokens: Sequence[TokenLogprobs | None], first: int | None = None
    ) -> CompletionLogprobs:
        """Write ``tokens`` as lists.

        Args:
            first: token id of the first token if it has no log-probability.
        """
        found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for item in tokens:
            token_id = first if item is None else item.token_id
            text = "" if token_id is None else self._token_text(token_id)
            found["tokens"].append(text)
            found["token_logprobs"].append(
                None if item is None else max(item.logprob, LOWEST_LOGPROB)
            )
            found["top_logprobs"].append(None if item is None else self._top_by_text(item))
            found["text_offset"].append(self._offset)
            self._offset += len(text)
        return found

    def _top_by_text(self, item: TokenLogprobs) -> dict[str, float]:
        """Top log-probabilities by text. Of two tokens with the same text the likelier one counts.
        As in OpenAI's protocol, the sampled token is always included."""
        top: dict[str, float] = {}
        for one in (*item.top[: self.num_top], item.sampled):
            top.setdefault(self._token_text(one.token_id), max(one.logprob, LOWEST_LOGPROB))
        return top

    def _token_text(self, token_id: int) -> str:
        return self.bytes_of(token_id).decode(errors="replace")
