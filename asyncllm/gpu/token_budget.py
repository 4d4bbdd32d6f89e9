"""The token budget of a step, and the depth of the pipeline, on a device whose speed is not known
beforehand."""

from __future__ import annotations

from collections.abc import Callable

TARGET_SECONDS = 0.2
"""Of a step on a CPU."""

GPU_TARGET_SECONDS = 0.05
"""Of a step on a GPU: the gap that a prompt makes in every stream that runs."""

LOWEST = 64
HIGHEST = 2048
"""Tokens, on a CPU; on a GPU those of the device's default."""

MULTIPLE = 32

SHORT_SECONDS = 0.01
"""Of a full decode step: with a second one in flight an abort and a first token wait for two."""

WORTH_SECONDS = 0.0005
"""Of a step that begins behind the one before without the host."""

_FIRST = 32


def calibrate_token_budget(
    time_step: Callable[[int], float],
    *,
    target: float = TARGET_SECONDS,
    highest: int = HIGHEST,
    repeats: int = 1,
) -> int:
    """Tokens for which a prefill step takes about ``target`` seconds, so that with the growth of
    attention over a long context a full step stays within a quarter more.

    Steps of doubling size are timed until one takes half of that: a shorter one would be
    dominated by reading the weights, which a larger step does not do again. A step of one token
    warms up.

    Args:
        time_step: runs a step of so many tokens and returns its seconds.
        highest: tokens, at least LOWEST.
        repeats: times that a size is timed, of which the shortest counts: the first step of a size
            may load what later ones find.

    Returns:
        A multiple of 32 from 64 to ``highest``, or ``highest`` itself.
    """

    def time_best(count: int) -> float:
        return min(time_step(count) for _ in range(repeats))

    size = _FIRST
    time_step(1)
    seconds = time_best(size)
    while seconds < target / 2 and size * 2 <= highest:
        size *= 2
        seconds = time_best(size)
    tokens = int(size * target / max(seconds, 1e-9))
    return max(LOWEST, min(highest, tokens // MULTIPLE * MULTIPLE))


def ahead_from(time_step: Callable[[int], float], max_num_seqs: int) -> int | None:
    """Tokens of a step from which on it is worth having it begin on its own, behind the one before:
    as many as take half a millisecond, because a step that is shorter than the Python of the engine
    thread and the loop only waits for the GIL on another thread.

    A step of eight tokens comes first, so that the large model, which is slow already, costs the
    start little.

    Args:
        time_step: as for ``calibrate_token_budget``.

    Returns:
        None where no second step should be in flight: one token of each sequence takes more than
        10 ms, the best of three.
    """
    if time_step(min(8, max_num_seqs)) > SHORT_SECONDS:
        return None
    seconds = min(time_step(max_num_seqs) for _ in range(3))
    if seconds > SHORT_SECONDS:
        return None
    return max(1, round(max_num_seqs * WORTH_SECONDS / max(seconds, 1e-9)))
