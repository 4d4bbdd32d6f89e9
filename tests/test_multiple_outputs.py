"""Several outputs of one request."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm import (
    LLM,
    AsyncLLMEngine,
    DeadlineExceededError,
    EngineOverloadedError,
    InvalidRequestError,
    RequestError,
    SamplingParams,
)
from asyncllm.callbacks import stream_with_callbacks
from asyncllm.core.admission import Admission
from asyncllm.core.request import Request
from asyncllm.core.request_grammar import RequestGrammar
from asyncllm.metrics import EngineMetrics
from asyncllm.observer import outputs_of
from asyncllm.outputs import CompletionOutput, Logprob, TokenLogprobs
from asyncllm.stream import TokenStream
from asyncllm.testing import FakeExecutor, fake_engine
from asyncllm.testing.fake_executor import hash_pair
from tests.core_rig import Rig
from tests.fakes import FakeTokenizer, channel_of, core_of, fake, text_of
from tests.idle import all_free, until

PROMPT = [*range(100, 111)]


class SeededExecutor(FakeExecutor):
    """FakeExecutor whose tokens follow from the seed as well."""

    def __init__(self, info, **options):
        super().__init__(info, **options)
        self._seeds = {}
        self._seed = 0

    def _execute(self, batch):
        for assignment in batch.assignments:
            self._seeds[assignment.req_index] = assignment.sampling.seed
        return super()._execute(batch)

    def _token_digests(self, batch, row, digests):
        self._seed = self._seeds[batch.req_indices[row]]
        return digests

    def _next_token(self, digests):
        return hash_pair(super()._next_token(digests), self._seed) % self.info.vocab_size

    def of_seed(self, prompt, count, seed):
        self._seed = seed
        return self.reference(prompt, count)


def seeded(**limits):
    rig = fake(**limits)
    rig.executor = SeededExecutor(rig.info, record=limits.get("record", False))
    return rig


def expected(rig, params, count, prompt=PROMPT):
    """Tokens of each output; on an executor of their own, for the rig's is at work."""
    executor = SeededExecutor(rig.info)
    seeds = [params.of_output(i).seed for i in range(params.n)]
    return [executor.of_seed(prompt, count, seed) for seed in seeds]


def by_index(deltas):
    """Tokens, texts and finish reasons, in the order of the deltas."""
    tokens, texts, reasons = {}, {}, {}
    for delta in deltas:
        assert delta.index not in reasons, "a delta after the output's last"
        tokens.setdefault(delta.index, []).extend(delta.token_ids)
        texts[delta.index] = texts.get(delta.index, "") + delta.text
        if delta.finish_reason is not None:
            reasons[delta.index] = delta.finish_reason
    assert [delta.usage is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    return tokens, texts, reasons


COMPANY = {
    "as it comes": {},
    "one step ahead": {"pipeline_depth": 2},
    "chunks": {"max_num_batched_tokens": 4},
    "chunks, one step ahead": {"max_num_batched_tokens": 4, "pipeline_depth": 2},
    "preemption": {"num_blocks": 12},
    "preemption, one step ahead": {"num_blocks": 12, "pipeline_depth": 2},
    "two slots": {"max_num_seqs": 2},
    "drafts": {"max_tokens_per_row": 3},
}


@pytest.mark.parametrize("company", COMPANY)
async def test_each_output_is_that_of_its_seed(company):
    rig = seeded(**COMPANY[company])
    params = SamplingParams(n=5, seed=7, max_tokens=9)
    async with rig.engine() as engine:
        stream = engine.stream(PROMPT, params)
        deltas = [delta async for delta in stream]
        tokens, texts, reasons = by_index(deltas)
        completion = stream.completion()
        alone = [await engine.generate(PROMPT, params.of_output(i)) for i in range(5)]
        stats = engine.stats()
        await all_free(engine)
    outputs = expected(rig, params, 9)
    assert len({tuple(one) for one in outputs}) == 5
    assert [tokens[i] for i in range(5)] == outputs
    assert [texts[i] for i in range(5)] == list(map(text_of, outputs))
    assert reasons == dict.fromkeys(range(5), "length")
    assert [list(one.token_ids) for one in alone] == outputs
    assert completion.outputs == tuple(
        CompletionOutput(i, text_of(one), tuple(one), "length") for i, one in enumerate(outputs)
    )
    assert completion.text == text_of(outputs[0])
    usage = stream.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.longest_output) == (11, 45, 9)
    assert usage.cached_tokens == 0
    assert usage.inter_token_time == (usage.total_time - usage.ttft) / 8
    assert (stats.num_preemptions > 0) == company.startswith("preemption")
    assert (stats.num_requests, stats.num_finished) == (6, 6)


