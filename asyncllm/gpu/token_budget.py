"""The token budget of a step, and the depth of the pipeline, on a device whose speed is not known
beforehand."""

from __future__ import annotations

from collections.abc import Callable

TARGET_SECONDS = 0.2
LOWEST = 64
HIGHEST = 2048
MULTIPLE = 32

SHORT_SECONDS = 0.01
"""Of a full decode step: with a second one in flight an abort and a first token wait for two."""

_FIRST = 32
_ENOUGH_SECONDS = TARGET_SECONDS / 2


def calibrate_token_budget(time_step: Callable[[int], float]) -> int:
    """Tokens for which a prefill step takes about 0.2 s, so that with the growth of
    attention over a long context a full step stays near 250 ms.

    Steps of doubling size are timed until one takes half of that: a shorter one would be
    dominated by reading the weights, which a larger step does not do again. A step of one token
    warms up.

    Args:
        time_step: runs a step of so many tokens and returns its seconds.

    Returns:
        A multiple of 32 from 64 to 2048.
    """
    size = _FIRST
    time_step(1)
    seconds = time_step(size)
    while seconds < _ENOUGH_SECONDS and size * 2 <= HIGHEST:
        size *= 2
        seconds = time_step(size)
    tokens = int(size * TARGET_SECONDS / max(seconds, 1e-9))
    return max(LOWEST, min(HIGHEST, tokens // MULTIPLE * MULTIPLE))


def is_short(time_step: Callable[[int], float], max_num_seqs: int) -> bool:
    """Whether steps are so short that a second one may be in flight: one token of each sequence
    takes at most 10 ms, the best of three.

    A step of eight tokens comes first, so that the large model, which is slow already, costs the
    start little.

    Args:
        time_step: as for ``calibrate_token_budget``.
    """
    if time_step(min(8, max_num_seqs)) > SHORT_SECONDS:
        return False
    return any(time_step(max_num_seqs) <= SHORT_SECONDS for _ in range(3))
