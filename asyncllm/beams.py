"""beam_search: finds a prompt's most likely outputs by submitting requests to an engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import anyio

from asyncllm import validation as check
from asyncllm.core.deadlines import DeadlineExceededError
from asyncllm.engine import AsyncLLMEngine
from asyncllm.errors import (
    ContextLengthExceededError,
    EngineClosedError,
    InvalidRequestError,
    RequestError,
)
from asyncllm.outputs import Completion, CompletionOutput, Logprob, TokenLogprobs
from asyncllm.sampling_params import SamplingParams
from asyncllm.stream import TokenStream

EarlyStopping = bool | Literal["never"]
MAX_BEAM_WIDTH = 1024


@dataclass(frozen=True, slots=True)
class BeamOutput(CompletionOutput):
    """One output of a beam search. ``logprobs`` has the log-probabilities of its tokens, without
    alternatives.

    Attributes:
        score: ``cumulative_logprob / len(token_ids) ** length_penalty``.
    """

    score: float = 0.0


async def beam_search(
    engine: AsyncLLMEngine,
    prompt: str | Sequence[int],
    beam_width: int,
    *,
    max_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    ignore_eos: bool = False,
    stop_token_ids: Sequence[int] = (),
    priority: int = 0,
    timeout: float | None = None,
    cache_salt: str | None = None,
    owner: str | None = None,
) -> Completion:
    """Find the ``beam_width`` outputs with the highest scores by beam search. The results equal
    those of transformers' ``generate(num_beams=beam_width, do_sample=False)``.

    Each step of the search submits one request per beam, for one token. The request finds the KV of
    the beam's full blocks in the prefix cache. Observers see these requests.

    Args:
        prompt: text or token ids, as for ``AsyncLLMEngine.stream``.
        beam_width: beams kept in each step, and number of outputs. Each step asks for
            ``beam_width`` top log-probabilities, and one more for each stop token.
        max_tokens: maximum number of output tokens; a beam also ends at the end of the context.
        length_penalty: in [-10, 10]; a value above 0 favours long outputs. See
            ``BeamOutput.score``.
        early_stopping: when to end the search, after ``beam_width`` outputs have ended. True: at
            once. False: when no running beam, at its present length, scores better than the worst
            of these outputs. "never": when no running beam can reach a better score at any length.
        ignore_eos: continue past the model's end-of-sequence tokens.
        stop_token_ids: further token ids that end a beam.
        priority, cache_salt, owner: as for ``AsyncLLMEngine.stream``.
        timeout: maximum duration of the whole search, in seconds.

    Returns:
        A Completion whose ``outputs`` are BeamOutputs, the best first; its usage counts the
        tokens of these outputs.

    Raises:
        InvalidRequestError: for an invalid argument, or a ``beam_width`` for which the engine does
            not report enough log-probabilities.
        DeadlineExceededError: after ``timeout``; its ``partial`` has the best outputs so far.
        EngineOverloadedError: if the queue is full at the beginning. Later requests of the search
            wait for a place.
        AsyncLLMError: any other error of one of its requests.

    Cancelling the search aborts its requests.
    """
    if not isinstance(engine, AsyncLLMEngine):
        raise check.value_error("engine", engine, "an AsyncLLMEngine")
    ignore_eos = check.boolean("ignore_eos", ignore_eos)
    eos_token_ids = frozenset(() if ignore_eos else engine.model_config.eos_token_ids)
    vocab_size = engine.model_config.vocab_size
    stop_token_ids = check.token_ids("stop_token_ids", stop_token_ids, vocab_size, vocab_size)
    search = BeamSearch(
        beam_width=check.integer("beam_width", beam_width, 1, MAX_BEAM_WIDTH),
        max_tokens=check.integer("max_tokens", max_tokens, 1),
        length_penalty=check.number("length_penalty", length_penalty, -10, 10),
        early_stopping=_check_early_stopping(early_stopping),
        stop_token_ids=eos_token_ids.union(stop_token_ids),
    )
    timeout = check.seconds("timeout", timeout, optional=True, exclusive_low=True)
    options = {"priority": priority, "cache_salt": cache_salt, "owner": owner}
    driver = _SearchDriver(engine, search, eos_token_ids, options, timeout)
    return await driver.run(prompt)


def _check_early_stopping(value: EarlyStopping) -> EarlyStopping:
    if check.equal_json(value, "never"):
        return value
    error = check.value_error("early_stopping", value, 'true, false or "never"')
    return check.boolean("early_stopping", value, make_error=lambda *_: error)


@dataclass(frozen=True, slots=True)
class Beam:
    """Sequence of output tokens with their log-probabilities."""

    entries: tuple[Logprob, ...] = ()
    logprob: float = 0.0
    score: float = 0.0

    @property
    def token_ids(self) -> list[int]:
        return [entry.token_id for entry in self.entries]


@dataclass(slots=True, kw_only=True)
class BeamSearch:
    """Beam search like transformers' (``GenerationMixin._beam_search``, 5.x), on fewer candidates.

    With w beams and s stop tokens, transformers takes the (1 + s) * w likeliest continuations over
    all beams. It uses two sets of these: the w likeliest, and the w likeliest without a stop token.
    Both sets lie among the w + s likeliest continuations of each beam.

    Attributes:
        running_beams: beams that have not ended, the most likely first.
        ended_beams: at most ``beam_width`` beams that have ended, the highest score first.
        length: number of tokens of each running beam.
        done: whether no running beam can change ``ended_beams`` any more.
    """

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    stop_token_ids: frozenset[int] = frozenset()
    running_beams: list[Beam] = field(default_factory=lambda: [Beam()])
    ended_beams: list[Beam] = field(default_factory=list)
    length: int = 0
    done: bool = False

    @property
    def candidates_per_beam(self) -> int:
        """Number of continuations of each beam to consider in a step: enough that ``beam_width`` of
        them have no stop token."""
        return self.beam_width + len(self.stop_token_ids)

    def advance(self, top_tokens: Iterable[Sequence[Logprob]]) -> None:
        """Advance every running beam by a token.

        Args:
            top_tokens: the ``candidates_per_beam`` likeliest tokens of each running beam.
        """
        candidates = [
            (beam.logprob + entry.logprob, beam, entry)
            for beam, top in zip(self.running_beams, top_tokens, strict=True)
            for entry in top
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        self.length += 1
        divisor = self.length**self.length_penalty
        width, still_running = self.beam_width, []
        for rank, (logprob, beam, entry) in enumerate(candidates):
            if rank >= width and len(still_running) == width:
                break
            ends = self.length == self.max_tokens or entry.token_id in self.stop_token_ids
            beams = self.ended_beams if ends else still_running
            # A candidate ends its beam only if it is among the ``width`` likeliest. A less likely
            # candidate may only continue its beam, in place of a beam that has ended.
            if rank < width if ends else len(still_running) < width:
                beams.append(Beam((*beam.entries, entry), logprob, logprob / divisor))
        self.running_beams = still_running
        self.ended_beams.sort(key=lambda beam: -beam.score)
        del self.ended_beams[self.beam_width :]
        self.done = not still_running or self._cannot_improve()

    def _cannot_improve(self) -> bool:
        if len(self.ended_beams) < self.beam_width:
            return False
        if self.early_stopping is True:
            return True
        length = self.length
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.max_tokens
        best_score = self.running_beams[0].logprob / length**self.length_penalty
        return best_score <= self.ended_beams[-1].score

    def end_early(self) -> None:
        """End the search early: the running beams become outputs as they are."""
        self.ended_beams = self.best_beams()
        self.running_beams, self.done = [], True

    def best_beams(self) -> list[Beam]:
        """Beams with the highest scores, ended or not."""
        beams = [*self.ended_beams, *self.running_beams] if self.length else self.ended_beams
        return sorted(beams, key=lambda beam: -beam.score)[: self.beam_width]


@dataclass(slots=True, eq=False)
class _SearchDriver:
    """Runs a beam search on an engine.

    Attributes:
        _first_completion: completion of the first request; its prompt is the prompt of the search.
            Set in the search's first step.
    """

    _engine: AsyncLLMEngine
    _search: BeamSearch
    _eos_token_ids: frozenset[int]
    _options: dict[str, Any]
    _timeout: float | None
    _began_at: float = field(default_factory=time.monotonic)
    _first_completion: Completion = field(init=False)

    async def run(self, prompt: str | Sequence[int]) -> Completion:
        search = self._search
        try:
            search.advance(await self._next_tokens([prompt]))
            prompt_token_ids = self._first_completion.prompt_token_ids
            while not search.done:
                prompts = [[*prompt_token_ids, *beam.token_ids] for beam in search.running_beams]
                try:
                    search.advance(await self._next_tokens(prompts))
                except ContextLengthExceededError:
                    search.end_early()
        except DeadlineExceededError as error:
            outputs = search.best_beams()
            raise DeadlineExceededError(
                f"beam search passed its deadline after {search.length} tokens",
                partial=self._completion(outputs) if outputs else None,
            ) from error
        return self._completion(search.ended_beams)

    async def _next_tokens(self, prompts: Sequence[str | Sequence[int]]) -> list[Sequence[Logprob]]:
        """Compute the likeliest next tokens of each prompt."""
        streams: list[TokenStream] = []
        try:
            for prompt in prompts:
                streams.append(await self._submit(prompt))
            return [await self._read_next_tokens(stream) for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    async def _submit(self, prompt: str | Sequence[int]) -> TokenStream:
        """Submit a request for one token. If the queue is full, the first request of the search is
        refused; later ones wait."""
        timeout = None
        if self._timeout is not None:
            timeout = self._timeout - (time.monotonic() - self._began_at)
            if timeout <= 0:
                raise DeadlineExceededError("no time is left")
        # Sampling does not matter: only the model's own log-probabilities are used.
        params = SamplingParams(
            max_tokens=1, temperature=0.0, repetition_penalty=1.0, detokenize=False
        )
        options = {
            **self._options,
            "logprobs": min(self._search.candidates_per_beam, self._engine.model_config.vocab_size),
            "ignore_eos": True,
            "timeout": timeout,
        }
        try:
            if not self._search.length:
                return self._engine.stream(prompt, params, **options)
            with anyio.move_on_after(timeout):
                return await self._engine.submit(prompt, params, **options)
        except InvalidRequestError as error:
            if error.param != "logprobs":
                raise
            width = self._search.beam_width
            raise InvalidRequestError(
                f"beam_width={width}: needs more log-probabilities than there are: {error}",
                param="beam_width",
            ) from error
        raise DeadlineExceededError("no time is left")

    async def _read_next_tokens(self, stream: TokenStream) -> Sequence[Logprob]:
        completion = await stream.result()
        if not self._search.length:
            self._first_completion = completion
        if completion.finish_reason == "abort":
            # The search aborts no stream that it reads, so the engine has aborted this one.
            raise EngineClosedError("beam search: the engine was closed meanwhile")
        if not completion.logprobs:
            raise RequestError("beam search: the executor reports no log-probabilities")
        return completion.logprobs[0].top

    def _completion(self, beams: Sequence[Beam]) -> Completion:
        outputs = tuple([self._output(index, beam) for index, beam in enumerate(beams)])
        lengths = [len(output.token_ids) for output in outputs]
        first = self._first_completion
        assert first.usage is not None
        usage = replace(
            first.usage,
            completion_tokens=sum(lengths),
            total_time=time.monotonic() - self._began_at,
            longest_output=max(lengths),
        )
        return replace(first, outputs=outputs, usage=usage)

    def _output(self, index: int, beam: Beam) -> BeamOutput:
        token_ids = beam.token_ids
        last, search = token_ids[-1], self._search
        stops = last in search.stop_token_ids
        prompt_token_ids = self._first_completion.prompt_token_ids
        detokenizer = self._engine.tokenizer.detokenizer(SamplingParams(), prompt_token_ids)
        pieces = [detokenizer.push(token_id) for token_id in token_ids[: len(token_ids) - stops]]
        return BeamOutput(
            index=index,
            text="".join(pieces) + detokenizer.finish(),
            token_ids=tuple(token_ids),
            finish_reason="stop" if stops else "length" if search.done else None,
            stop_reason=last if stops and last not in self._eos_token_ids else None,
            logprobs=tuple([TokenLogprobs(entry, ()) for entry in beam.entries]),
            score=beam.score,
        )
