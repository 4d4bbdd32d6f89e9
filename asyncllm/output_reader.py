"""OutputReader: collects the deltas read from one output."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncllm.core.request import Request
from asyncllm.outputs import CompletionOutput, Delta, FinishReason, TokenLogprobs


@dataclass(slots=True, eq=False)
class OutputReader:
    """Collector of the deltas read from one output.

    Attributes:
        num_read: number of tokens read: the first ones of the request's output, to which the engine
            thread only appends.
        finish_reason, stop_reason: None until the output's last delta was read.
    """

    request: Request
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_read: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        if delta.logprobs is not None:
            self.logprobs += delta.logprobs
        self.num_read += len(delta.token_ids)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def output(self) -> CompletionOutput:
        """Make a CompletionOutput of the deltas read so far."""
        request = self.request
        begin = request.num_prompt_tokens
        return CompletionOutput(
            index=request.index,
            text="".join(self.texts),
            token_ids=tuple(request.token_ids[begin : begin + self.num_read]),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=tuple(self.logprobs) if request.sampling.logprobs is not None else None,
        )
