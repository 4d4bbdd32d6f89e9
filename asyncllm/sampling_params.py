"""SamplingParams: how one request is sampled, and when its output ends."""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Self

from asyncllm import validation as check
from asyncllm.structured.response_format import parse_response_format
from asyncllm.structured.spec import parse_structured_outputs

INTEGER_FIELD_BOUNDS: Mapping[str, tuple[int, int]] = {
    # Bounded, because each output has a copy of the prompt's token ids.
    "n": (1, 256),
    "top_k": (-1, check.MAX_INTEGER),
    "seed": (-(2**63), 2**64 - 1),
    "max_tokens": (1, check.MAX_INTEGER),
    "min_tokens": (0, check.MAX_INTEGER),
    "logprobs": (-1, check.MAX_INTEGER),
    "prompt_logprobs": (-1, check.MAX_INTEGER),
    "truncate_prompt_tokens": (-1, check.MAX_INTEGER),
}
NUMBER_FIELD_BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}
"""Minimum and maximum of each number field; ``top_p`` must be above its minimum."""

LOGIT_BIAS_RANGE = (-100, 100)
"""Minimum and maximum of a bias in ``logit_bias``."""

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARACTERS = 1024
"""Maximum number of characters of a stop string. Each token's text is searched for all stop strings
while the batch waits."""

MAX_BAD_WORDS = 1024
MAX_BAD_WORD_LENGTH = 1024
"""Maximum number of characters of a bad word. All bad words are checked at each token while the
batch waits."""
MAX_BAD_WORDS_CHARACTERS = 2**14
"""Maximum number of characters of all bad words together. Each bad word is tokenised twice while an
event loop waits."""

MAX_LOGIT_BIASES = 1024
MAX_STOP_IDS = 128
"""Maximum numbers of ``logit_bias`` entries and of stop tokens that ``min_tokens`` suppresses. The
device's tables have these sizes, so that sampling does not wait for the host."""

MAX_TOKEN_IDS = 270_000
"""Maximum number of entries of ``stop_token_ids`` and ``allowed_token_ids``: as many as the largest
vocabularies have tokens. An engine also refuses more than its own vocabulary has."""

TOKEN_ID_LIST_FIELDS = ("stop_token_ids", "allowed_token_ids")
"""Fields with lists of token ids; each list is at most as long as the vocabulary."""

MAX_LOGITS_PROCESSORS = 64
"""Maximum number of logits processors of a request. Each is called for each token while the batch
waits."""

RequestLogitsProcessor = Callable[[Sequence[int], Any], Any]
"""``(output_token_ids, logits) -> logits``: called for each token of the request, on the engine
thread, with the token ids generated so far and a float32 tensor ``[vocab_size]`` that it may change
in place. A processor that raises ends its own request and no other."""


