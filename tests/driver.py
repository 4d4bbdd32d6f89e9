"""A scheduler driven by hand: sequences through an executor, step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from asyncllm.core.batch import (
    GrammarMask,
    PromptLogprobSpan,
    RowError,
    SlotAssignment,
    StepBatch,
    StepResult,
)
from asyncllm.core.executor import Executor
from asyncllm.core.in_process import picklable_params
from asyncllm.core.token_rules import TokenRules
from asyncllm.outputs import TokenLogprobs
from asyncllm.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, seed=0, logprobs=5)


def unchecked(**fields: object) -> SamplingParams:
    """Parameters as validation would let them through if a bound were missing."""
    params = SamplingParams(temperature=0.0, seed=0).resolve({}, {}, lambda: 0)
    for name, value in fields.items():
        object.__setattr__(params, name, value)
    return params


def packed(allowed: Iterable[int], vocab_size: int) -> bytes:
    """A GrammarMask's mask."""
    words = bytearray(4 * -(-vocab_size // 32))
    for token in allowed:
        words[token // 8] |= 1 << token % 8
    return bytes(words)


def state_of(runner: Any) -> Any:
    """The step runner of a model runner that is not closed."""
    assert runner._runner is not None
    return runner._runner


def watch_outputs(runner: Any) -> list[Any]:
    """Copies of the logits and hidden states of each step that is collected from now on."""
    state, outputs = state_of(runner), []
    finish = state.finish

    def watched(step: Any) -> Any:
        sampled = finish(step)
        outputs.extend((step.output.logits.clone(), step.output.hidden.clone()))
        return sampled

    state.finish = watched
    return outputs


UNCHECKED = [
    {"temperature": 1e300},
    {"temperature": 10**400},
    {"repetition_penalty": 1e300},
    {"presence_penalty": 10**400},
    {"top_k": -(2**63)},
    {"logprobs": 10**400},
    {"min_p": "most"},
    {"allowed_token_ids": (2**64,)},
    {"logit_bias": {3: 10**400}},
    {"logits_processors": 5},
]


@dataclass(eq=False)
class Sequence:
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams
    tokens: list[int]
    eos: tuple[int, ...] = ()
    req_index: int | None = None
    blocks: list[list[int]] = field(default_factory=list)  # per KV group
    computed: int = 0
    in_flight: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: Exception | None = None
    mask: Callable[[list[int]], bytes] | None = None  # from the tokens so far
    needs_host: bool = False  # waits for its last token
    bad_words: tuple[tuple[int, ...], ...] = ()  # by their tokens

    @property
    def outputs(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def known(self) -> int:
        """Tokens, those included that a step in flight is sampling."""
        return len(self.tokens) + self.in_flight

    @property
    def done(self) -> bool:
        return self.error is not None or self.known - len(self.prompt) >= self.max_tokens


class Driver:
    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        info = executor.info
        self.kv_groups = info.kv_groups
        # Not in order, so that a table that is read wrongly cannot be right by accident.
        self.free_blocks = deque(sorted(range(1, info.num_blocks), key=lambda b: b * 7919 % 1009))
        self.free_slots = deque(reversed(range(info.max_num_seqs)))
        self.released: list[int] = []
        self.block_copies: list[tuple[int, int]] = []  # of the next step
        self.in_flight: deque[list[tuple[Sequence, bool]]] = deque()
        self.batches: deque[StepBatch] = deque()
        self.step = 0

    def add(
        self, prompt: list[int], max_tokens: int = 24, sampling: SamplingParams = GREEDY, **kw
    ) -> Sequence:
        return Sequence(
            list(prompt), max_tokens, sampling.resolve({}, {}, lambda: 0), list(prompt), **kw
        )

    def launch(self, work: list[tuple[Sequence, int]]) -> StepBatch:
        """Each sequence computes so many tokens; 0 is all it has."""
        batch = StepBatch(self.step, released_indices=self.released, block_copies=self.block_copies)
        self.step, self.released, self.block_copies = self.step + 1, [], []
        rows = [(seq, count or seq.known - seq.computed) for seq, count in work]
        rows.sort(key=lambda row: row[1] != 1 or row[0].computed + 1 != row[0].known)
        record = []
        for seq, count in rows:
            samples = seq.computed + count == seq.known
            batch.num_decodes += samples and count == 1
            self._allocate(batch, seq, seq.computed + count)
            batch.req_indices.append(seq.req_index)
            batch.starts.append(seq.computed)
            batch.counts.append(count)
            batch.samples.append(samples)
            self._ask(batch, seq, count)
            seq.computed += count
            seq.in_flight += samples
            if samples and seq.mask is not None:
                batch.masked_rows.append(len(record))
            record.append((seq, samples))
        batch.num_tokens = sum(batch.counts)
        self.in_flight.append(record)
        self.batches.append(batch)
        self.executor.launch(batch)
        return batch

    def _ask(self, batch: StepBatch, seq: Sequence, count: int) -> None:
        """The row's prompt log-probabilities, none of them twice."""
        first = max(seq.computed, len(seq.prompt_logprobs))
        end = min(seq.computed + count, len(seq.prompt) - 1)
        if seq.sampling.prompt_logprobs is not None and first < end:
            span = PromptLogprobSpan(first, end, seq.sampling.prompt_logprobs)
            batch.prompt_logprobs[len(batch) - 1] = span

    def collect(self) -> StepResult:
        batch, rows = self.batches.popleft(), self.in_flight[0]
        if batch.masked_rows:
            masks = GrammarMask(batch.step)
            for row in batch.masked_rows:
                seq, _ = rows[row]
                assert seq.mask is not None
                masks.rows.append(row)
                masks.masks.append(seq.mask(seq.tokens))
            self.executor.sample(masks)
        result = self.executor.collect()
        token_ids = iter(result.token_ids)
        for row, (seq, samples) in enumerate(self.in_flight.popleft()):
            assert result.counts[row] == (samples and row not in result.errors)
            seq.in_flight -= samples
            if row in result.errors:
                seq.error = self.executor.in_process.errors[result.step][row]
                assert result.errors[row] == RowError.of(seq.error)
                continue
            seq.prompt_logprobs += result.prompt_logprobs.get(row, ())
            if not samples:
                continue
            seq.tokens.append(next(token_ids))
            seq.logprobs += result.logprobs.get(row, ())
        assert list(token_ids) == []
        return result

    def run(self, seqs: list[Sequence], chunk: int = 0, depth: int = 1) -> None:
        """Runs all to their end: prompts in chunks of so many tokens, 0 for whole."""
        while True:
            live = [seq for seq in seqs if not seq.done]
            ready = [seq for seq in live if not (seq.needs_host and seq.in_flight)]
            if ready:
                self.launch([(seq, self._next(seq, chunk)) for seq in ready])
            if len(self.in_flight) >= depth or (not ready and self.in_flight):
                self.collect()
            if not live and not self.in_flight:
                break
        for seq in seqs:
            self.release(seq)

    def release(self, seq: Sequence) -> None:
        """The end of a sequence, or its preemption: it starts over at its next step."""
        if seq.req_index is not None:
            self.released.append(seq.req_index)
            self.free_slots.append(seq.req_index)
            for blocks in seq.blocks:
                self.free_blocks.extend(reversed(blocks))
            seq.req_index, seq.blocks, seq.computed = None, [], 0

    def share(self, source: Sequence, seq: Sequence, num_blocks: int) -> None:
        """A prefix hit: the first blocks of ``source``, which keeps them, go to ``seq``: as many
        of the first KV group, and of the others those of the same tokens."""
        seq.computed = num_blocks * self.executor.info.block_size
        assert not any(seq.computed % spec.block_size for spec in self.kv_groups)
        groups = zip(self.kv_groups, source.blocks, strict=True)
        seq.blocks = [blocks[: seq.computed // spec.block_size] for spec, blocks in groups]

    def _next(self, seq: Sequence, chunk: int) -> int:
        missing = seq.known - seq.computed
        return min(missing, chunk) if chunk else missing

    def _allocate(self, batch: StepBatch, seq: Sequence, length: int) -> None:
        seq.blocks = seq.blocks or [[] for _ in self.kv_groups]
        new: list[list[int]] = []
        for spec, blocks in zip(self.kv_groups, seq.blocks, strict=True):
            missing = -(-length // spec.block_size) - len(blocks)
            new.append([self.free_blocks.popleft() for _ in range(missing)])
            blocks += new[-1]
        if seq.req_index is not None:
            if any(new):
                batch.new_blocks.append((seq.req_index, tuple(new)))
            return
        seq.req_index = self.free_slots.popleft()
        processors_key = -1
        if seq.sampling.logits_processors:
            processors_key = id(seq)
            self.executor.in_process.processors[id(seq)] = seq.sampling.logits_processors
        batch.assignments.append(
            SlotAssignment(
                req_index=seq.req_index,
                request_id=f"seq-{seq.req_index}",
                token_ids=seq.tokens.copy(),
                num_prompt_tokens=len(seq.prompt),
                block_ids=tuple(list(blocks) for blocks in seq.blocks),
                sampling=picklable_params(seq.sampling),
                eos_token_ids=seq.eos,
                processors_key=processors_key,
                token_rules=TokenRules.create(
                    seq.sampling.allowed_token_ids, seq.bad_words, self.executor.info.vocab_size
                ),
            )
        )


def outputs_of(
    executor: Executor, prompt: list[int], max_tokens: int, sampling: SamplingParams
) -> list[int]:
    """The tokens of a sequence by itself."""
    driver = Driver(executor)
    seq = driver.add(prompt, max_tokens, sampling)
    driver.run([seq])
    return seq.outputs
