"""An engine core and a fake device, driven by hand."""

from __future__ import annotations

from asyncllm import SamplingParams
from asyncllm.core.admission import Admission
from asyncllm.core.channel import Channel
from asyncllm.core.engine_core import EngineCore
from asyncllm.core.output_processor import DetokenizerState
from asyncllm.core.request import Request, RequestGroup
from asyncllm.core.scheduler import Scheduler
from asyncllm.observer import ObserverNotifier, Observers, RequestInfo
from tests.fakes import FakeTokenizer, fake

PROMPT = [3, 1, 4]


class Rig:
    def __init__(self, max_queued_requests=10, max_queued_tokens=1000, **limits):
        self.now = 0.0
        self.tokenizer = FakeTokenizer()
        self.executor = fake(**limits).executor
        self.scheduler = Scheduler(self.executor.info)
        admission = Admission(max_queued_requests, max_queued_tokens, self.clock)
        self.core = EngineCore(self.executor, self.scheduler, admission, clock=self.clock)
        self.core._wait_for_command = lambda: None  # there is no other thread
        self.observers = Observers()
        self.members = {}

    def clock(self):
        return self.now

    def group(self, *lengths, name="g", deadline=float("inf"), on_slow="coalesce", max_unread=64):
        """A member with a prompt of its own for each length of output."""
        channel = Channel(on_slow=on_slow, max_unread=max_unread)
        group = RequestGroup(name, channel, deadline=deadline)
        for i, length in enumerate(lengths):
            params = SamplingParams(max_tokens=length, temperature=0.0, seed=0)
            output = DetokenizerState(self.tokenizer.decode, self.tokenizer.detokenizer(params))
            Request(group, params, token_ids=[*PROMPT, i], max_model_len=256, output=output)
        if self.observers.registered:
            group.notifier = ObserverNotifier(group.members[0], self.observers.registered)
        self.core.admission.reserve(group, len(PROMPT) + 1)
        if group.notifier is not None:
            group.notifier.notify_submit(RequestInfo("text_completion", PROMPT))
        self.core.send(self.core.on_add, group)
        self.members[name] = list(group.members)
        return group

    def steps(self, count):
        for _ in range(count):
            self.core.step()

    def reference(self, group):
        return {
            m.index: self.executor.reference([*PROMPT, m.index], m.sampling.max_tokens)
            for m in self.members[group.request_id]
        }
