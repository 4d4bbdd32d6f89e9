"""Log-probabilities in the two formats of OpenAI's protocols."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pydantic_core import to_json

from asyncllm.outputs import TokenLogprobs
from asyncllm.serving.answers import TokenLogprob, TopLogprob

BYTES_PER_ENTRY, LEGACY_BYTES_PER_ENTRY = 75, 32
"""Approximate JSON bytes of one log-probability, as LogprobFormatter and as LegacyLogprobFormatter
write it, for a token of four bytes. Long tokens take several times as many."""

PACKED_BYTES_PER_TOKEN, PACKED_BYTES_PER_ENTRY = 112, 8
"""Memory of one token's log-probabilities in the engine's packed form, with the object and its
places in lists: bytes for the token, and bytes more for each alternative."""

LOWEST_LOGPROB = -1e9
"""JSON value for minus infinity, the log-probability of a token that cannot be sampled."""


def num_logprobs_bytes(
    logprobs: Sequence[TokenLogprobs | None] | None, bytes_per_entry: int
) -> int:
    """Approximate number of JSON bytes of log-probabilities."""
    if not logprobs or logprobs[-1] is None:
        return 0
    return bytes_per_entry * len(logprobs) * (1 + logprobs[-1]._num_top)


def packed_logprobs_bytes(num_tokens: int, num_top: int) -> int:
    """Memory of packed log-probabilities with ``num_top`` alternatives per token."""
    return num_tokens * (PACKED_BYTES_PER_TOKEN + PACKED_BYTES_PER_ENTRY * num_top)


def encode_logprobs(value: Any) -> str:
    """Serialise a value with log-probabilities, ten times as fast as ``encode_json``. The value
    may contain iterators, whose items are freed one by one."""
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

    def format(self, token_logprobs: Iterable[TokenLogprobs]) -> Iterator[TokenLogprob]:
        """Make the entries of all tokens, one at a time, because they take several times the memory
        of their JSON."""
        return (
            {
                **self._make_entries((sampled,))[0],
                "top_logprobs": self._make_entries(islice(top, self.num_top)),
            }
            for sampled, top in map(TokenLogprobs._ids_and_logprobs, token_logprobs)
        )

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
    ) -> dict[str, Iterable[Any]]:
        """Write log-probabilities as the parallel lists of a completion. ``top_logprobs`` is an
        iterator, because its items take several times the memory of their JSON.

        Args:
            unscored_token_id: id of the first token, if that has no log-probability.
        """
        texts: list[str] = []
        logprobs: list[float | None] = []
        offsets: list[int] = []
        for item in token_logprobs:
            if item is None:
                text, logprob = "", None
                if unscored_token_id is not None:
                    text = self.id_to_text_and_bytes(unscored_token_id)[0]
            else:
                token_id, logprob = item._ids_and_logprobs()[0]
                text = self.id_to_text_and_bytes(token_id)[0]
                logprob = max(logprob, LOWEST_LOGPROB)
            texts.append(text)
            logprobs.append(logprob)
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": logprobs,
            "top_logprobs": map(self._top_by_text, token_logprobs),
            "text_offset": offsets,
        }

    def _top_by_text(self, item: TokenLogprobs | None) -> dict[str, float] | None:
        """Map from tokens' texts to log-probabilities. If two tokens have the same text, the
        likelier one counts. The sampled token is always included, as in OpenAI's protocol."""
        if item is None:
            return None
        top: dict[str, float] = {}
        sampled, likeliest = item._ids_and_logprobs()
        id_to_text_and_bytes, lowest = self.id_to_text_and_bytes, LOWEST_LOGPROB
        for token_id, logprob in (*islice(likeliest, self.num_top), sampled):
            text = id_to_text_and_bytes(token_id)[0]
            top.setdefault(text, logprob if logprob > lowest else lowest)
        return top
