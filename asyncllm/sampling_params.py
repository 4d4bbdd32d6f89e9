"""How one request is sampled, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from asyncllm.errors import InvalidRequestError

MAX_LOGPROBS = 64

LogitsProcessor = Callable[[Sequence[int], Any], Any]
"""``(output_token_ids, logits) -> logits``: called for each token of the request, on the
engine thread, with what was generated so far and a float32 tensor ``[vocab_size]`` that it
may change in place. A processor that raises ends its own request and no other."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping, with vLLM's names and meanings.

    A field that is None takes the model's ``generation_config`` where that has one, else the
    neutral value given in brackets.

    Attributes:
        n: outputs per request. Only 1 is supported so far.
        temperature: [1.0] at least 0; 0 is greedy.
        top_p: [1.0] in (0, 1]; keep the smallest set of tokens whose mass reaches it.
        top_k: [0] keep the k most likely tokens; 0 or -1 keeps all.
        min_p: [0.0] in [0, 1]; drop tokens less likely than this share of the likeliest.
        presence_penalty: in [-2, 2]; subtracted once from the logit of each token that the
            output holds already.
        frequency_penalty: in [-2, 2]; subtracted as often as the output holds the token.
        repetition_penalty: [1.0] above 0; divides positive and multiplies negative logits of
            tokens that the prompt or the output holds (Keskar et al. 2019, CTRL).
        seed: 64-bit seed; None draws one. A token depends on (seed, position) alone.
        stop: strings that end the output; they may span tokens.
        stop_token_ids: token ids that end the output.
        ignore_eos: go on past the model's end-of-sequence tokens.
        max_tokens: output tokens at most; None goes up to the context.
        min_tokens: neither EOS nor a stop token or string before so many tokens.
        logprobs: number of most likely tokens to report at each position, 0 to 64;
            the sampled token is always reported; None reports nothing.
        logit_bias: token id to a number added to its logit, in [-100, 100].
        allowed_token_ids: nothing else may be sampled.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string at the end of the text.
        logits_processors: callables ``(output_token_ids, logits) -> logits``.
        prompt_logprobs, bad_words, structured_outputs: not supported yet; setting one is an
            InvalidRequestError.

    Raises:
        InvalidRequestError: for a value outside its range, with ``param`` set.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None
    logits_processors: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        self._refuse_unsupported()
        self._normalise()
        _number("temperature", self.temperature, low=0.0)
        _number("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0, optional=False)
        _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0, optional=False)
        _number("repetition_penalty", self.repetition_penalty, low=0.0, open_low=True)
        _integer("top_k", self.top_k, low=-1)
        _integer("seed", self.seed, low=-(2**63), high=2**64 - 1)
        _integer("max_tokens", self.max_tokens, low=1)
        _integer("min_tokens", self.min_tokens, low=0, optional=False)
        _integer("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "True or False")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")

    def _refuse_unsupported(self) -> None:
        _integer("n", self.n, low=1, optional=False)
        if self.n != 1:
            raise InvalidRequestError(f"n={self.n}: only n=1 is supported", param="n")
        for name, neutral in (
            ("prompt_logprobs", None),
            ("structured_outputs", None),
            ("bad_words", ()),
        ):
            value = getattr(self, name)
            if value is not neutral and value != neutral:
                raise InvalidRequestError(f"{name} is not supported yet", param=name)

    def _normalise(self) -> None:
        """Turns every collection into an immutable one, so that a caller's later change of
        its list cannot reach a running request."""
        stop = (self.stop,) if isinstance(self.stop, str) else _sequence("stop", self.stop)
        if not all(isinstance(s, str) and s for s in stop):
            raise _bad("stop", self.stop, "non-empty strings")
        self._set("stop", stop)
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise _bad("allowed_token_ids", allowed, "at least one token id, or None")
            self._set("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise _bad("logit_bias", self.logit_bias, "a mapping of token id to number")
            _token_ids("logit_bias", tuple(self.logit_bias))
            for value in self.logit_bias.values():
                _number("logit_bias", value, low=-100.0, high=100.0, optional=False)
            self._set("logit_bias", dict(self.logit_bias))
        processors = _sequence("logits_processors", self.logits_processors)
        if not all(callable(p) for p in processors):
            raise _bad("logits_processors", self.logits_processors, "callables")
        self._set("logits_processors", processors)
        if self.top_k == -1:
            self._set("top_k", 0)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequestError if a token id lies outside ``[0, vocab_size)``."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(self, name) or ():
                if not 0 <= token_id < vocab_size:
                    raise _bad(name, token_id, f"token ids from 0 to {vocab_size - 1}")

    def resolve(
        self,
        overrides: Mapping[str, Any],
        defaults: Mapping[str, Any],
        draw_seed: Callable[[], int],
    ) -> SamplingParams:
        """A copy with ``overrides`` applied and nothing left open.

        Args:
            overrides: fields by name.
            defaults: what the model's ``generation_config`` says about ``temperature``,
                ``top_p``, ``top_k``, ``min_p`` and ``repetition_penalty``, checked when the
                model was loaded.
            draw_seed: called if there is no seed.

        Raises:
            InvalidRequestError: for a name that does not exist, or a value out of range.
        """
        for name in overrides:
            if name not in self.__dataclass_fields__:
                names = ", ".join(sorted(self.__dataclass_fields__))
                raise InvalidRequestError(
                    f"{name}: no such sampling parameter (there are {names})", param=name
                )
        # What is filled in below is known to be good; checking all of it again would double
        # the cost of a call that an event loop waits for.
        resolved = replace(self, **overrides) if overrides else copy(self)
        for name, neutral in NEUTRAL.items():
            if getattr(resolved, name) is None:
                resolved._set(name, defaults.get(name, neutral))
        if resolved.seed is None:
            resolved._set("seed", draw_seed())
        return resolved


NEUTRAL: Mapping[str, float | int] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def _bad(name: str, value: object, accepted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}={value!r}: expected {accepted}", param=name)


def _sequence(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise _bad(name, value, "a sequence")
    return tuple(value)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = _sequence(name, value)
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise _bad(name, token_id, "token ids, integers from 0")
    return ids


def _number(
    name: str,
    value: Any,
    *,
    low: float,
    high: float = math.inf,
    open_low: bool = False,
    optional: bool = True,
) -> None:
    if value is None and optional:
        return
    bracket = "(" if open_low else "["
    accepted = f"a finite number in {bracket}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _bad(name, value, accepted)
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        raise _bad(name, value, accepted)


def _integer(
    name: str, value: Any, *, low: int, high: int | None = None, optional: bool = True
) -> None:
    if value is None and optional:
        return
    accepted = f"an integer from {low}" + ("" if high is None else f" to {high}")
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad(name, value, accepted)
    if value < low or (high is not None and value > high):
        raise _bad(name, value, accepted)
