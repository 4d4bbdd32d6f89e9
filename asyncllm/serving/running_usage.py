"""RunningUsage: the usage of an answer after each of its chunks (vLLM's
``stream_options.continuous_usage_stats``), by which load generators count tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncllm.outputs import Delta
from asyncllm.serving.exchange import encode
from asyncllm.stream import TokenStream


@dataclass(slots=True)
class RunningUsage:
    """Tokens of the prompts whose choices have begun, and of all choices so far."""

    _prompts: dict[int, int] = field(default_factory=dict)
    _generated: int = 0

    def add(self, delta: Delta, base: int, stream: TokenStream) -> str:
        """``usage`` behind ``delta``, as JSON.

        Args:
            base: index of the stream's first choice.
        """
        if base not in self._prompts:
            self._prompts[base] = len(stream.prompt_token_ids or ())
        self._generated += len(delta.token_ids)
        prompt = sum(self._prompts.values())
        return encode(
            {
                "prompt_tokens": prompt,
                "completion_tokens": self._generated,
                "total_tokens": prompt + self._generated,
            }
        )
