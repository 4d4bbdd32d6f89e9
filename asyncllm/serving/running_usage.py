"""RunningUsage: ``usage`` so far, for each chunk of an answer (vLLM's ``continuous_usage_stats``).

Load generators count tokens by it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from asyncllm.outputs import Delta
from asyncllm.serving.exchange import encode
from asyncllm.stream import TokenStream


@dataclass(slots=True)
class RunningUsage:
    """Number of tokens so far: of the prompts with any output, and of all outputs."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _prompt_tokens: dict[int, int] = field(default_factory=dict)
    _generated_tokens: int = 0

    def add(self, delta: Delta, first_choice: int, stream: TokenStream) -> str:
        """Count ``delta``; returns ``usage`` as JSON.

        Args:
            first_choice: index of the stream's first choice.
        """
        with self._lock:  # Another thread may write a long chunk of another prompt.
            if first_choice not in self._prompt_tokens:
                self._prompt_tokens[first_choice] = len(stream.prompt_token_ids or ())
            self._generated_tokens += len(delta.token_ids)
            prompt, generated = sum(self._prompt_tokens.values()), self._generated_tokens
        return encode(
            {
                "prompt_tokens": prompt,
                "completion_tokens": generated,
                "total_tokens": prompt + generated,
            }
        )
