"""SampleOutput: the tokens that a step sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from asyncllm.outputs import TokenLogprobs

NOT_FINITE_MESSAGE = "the model's logits are not finite numbers"
NO_TOKEN_MESSAGE = (
    "no token is left to sample: the grammar, allowed_token_ids, bad_words, min_tokens and logits "
    "processors exclude all of them"
)


@dataclass(slots=True)
class SampleOutput:
    """Tokens of a step's sampled rows, with log-probabilities and errors.

    Attributes:
        token_ids: ``[S]`` int64, -1 for a row in ``errors``.
        logprobs, errors: by index within the sampled rows.
        prompt_logprobs: by row of the step.
    """

    token_ids: np.ndarray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)

    def merge(self, sampled_indices: np.ndarray, other: SampleOutput) -> None:
        """Copies the rows of ``other`` to the indices ``sampled_indices``."""
        self.token_ids[sampled_indices] = other.token_ids
        indices = sampled_indices.tolist()
        self.logprobs |= {indices[row]: logprobs for row, logprobs in other.logprobs.items()}
        self.errors |= {indices[row]: error for row, error in other.errors.items()}
