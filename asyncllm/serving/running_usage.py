"""RunningUsage: ``usage`` so far, for each chunk of an answer (vLLM's ``continuous_usage_stats``).

Load generators count tokens by this field.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from asyncllm.outputs import Delta
from asyncllm.serving.exchange import encode_json
from asyncllm.stream import TokenStream


@dataclass(slots=True)
class RunningUsage:
    """Token counts so far: tokens of prompts that have output, and tokens of all outputs."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _num_prompt_tokens: dict[int, int] = field(default_factory=dict)
    _num_generated_tokens: int = 0

    def add(self, delta: Delta, first_choice_index: int, stream: TokenStream) -> str:
        """Count ``delta``; returns ``usage`` as JSON.

        Args:
            first_choice_index: index of the stream's first choice.
        """
        # Long chunks are written on a worker thread: two prompts may be counted concurrently.
        with self._lock:
            if first_choice_index not in self._num_prompt_tokens:
                self._num_prompt_tokens[first_choice_index] = stream._num_prompt_tokens
            self._num_generated_tokens += len(delta.token_ids)
            prompt, generated = sum(self._num_prompt_tokens.values()), self._num_generated_tokens
        return encode_json(
            {
                "prompt_tokens": prompt,
                "completion_tokens": generated,
                "total_tokens": prompt + generated,
            }
        )