def test_seeds_of_outputs():
    params = SamplingParams(n=256, seed=7, temperature=0.5, max_tokens=3, stop="x")
    seeds = [params.of_output(i).seed for i in range(256)]
    assert seeds[:3] == [7, 14818979533484651488, 4504606891059362275]
    assert len(set(seeds)) == 256
    other = SamplingParams(n=256, seed=8)
    assert not set(seeds) & {other.of_output(i).seed for i in range(256)}
    assert all(0 <= seed < 2**64 for seed in seeds)
    alone = params.of_output(3)
    assert (alone.n, alone.temperature, alone.max_tokens, alone.stop) == (1, 0.5, 3, ("x",))
    # Negative or not, it is the same 64 bits.
    below = SamplingParams(n=2, seed=-1).of_output(1).seed
    assert below == SamplingParams(n=2, seed=2**64 - 1).of_output(1).seed
    for wrong, index, param in ((params, 256, "index"), (SamplingParams(n=2), 0, "seed")):
        with pytest.raises(InvalidRequestError) as caught:
            wrong.of_output(index)
        assert caught.value.param == param


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("length", [3, 9, 11, 12])
async def test_the_prompt_is_computed_once(length, budget, depth):
    """Each further output computes the last token again, for its logits."""
    rig = seeded(max_num_batched_tokens=budget, pipeline_depth=depth, record=True)
    prompt = PROMPT[:length] + [0] * (length - len(PROMPT))
    async with rig.engine() as engine:
        completion = await engine.generate(prompt, n=6, max_tokens=4)
        stats = engine.stats()
    batches = rig.executor.batches
    computed = sum(
        max(0, min(start + count, length) - start)
        for batch in batches
        for start, count in zip(batch.starts, batch.counts, strict=True)
    )
    assert computed == length + 5
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (
        6 * length,
        length * 5 - 5,
    )
    assert completion.usage.cached_tokens == 0
    if budget == 64:
        first = next(index for index, batch in enumerate(batches) if len(batch) == 6)
        copies = (length - 1) % 4 > 0
        assert first == (depth if copies else 0), "they begin behind the step that they copy from"
        assert len(batches[first].block_copies) == 5 * copies


async def test_outputs_recompute_prompt_without_prefix_cache():
    rig = seeded(record=True)
    async with rig.engine(enable_prefix_caching=False) as engine:
        completion = await engine.generate(PROMPT, n=3, seed=1, max_tokens=2)
    (first, *_) = rig.executor.batches
    assert sorted(first.counts) == [11, 11, 11]
    params = SamplingParams(n=3, seed=1)
    assert [list(o.token_ids) for o in completion.outputs] == expected(rig, params, 2)


async def test_cached_tokens_count_earlier_requests():
    async with seeded().engine() as engine:
        await engine.generate(PROMPT, max_tokens=1)
        completion = await engine.generate(PROMPT, n=4, max_tokens=3)
    assert completion.usage.cached_tokens == 8


async def test_hashes_of_the_prompt_are_taken_from_the_first_output():
    async with seeded().engine() as engine:
        await engine.pause()
        stream = engine.stream(PROMPT, n=3, max_tokens=2)
        first, second, third = stream._group.members
        hashes = first.extend_hashes(4)
        assert len(hashes) == 2
        assert second.extend_hashes(4) == hashes
        second.begin()
        second.token_ids.append(5)
        assert len(second.extend_hashes(4)) == 3
        assert len(hashes) == 2
        first.token_ids.append(6)
        first.extend_hashes(4)
        assert third.extend_hashes(4) == hashes[:2]
        stream.close()
        await engine.resume()


