"""Every way to sample a request."""

from __future__ import annotations

from typing import Any

WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.02, "presence_penalty": 0.5},
    {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
    {"temperature": 0, "logit_bias": {5: 3.0, 9: -100.0}, "logprobs": 2},
    {"temperature": 1.0, "allowed_token_ids": list(range(50, 90))},
    {"temperature": 0.9, "logits_processors": [lambda ids, row: row * (1 + len(ids) % 2)]},
    {"temperature": 1.0, "min_tokens": 10, "stop_token_ids": list(range(0, 2048, 17))},
]
