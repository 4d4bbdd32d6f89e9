"""RunningUsage: usage in each chunk of an answer, by which load generators count tokens (vLLM's
``stream_options.continuous_usage_stats``)."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from asyncllm.outputs import Delta
from asyncllm.serving.exchange import encode
from asyncllm.stream import TokenStream


@dataclass(slots=True)
class RunningUsage:
    """Counts of tokens: of the prompts whose choices have begun, and of all outputs."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _prompts: dict[int, int] = field(default_factory=dict)
    _generated: int = 0

    def add(self, delta: Delta, base: int, stream: TokenStream) -> str:
        """Count ``delta``; returns ``usage`` as JSON.

        Args:
            base: index of the stream's first choice.
        """
        with self._lock:  # a long chunk of another prompt may be written on a thread
            if base not in self._prompts:
                self._prompts[base] = len(stream.prompt_token_ids or ())
            self._generated += len(delta.token_ids)
            prompt, generated = sum(self._prompts.values()), self._generated
        return encode(
            {
                "prompt_tokens": prompt,
                "completion_tokens": generated,
                "total_tokens": prompt + generated,
            }
        )
