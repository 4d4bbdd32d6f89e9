"""Log-probabilities in the two formats of OpenAI's protocols."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pydantic_core import to_json

from asyncllm.outputs import TokenLogprobs
from asyncllm.serving.answers import CompletionLogprobs, TokenLogprob, TopLogprob

LOWEST_LOGPROB = -1e9
"""JSON value for minus infinity, the log-probability of a token that cannot be sampled."""


def num_logprobs_bytes(logprobs: Sequence[TokenLogprobs | None] | None) -> int:
    """Approximate number of JSON bytes of log-probabilities."""
    return 32 * len(logprobs) * (1 + logprobs[-1]._num_top) if logprobs and logprobs[-1] else 0


def encode_logprobs(value: Any) -> str:
    """Serialise a value with log-probabilities, ten times as fast as ``encode_json``."""
    return to_json(value).decode()


@dataclass(frozen=True, slots=True)
class LogprobFormatter:
    """Writer for chat completions and responses: ``{"token", "logprob", "bytes", "top_logprobs"}``.

    Args:
        id_to_text_and_bytes: function from token id to text and bytes.
        num_top: number of alternatives per token.
    """

    id_to_text_and_bytes: Callable[[int], tuple[str, list[int]]]
    num_top: int

    def format(self, token_logprobs: Iterable[TokenLogprobs]) -> list[TokenLogprob]:
        return [
            {
                **self._make_entries((sampled,))[0],
                "top_logprobs": self._make_entries(islice(top, self.num_top)),
            }
            for sampled, top in map(TokenLogprobs._ids_and_logprobs, token_logprobs)
        ]

    def _make_entries(self, candidates: Iterable[tuple[int, float]]) -> list[TopLogprob]:
        id_to_text_and_bytes, lowest = self.id_to_text_and_bytes, LOWEST_LOGPROB
        return [
            {"token": text, "logprob": logprob if logprob > lowest else lowest, "bytes": data}
            for token_id, logprob in candidates
            for text, data in (id_to_text_and_bytes(token_id),)
        ]


@dataclass(slots=True)
class LegacyLogprobFormatter:
    """Writer for completions: parallel lists, with each token's offset in the text. An offset
    is the number of characters of all earlier tokens, each decoded alone.

    Args:
        id_to_text_and_bytes: function from token id to text and bytes.
        num_top: number of alternatives per token.
    """

    id_to_text_and_bytes: Callable[[int], tuple[str, list[int]]]
    num_top: int
    _offset: int = field(default=0, init=False)

    def format(
        self, token_logprobs: Sequence[TokenLogprobs | None], unscored_token_id: int | None = None
    ) -> CompletionLogprobs:
        """Write log-probabilities as the parallel lists of a completion.

        Args:
            unscored_token_id: id of the first token, if that has no log-probability.
        """
        lists = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for item in token_logprobs:
            if item is None:
                text = ""
                if unscored_token_id is not None:
                    text = self.id_to_text_and_bytes(unscored_token_id)[0]
                logprob, top = None, None
            else:
                sampled, likeliest = item._ids_and_logprobs()
                text = self.id_to_text_and_bytes(sampled[0])[0]
                logprob = max(sampled[1], LOWEST_LOGPROB)
                top = self._top_by_text((*islice(likeliest, self.num_top), sampled))
            lists["tokens"].append(text)
            lists["token_logprobs"].append(logprob)
            lists["top_logprobs"].append(top)
            lists["text_offset"].append(self._offset)
            self._offset += len(text)
        return lists

    def _top_by_text(self, candidates: Iterable[tuple[int, float]]) -> dict[str, float]:
        """Map from tokens' texts to log-probabilities. If two tokens have the same text, the
        likelier one counts. The sampled token is always included, as in OpenAI's protocol."""
        top: dict[str, float] = {}
        id_to_text_and_bytes, lowest = self.id_to_text_and_bytes, LOWEST_LOGPROB
        for token_id, logprob in candidates:
            text = id_to_text_and_bytes(token_id)[0]
            top.setdefault(text, logprob if logprob > lowest else lowest)
        return top