@pytest.mark.parametrize("long", [False, True])
async def test_an_output_that_never_runs_has_no_copies(long, monkeypatch):
    """Three of eight outputs get a slot; the prompt of a long text is set on a worker thread."""
    derived, detokenizers = [], []
    derive, make = SamplingParams.of_output, FakeTokenizer.detokenizer
    monkeypatch.setattr(
        SamplingParams, "of_output", lambda params, i: derived.append(i) or derive(params, i)
    )
    monkeypatch.setattr(
        FakeTokenizer,
        "detokenizer",
        lambda self, params, prompt: detokenizers.append(prompt.copy()) or make(self, params),
    )
    rig = seeded(max_num_seqs=3, **({"max_model_len": 6000, "num_blocks": 4000} if long else {}))
    async with rig.engine() as engine:
        await engine.pause()
        stream = engine.stream("7 " * (3000 if long else 3), n=8, max_tokens=200)
        await until(lambda: stream.prompt_token_ids is not None)
        first, *others = members = stream._group.members
        await until(lambda: others[-1].num_prompt_tokens == first.num_prompt_tokens)
        assert (derived, len(detokenizers)) == ([], 1)
        assert {id(member.sampling) for member in members} == {id(first.sampling)}
        assert len({id(member.token_ids) for member in members}) == 2
        prompt = list(first.token_ids)
        await engine.resume()
        tokens = [set() for _ in members]
        while not all(tokens[:3]):
            delta = await anext(stream)
            tokens[delta.index].update(delta.token_ids)
        stream.close()
        await all_free(engine)
    assert (derived, detokenizers) == ([1, 2], [prompt] * 3)
    assert [member.sampling.seed for member in members[:3]] == [
        first.sampling.of_output(i).seed for i in range(3)
    ]
    assert {tuple(member.token_ids) for member in members[3:]} == {tuple(prompt)}
    assert len({id(member.token_ids) for member in members}) == 4


async def test_an_abort_frees_the_places_of_all_outputs_at_once(monkeypatch):
    advanced = []
    advance = Admission._advance_caller_queues
    monkeypatch.setattr(
        Admission, "_advance_caller_queues", lambda self: advanced.append(1) or advance(self)
    )
    async with seeded(max_num_seqs=2).engine() as engine:
        await engine.pause()
        stream = engine.stream(PROMPT, n=200, max_tokens=9)
        advanced.clear()
        stream.close()
        await all_free(engine)
        assert engine.stats().num_waiting == 0
        # Once for the outputs that end before the last, and once for the last.
        assert len(advanced) == 2


async def test_an_ended_request_keeps_no_long_parameters():
    """Though nobody has read it; and no outputs, if what is read is not kept."""
    lists = {"stop": ["no such text"], "logit_bias": {1: 0.0}, "stop_token_ids": [7]}
    params = SamplingParams(n=3, max_tokens=4, logprobs=1, seed=1, **lists)
    async with AsyncLLMEngine(num_blocks=64) as engine:
        expected = await engine.generate("1", params)
        EngineMetrics(engine)  # Its observer refers to requests.
        stream, unkept = engine.stream("1", params), engine.stream("1", params)
        unkept._drop_read_output()
        unkept._drop_prompt()
        assert unkept.num_outputs == 3
        await all_free(engine)
        request = stream._request
        assert request.sampling == SamplingParams(logprobs=1)
        assert (request.stop_token_ids, request.token_rules, request.output) == (set(), None, None)
        await engine.generate("2", max_tokens=1)  # The scheduler keeps the requests of a step.
        alive = [one for one in gc.get_objects() if type(one) is Request]
        assert not [one for one in alive if one.group is unkept._group]
        assert (await stream.result()).outputs == expected.outputs
        texts = [""] * 3
        async for delta in unkept:
            texts[delta.index] += delta.text
        assert texts == [output.text for output in expected.outputs]


