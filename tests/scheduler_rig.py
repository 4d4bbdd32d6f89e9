"""A scheduler and a fake device, driven by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from asyncllm.core.executor import ExecutorInfo
from asyncllm.core.kv_cache_spec import KVCacheSpec
from asyncllm.core.request import Request, RequestGroup
from asyncllm.core.scheduled_step import ScheduledStep
from asyncllm.core.scheduler import Scheduler
from asyncllm.sampling_params import SamplingParams
from asyncllm.testing import FakeExecutor
from tests.integrity import check_scheduler


def info(
    block_size: int | tuple[int, ...] = 4, windows: tuple[int | None, ...] = (), **changes
) -> ExecutorInfo:
    """Of one KV group, or of one with each of the block sizes, and the first of these windows."""
    sizes = (block_size,) if isinstance(block_size, int) else block_size
    pairs = itertools.zip_longest(sizes, windows)
    values = dict(
        vocab_size=997,
        num_blocks=17,
        kv_groups=tuple(group(i, size, window) for i, (size, window) in enumerate(pairs)),
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        pipeline_depth=1,
    )
    return ExecutorInfo(**(values | changes))


def group(index: int, block_size: int, window: int | None) -> KVCacheSpec:
    if window is None:
        return KVCacheSpec((index,), block_size)
    return KVCacheSpec((index,), block_size, window)


def longest_context(specs: Sequence[KVCacheSpec], num_blocks: int, step_tokens: int) -> int:
    """Tokens of a request, up to 40, whose KV the blocks hold in every group."""
    needed = (sum(spec.max_blocks(n, step_tokens) for spec in specs) for n in range(41))
    return max(n for n, blocks in enumerate(needed) if blocks <= num_blocks)


class Rig:
    """A scheduler and a fake device, driven by hand."""

    def __init__(self, policy="fcfs", caching=True, **changes):
        self.info = info(**changes)
        self.executor = FakeExecutor(self.info)
        self.scheduler = Scheduler(self.info, policy=policy, enable_prefix_caching=caching)
        self.in_flight: list[ScheduledStep] = []
        self.arrival_index = 0

    def add(
        self,
        prompt,
        max_tokens=8,
        *,
        priority=0,
        deadline=math.inf,
        eos=(),
        salt=None,
        owner=None,
        needs_host=False,
        first=None,
        **sampling,
    ):
        request = Request(
            RequestGroup(f"r{self.arrival_index}", deadline=deadline),
            SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0, **sampling),
            token_ids=list(prompt),
            max_model_len=self.info.max_model_len,
            arrival_index=self.arrival_index,
            priority=priority,
            eos_token_ids=eos,
            cache_salt=salt,
            owner=owner,
            needs_host=needs_host,
            first_member=first,
        )
        self.arrival_index += 1
        self.scheduler.add(request)
        return request

    def launch(self) -> ScheduledStep | None:
        step = self.scheduler.schedule()
        if step is not None:
            self.check_tokens_are_known(step)
            self.executor.launch(step.batch)
            self.in_flight.append(step)
        return step

    def check_tokens_are_known(self, step):
        """No row goes on from a token in flight that the host draws."""
        for request, epoch in zip(step.requests, step.epochs, strict=True):
            for earlier in self.in_flight if request.needs_host else ():
                for row, other in enumerate(earlier.requests):
                    if other is request and earlier.epochs[row] == epoch:
                        assert not earlier.batch.samples[row], request

    def collect(self):
        step = self.in_flight.pop(0)
        return list(self.scheduler.update(step, self.executor.collect()))

    def step(self) -> dict[str, int]:
        """Launches and collects one step; what each request computed in it."""
        step = self.launch()
        if step is None:
            return {}
        shape = {r.request_id: n for r, n in zip(step.requests, step.batch.counts, strict=True)}
        self.collect()
        check_scheduler(self.scheduler)
        return shape

    def finish_all(self, *expected, limit=2000):
        """Steps until nothing is left; then ``expect``."""
        while self.scheduler.has_work():
            assert limit, "requests do not finish"
            limit -= 1
            self.step()
        self.expect(*expected)

    def expect(self, *requests):
        """The output of finished requests equals the one computed without any cache, and so
        do the prompt log-probabilities that they asked for."""
        for request in requests:
            self._expect(request)

    def _expect(self, request):
        prompt = request.token_ids[: request.num_prompt_tokens]
        expected = self.executor.reference(prompt, request.num_output_tokens)
        assert request.output_token_ids == expected
        count, found = request.sampling.prompt_logprobs, request.prompt_logprobs
        if count is None:
            assert found is None
            return
        of_prompt = self.executor.reference_prompt_logprobs(prompt, count)
        assert found == (of_prompt[: len(found)] if request.finish_reason == "abort" else of_prompt)