@check.refuse_unknown_fields("sampling parameter")
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping, with vLLM's names and meanings.

    A field that is None takes its value from the model's ``generation_config`` if that sets it,
    else the neutral value in brackets. Numbers may be numpy's, and are stored as Python's. Unless
    stated otherwise, an integer has at most 63 bits.

    Attributes:
        n: outputs per request, 1 to 256; the prompt is computed once. Not with
            ``temperature=0``, which would give n equal outputs.
        temperature: [1.0] in [0, 100]; 0 is greedy.
        top_p: [1.0] in (0, 1]; keep the smallest set of the likeliest tokens whose total
            probability reaches it.
        top_k: [0] keep the k most likely tokens; 0 and -1 keep all, and so does a number that
            is larger than the vocabulary.
        min_p: [0.0] in [0, 1]; drop tokens less likely than this fraction of the likeliest token's
            probability.
        presence_penalty: in [-2, 2]; subtracted once from the logit of each token that the output
            already contains.
        frequency_penalty: in [-2, 2]; subtracted from a token's logit once per occurrence of the
            token in the output.
        repetition_penalty: [1.0] in [0.01, 100]; divides positive and multiplies negative logits of
            tokens that the prompt or the output contains (Keskar et al. 2019, CTRL).
        seed: 64-bit seed; None draws one. A token depends on (seed, position) alone. The first
            output uses this seed, and each further output a seed derived from it; see
            ``of_output``.
        stop: at most 64 strings that end the output, each of at most 1024 characters; a string may
            span tokens.
        stop_token_ids: token ids that end the output. At most 270,000 entries here and in
            ``allowed_token_ids``, and in an engine's call at most as many as the vocabulary has;
            repeats are dropped.
        ignore_eos: go on past the model's end-of-sequence tokens.
        max_tokens: maximum number of output tokens; None allows all that fit the context.
        min_tokens: minimum number of output tokens, before which EOS, stop tokens and stop strings
            do not end the output. With it, or with ``structured_outputs``, at most 128 stop tokens
            are allowed: ``stop_token_ids`` and the model's EOS tokens together.
        logprobs: number of most likely tokens to report at each position, at most
            ``EngineConfig.max_logprobs``; -1 for all, if ``max_logprobs`` is -1 too. The sampled
            token is always reported; None reports nothing.
        truncate_prompt_tokens: number of tokens to keep at the end of a longer prompt, at most
            ``max_model_len - 1``; -1 is ``max_model_len - 1``. ``Usage.truncated_prompt_tokens``
            counts the tokens cut off. None refuses a prompt that leaves no room for one output
            token.
        logit_bias: map from token id to a number in [-100, 100] that is added to the token's logit;
            1024 entries at most.
        allowed_token_ids: the only token ids that may be sampled.
        bad_words: at most 1024 texts, each of at most 1024 characters and 16,384 in all. Their
            token sequences may not occur in the output, with or without a space before them. Words
            of one token cost nothing; longer ones are checked on the host.
        detokenize: make text of the tokens; False leaves ``text`` empty and spends no time on it.
            Not with ``stop``, nor in a chat whose answer is parsed: with tools, reasoning or a
            response format.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string at the end of the text.
        logits_processors: callables ``(output_token_ids, logits) -> logits``, 64 at most.
        structured_outputs: grammar of the output: a dict with exactly one of ``json`` (a JSON
            schema as a dict or text, a Pydantic model, a dataclass or a TypedDict), ``regex``,
            ``choice`` (strings), ``grammar`` (Lark or GBNF), ``json_object`` (True) and
            ``structural_tag``; see docs/structured_output.md. Kept as a StructuredOutputs.
        prompt_logprobs: number of most likely tokens to report at each position of the prompt but
            the first, with the bounds of ``logprobs``; the prompt's own token is always reported.
            Only the request's first output has them; that output does not read the prefix cache.
        extra_args: parameters of the engine's logits processors by name: plain data (None,
            booleans, numbers, text, and lists and dicts of them), 16 deep, and 8,192 values and
            65,536 characters at most. A name that no processor reads is refused.

    Raises:
        InvalidRequestError: for a value outside its range or a field that does not exist, with
            ``param`` set.
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
    truncate_prompt_tokens: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None
    logits_processors: Sequence[RequestLogitsProcessor] = ()
    extra_args: Mapping[str, Any] | None = None

    _set_field = object.__setattr__

    def __post_init__(self) -> None:
        self._check_fields(self.__dataclass_fields__)

    def _check_fields(self, changed: Collection[str]) -> None:
        """Check all numbers, and the collections in ``changed``: others were checked before."""
        for name, bounds in INTEGER_FIELD_BOUNDS.items():
            check.validate_field(self, check.integer, name, *bounds)
        for name, bounds in NUMBER_FIELD_BOUNDS.items():
            check.validate_field(self, check.number, name, *bounds, exclusive_low=name == "top_p")
        if self.truncate_prompt_tokens == 0:
            raise check.value_error("truncate_prompt_tokens", 0, "1 or more, -1 or None")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens"):
            check.validate_field(self, check.boolean, name)
        check.validate_field(self, check.boolean, "include_stop_str_in_output")
        if self.top_k == -1:
            self._set_field("top_k", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            accepted = f"at most max_tokens={self.max_tokens}"
            raise check.value_error("min_tokens", self.min_tokens, accepted)
        if "extra_args" in changed:
            check.validate_field(self, check.plain_data, "extra_args")
        self._check_greedy()
        self._freeze_collections(changed)
        if self.structured_outputs is not None:
            self._set_field("structured_outputs", parse_structured_outputs(self.structured_outputs))

    def __copy__(self) -> Self:
        # This loop runs in C. ``copy`` with the methods that ``dataclass`` generates for frozen
        # instances with slots would be many times slower.
        copied, names = object.__new__(type(self)), self.__dataclass_fields__
        values = map(getattr, repeat(self), names)
        deque(map(object.__setattr__, repeat(copied), names, values), maxlen=0)
        return copied

    def _check_greedy(self) -> None:
        if self.temperature == 0 and self.n > 1:
            accepted = "1 with temperature=0, which gives every output the same tokens"
            raise check.value_error("n", self.n, accepted)

    def _freeze_collections(self, changed: Collection[str]) -> None:
        """Make every collection in ``changed`` immutable: a caller that changes its list later
        cannot reach a running request."""
        if isinstance(self.stop, str):
            self._set_field("stop", (self.stop,))
        for name, limits in (
            ("stop", (MAX_STOP_STRINGS, MAX_STOP_STRING_CHARACTERS)),
            ("bad_words", (MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)),
        ):
            if name not in changed:
                continue
            if getattr(self, name) is None:
                self._set_field(name, ())
            check.validate_field(self, check.strings, name, *limits)
        if self.stop and not self.detokenize:
            accepted = "true with stop strings, which are looked for in the text"
            raise check.value_error("detokenize", self.detokenize, accepted)
        if self.bad_words:
            self._check_bad_words()
        for name in TOKEN_ID_LIST_FIELDS:
            if name not in changed:
                continue
            check.validate_field(self, check.token_ids, name, max_items=MAX_TOKEN_IDS, unique=True)
        if self.allowed_token_ids == ():
            raise check.value_error("allowed_token_ids", (), "at least one token id, or None")
        if self.logit_bias is not None and "logit_bias" in changed:
            bias: Any = self.logit_bias
            if not isinstance(bias, Mapping):
                raise check.value_error("logit_bias", bias, "a mapping of token id to number")
            if len(bias) > MAX_LOGIT_BIASES:
                raise check.value_error("logit_bias", bias, f"at most {MAX_LOGIT_BIASES} token ids")
            ids = check.token_ids("logit_bias", bias.keys(), max_items=MAX_LOGIT_BIASES)
            numbers = check.bounded_tuple("logit_bias", bias.values(), "numbers", MAX_LOGIT_BIASES)
            values = check.numbers_in_range("logit_bias", numbers, *LOGIT_BIAS_RANGE)
            self._set_field("logit_bias", dict(zip(ids, values, strict=True)))
        check.validate_field(
            self, check.bounded_tuple, "logits_processors", "callables", MAX_LOGITS_PROCESSORS
        )
        if not all(map(callable, self.logits_processors)):
            raise check.value_error("logits_processors", self.logits_processors, "callables")

    def _check_bad_words(self) -> None:
        for word in self.bad_words:
            if not word.strip():
                raise check.value_error("bad_words", word, "words, not white space alone")
        if sum(map(len, self.bad_words)) > MAX_BAD_WORDS_CHARACTERS:
            accepted = f"at most {MAX_BAD_WORDS_CHARACTERS} characters in all"
            raise check.value_error("bad_words", self.bad_words, accepted)

    def check_limits(
        self, vocab_size: int, max_logprobs: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        """Check the limits that depend on the model and the engine.

        Args:
            max_logprobs: maximum number of log-probabilities; -1 sets no limit.
            eos_token_ids: EOS token ids of the model.

        Raises:
            InvalidRequestError: for a token id of ``vocab_size`` or more, more log-probabilities
                than ``max_logprobs``, or more stop tokens than a step can suppress.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            largest = max(getattr(self, name) or (), default=0)
            if largest >= vocab_size:
                raise check.value_error(name, largest, f"token ids from 0 to {vocab_size - 1}")

        num_eos = 0 if self.ignore_eos else len(eos_token_ids)
        grammar = self.structured_outputs
        suppressor = "min_tokens" if self.min_tokens else grammar and grammar.param
        if suppressor and len(self.stop_token_ids) + num_eos > MAX_STOP_IDS:
            accepted = f"at most {MAX_STOP_IDS - num_eos} token ids with {suppressor}"
            accepted += f" beside the model's {num_eos} of its own" * bool(num_eos)
            raise check.value_error("stop_token_ids", self.stop_token_ids, accepted)

        limit = f"(EngineConfig.max_logprobs={max_logprobs})"
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if max_logprobs >= 0 and count is not None and not 0 <= count <= max_logprobs:
                accepted = f"an integer from 0 to {max_logprobs} or None {limit}"
                raise check.value_error(name, count, accepted)

    def resolve(
        self,
        overrides: Mapping[str, Any],
        defaults: Mapping[str, Any],
        draw_seed: Callable[[], int],
        vocab_size: int = MAX_TOKEN_IDS,
    ) -> SamplingParams:
        """Copy with ``overrides`` applied and every unset field filled in.

        Args:
            overrides: fields by name.
            defaults: values of the model's ``generation_config`` for ``temperature``, ``top_p``,
                ``top_k``, ``min_p`` and ``repetition_penalty``, checked when the model was loaded.
            draw_seed: called if there is no seed.
            vocab_size: maximum number of entries of a list of token ids in ``overrides``.

        Raises:
            InvalidRequestError: for a name that does not exist, a value out of range, or an
                ``n`` above 1 where the defaults are greedy.
        """
        # An event loop waits for this call, and ``replace`` would be slow: it sets and checks every
        # field. ``defaults`` are filled in after the checks, because they are known to be valid.
        check.refuse_unknown_names("sampling parameter", overrides, self.__dataclass_fields__)
        resolved = copy(self)
        for name, value in overrides.items():
            if name in TOKEN_ID_LIST_FIELDS and value is not None:
                value = check.bounded_tuple(name, value, "token ids", vocab_size)
            resolved._set_field(name, value)
        if overrides:
            resolved._check_fields(overrides)
        for name, neutral in NEUTRAL_VALUES.items():
            if getattr(resolved, name) is None:
                resolved._set_field(name, defaults.get(name, neutral))
        if resolved.seed is None:
            resolved._set_field("seed", draw_seed())
        if resolved.n > 1:
            resolved._check_greedy()
        return resolved

    def of_output(self, index: int) -> SamplingParams:
        """Parameters with ``n=1`` that reproduce one output of a request with these parameters.
        The seed is that output's: ``seed`` itself for the first; for output i a 64-bit BLAKE2b of
        ``seed`` and i, both as 8 bytes, little-endian.

        Raises:
            InvalidRequestError: for an index beyond ``n``, or without a seed.
        """
        index = check.integer("index", index, 0, self.n - 1)
        if self.seed is None:
            raise check.value_error("seed", None, "the seed of the request, which was not drawn")
        params = copy(self)
        params._set_field("n", 1)
        if index > 0:
            data = struct.pack("<QQ", self.seed % 2**64, index)
            digest = hashlib.blake2b(data, digest_size=8).digest()
            params._set_field("seed", int.from_bytes(digest, "little"))
            # Only the first output has prompt log-probabilities.
            params._set_field("prompt_logprobs", None)
        return params


def with_response_format(
    sampling_fields: dict[str, Any], sampling_params: Any, response_format: Any
) -> dict[str, Any]:
    """Add the grammar of a ``response_format`` to fields of ``SamplingParams``.

    Raises:
        InvalidRequestError: as ``parse_response_format``, and if ``structured_outputs`` is given
            too.
    """
    structured = parse_response_format(response_format)
    if structured is None:
        return sampling_fields
    other_grammar = sampling_fields.get("structured_outputs")
    if other_grammar is None and isinstance(sampling_params, SamplingParams):
        other_grammar = sampling_params.structured_outputs
    if other_grammar is not None:
        raise check.value_error(
            "response_format", response_format, "one of response_format and structured_outputs"
        )
    return sampling_fields | {"structured_outputs": structured}


NEUTRAL_VALUES: Mapping[str, float | int] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""For each sampling parameter, the value at which it has no effect."""