async def test_outputs_end_one_by_one_and_the_stream_with_the_last():
    rig = seeded()
    params = SamplingParams(n=3, seed=3)
    outputs = expected(rig, params, 12)
    stops = [outputs[0][2], outputs[2][4]]
    lengths = [min([one.index(s) + 1 for s in stops if s in one], default=12) for one in outputs]
    assert lengths == [3, 12, 5]
    async with rig.engine() as engine:
        stream = engine.stream(PROMPT, params, max_tokens=12, stop_token_ids=stops)
        deltas = [delta async for delta in stream]
        completion = stream.completion()
        await all_free(engine)
    tokens, _, reasons = by_index(deltas)
    assert tokens == {
        i: one[:length] for i, (one, length) in enumerate(zip(outputs, lengths, strict=True))
    }
    assert list(reasons.items()) == [(0, "stop"), (2, "stop"), (1, "length")]
    assert [o.stop_reason for o in completion.outputs] == [stops[0], None, stops[1]]
    assert [o.text for o in completion.outputs] == [
        text_of(outputs[0][:2]), text_of(outputs[1]), text_of(outputs[2][:4])
    ]  # fmt: skip
    assert (stream.finish_reason, completion.finish_reason) == ("length", "stop")
    assert (stream.usage.completion_tokens, stream.usage.longest_output) == (20, 12)


@pytest.mark.parametrize("way", ["abort", "cancelled read", "closing", "deadline"])
async def test_all_outputs_end_together(way):
    """In the middle, with the first ended and text held back of each other: it may yet become
    a stop string."""
    rig = seeded()
    params = SamplingParams(n=3, seed=3, stop=[" !"])
    outputs = expected(rig, params, 8)
    options = {"stop_token_ids": [outputs[0][1]], "max_tokens": 200}
    rig.executor.gate = threading.Semaphore(5)  # The others begin in the second step.
    async with rig.engine() as engine:
        timeout = 0.5 if way == "deadline" else None
        stream = engine.stream(PROMPT, params, timeout=timeout, **options)
        deltas = []
        while sum(len(delta.token_ids) for delta in deltas) < 2 + 4 + 4:
            deltas.append(await anext(stream))
        error = None
        if way == "abort":
            stream.abort()
        elif way == "cancelled read":
            read = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.01)
            read.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await read
        elif way == "closing":
            closing = asyncio.ensure_future(engine.aclose())
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(0.6)
        rig.executor.gate.release(1000)
        try:
            async for delta in stream:
                deltas.append(delta)
        except RequestError as caught:
            error = caught
        if way == "closing":
            await closing
        else:
            await all_free(engine)
    tokens = {i: [t for d in deltas if d.index == i for t in d.token_ids] for i in range(3)}
    texts = {i: "".join(d.text for d in deltas if d.index == i) for i in range(3)}
    for i in (1, 2):
        assert 4 <= len(tokens[i]) <= 6
        assert tokens[i] == outputs[i][: len(tokens[i])]
        assert texts[i] == text_of(tokens[i]) or way == "deadline"
    assert (tokens[0], texts[0]) == (outputs[0][:2], text_of(outputs[0][:1]))
    if way in ("abort", "closing"):
        assert error is None
        reasons = [output.finish_reason for output in stream.completion().outputs]
        assert reasons == ["stop", "abort", "abort"]
    elif way == "deadline":
        assert isinstance(error, DeadlineExceededError)
        partial = error.partial.outputs
        assert [o.index for o in partial] == [0, 1, 2]
        assert [list(o.token_ids) for o in partial] == [tokens[i] for i in range(3)]
    else:
        assert "a read of its stream was cancelled" in str(error)


async def test_a_slow_reader_holds_all_outputs_up():
    rig = seeded(pipeline_depth=2)
    params = SamplingParams(n=3, seed=3, max_tokens=20)
    async with rig.engine() as engine:
        stream = engine.stream(PROMPT, params, on_slow="pause", max_unread=9)
        await until(lambda: engine.stats().num_paused >= 3)
        assert channel_of(stream).num_unread <= 9 + 2 * 3
        await engine.pause()
        await engine.resume()
        tokens, _, _ = by_index([delta async for delta in stream])
        await all_free(engine)
    assert [tokens[i] for i in range(3)] == expected(rig, params, 20)


def test_a_thread_reads_all_outputs():
    rig = seeded()
    params = SamplingParams(n=3, seed=3, max_tokens=4)
    engine = rig.engine()
    engine._start_blocking()
    with LLM(engine=engine) as llm:
        llm._owns_engine = True
        tokens, _, _ = by_index(list(llm.stream(PROMPT, params)))
        batch = llm.generate([PROMPT, [1, 2]], params)
    outputs = expected(rig, params, 4)
    assert [tokens[i] for i in range(3)] == outputs
    assert [list(o.token_ids) for o in batch[0].outputs] == outputs
    assert [list(o.token_ids) for o in batch[1].outputs] == expected(rig, params, 4, [1, 2])


@given(st.lists(st.tuples(st.sampled_from(["put", "end", "read"]), st.integers(0, 2))))
def test_any_order_of_tokens_ends_and_reads(actions):
    """Each output comes whole and in order, and no delta has tokens of two."""
    rig = Rig()
    group = rig.group(9, 9, 9, max_unread=3)
    stream = TokenStream(group.members[0], rig.core, lambda: None)
    rig.core._run_commands()
    written = {0: [], 1: [], 2: []}
    open_members, deltas = dict(enumerate(group.members)), []
    for action, index in [*actions, ("end", 0), ("end", 1), ("end", 2), *[("read", 0)] * 999]:
        if action == "read":
            if stream._is_done:
                break
            if channel_of(stream).items or channel_of(stream).stream_end is not None:
                deltas.append(stream._pop_delta())
        elif index in open_members:
            member = open_members[index]
            token = 100 * index + len(written[index])
            written[index].append(token)
            member.token_ids.append(token)
            if action == "end":
                rig.scheduler.finish(member, "length")
                del open_members[index]
            rig.core.output_processor.deliver((member, token, None, None), 0.0)
    tokens, texts, reasons = by_index(deltas)
    assert tokens == written
    assert texts == {index: text_of(tokens) for index, tokens in written.items()}
    assert reasons == dict.fromkeys(range(3), "length")
    assert all(len(delta.token_ids) <= 3 for delta in deltas)
    assert all(t // 100 == delta.index for delta in deltas for t in delta.token_ids)
    outputs = stream.completion().outputs
    assert [list(o.token_ids) for o in outputs] == [written[i] for i in range(3)]


async def test_limits():
    async with seeded().engine(max_queued_requests=6) as engine:
        with pytest.raises(
            InvalidRequestError, match="n=7: expected at most max_queued_requests=6"
        ):
            engine.stream(PROMPT, n=7)
        await engine.pause()
        stream = engine.stream(PROMPT, n=4, max_tokens=3)
        with pytest.raises(EngineOverloadedError, match="4 requests are queued"):
            engine.stream(PROMPT, n=3)
        stats = engine.stats()
        assert (stats.num_waiting, stats.num_requests, stats.num_rejected) == (4, 1, 1)
        await engine.resume()
        assert len((await stream.result()).outputs) == 4


async def test_greedy_by_the_models_own_defaults_is_refused():
    rig = seeded()
    rig.model_config.generation_defaults["temperature"] = 0.0
    async with rig.engine() as engine:
        with pytest.raises(InvalidRequestError, match="n=2: expected 1 with temperature=0"):
            engine.stream(PROMPT, n=2)
        assert len((await engine.generate(PROMPT, n=2, temperature=1, max_tokens=1)).outputs) == 2


async def test_a_long_text_is_tokenised_once_for_all():
    rig = seeded(num_blocks=2000, max_num_batched_tokens=1024)
    text = "1 " * 3000
    params = SamplingParams(n=3, seed=3, max_tokens=4)
    async with rig.engine(max_queued_tokens=50_000) as engine:
        await engine.pause()
        stream = engine.stream(text, params)
        while stream.prompt_token_ids is None:
            await asyncio.sleep(0.001)
        core = core_of(engine)
        await asyncio.wrap_future(core.call(bool))
        assert core.admission.num_queued_tokens == 9000
        await engine.resume()
        completion = await stream.result()
    outputs = expected(rig, params, 4, [1] * 3000)
    assert [list(o.token_ids) for o in completion.outputs] == outputs


def test_cumulative_logprob():
    entries = tuple(TokenLogprobs(Logprob(t, -0.25 * t, 1), ()) for t in (1, 2, 3))
    assert CompletionOutput(0, "", (1, 2, 3), "stop", logprobs=entries).cumulative_logprob == -1.5
    assert CompletionOutput(0, "", (), "abort", logprobs=()).cumulative_logprob == 0.0
    assert CompletionOutput(0, "", (1,), "stop").cumulative_logprob is None


async def test_callbacks_are_told_of_each_output():
    class Handler:
        def __init__(self):
            self.chunks, self.results = [], []

        def on_llm_new_token(self, token, *, chunk, **_):
            self.chunks.append((chunk.generation_info["index"], token))

        def on_llm_end(self, result, **_):
            self.results.append(result)

    rig, handler = seeded(), Handler()
    params = SamplingParams(n=2, seed=3, max_tokens=5)
    outputs = expected(rig, params, 5)
    stops = [outputs[0][1]]
    async with rig.engine() as engine:
        stream = stream_with_callbacks(
            engine, PROMPT, params, handlers=[handler], stop_token_ids=stops
        )
        await stream.result()
    texts = [text_of(outputs[0][:1]), text_of(outputs[1])]
    for index in (0, 1):
        assert "".join(text for i, text in handler.chunks if i == index) == texts[index]
    (result,) = handler.results
    (generations,) = result.generations
    assert [one.text for one in generations] == texts
    assert [one.generation_info["finish_reason"] for one in generations] == ["stop", "length"]
    assert [one.generation_info["index"] for one in generations] == [0, 1]
    assert result.llm_output["token_usage"]["completion_tokens"] == 7


async def test_observers_see_all_outputs():
    seen = []

    class Watch:
        def on_submit(self, request, submission):
            seen.append([one.index for one in outputs_of(request)])

        def on_finish(self, request, usage, error):
            seen.append([one.num_output_tokens for one in outputs_of(request)])
            seen.append((request.sampling.n, usage.longest_output, usage.completion_tokens))

    rig = seeded()
    params = SamplingParams(n=2, seed=3, max_tokens=5)
    stop = expected(rig, params, 5)[0][1]
    async with rig.engine() as engine:
        engine.add_observer(Watch())
        await engine.generate(PROMPT, params, stop_token_ids=[stop])
    assert seen == [[0, 1], [2, 5], (2, 5, 7)]


async def test_a_script_answers_each_output():
    answers = iter(["one", "two", "three", "four", "five"])
    async with fake_engine(lambda prompt: next(answers)) as engine:
        completion = await engine.generate("?", n=3)
        messages = [{"role": "user", "content": "?"}]
        chat = await engine.chat(messages, n=2).result()
    assert [output.text for output in completion.outputs] == ["one", "two", "three"]
    assert [output.text for output in chat.outputs] == ["four", "five"]


async def test_outputs_that_never_ran_are_dropped_without_work_for_each(monkeypatch):
    checks, matchers = [], []
    check_fields, matcher = SamplingParams._check_fields, RequestGrammar.matcher.fget
    monkeypatch.setattr(
        SamplingParams,
        "_check_fields",
        lambda self, changed: (checks.append(self), check_fields(self, changed))[-1],
    )
    monkeypatch.setattr(
        RequestGrammar, "matcher", property(lambda self: (matchers.append(self), matcher(self))[-1])
    )
    async with fake_engine("x" * 9) as engine:
        params = SamplingParams(n=64, stop=["#"], structured_outputs={"regex": "x*"})
        await engine.generate("x", stop=["#"], structured_outputs={"regex": "x*"}, max_tokens=1)
        await engine.pause()
        checks.clear()
        matchers.clear()
        stream = engine.stream("x", params)
        stream.close()
        await until(lambda: engine.stats().num_aborted == 1)
        assert (len(checks) < 8, matchers) == (True, [])
        await engine.resume()
