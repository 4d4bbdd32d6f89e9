"""The token budget of a step, and the depth of the pipeline, on a device whose speed is not known
beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

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

_SIZES = 8, 32
"""Tokens of the first steps that are timed. Where the first takes half of the target already, so
would the second, and LOWEST is the budget: a model that slow is spared the longer step."""

_NOTHING_KNOWN: Mapping[int, float] = MappingProxyType({})


def calibrate_token_budget(
    time_step: Callable[[int], float],
    *,
    target: float = TARGET_SECONDS,
    highest: int = HIGHEST,
    repeats: int = 1,
) -> int:
    """Tokens for which a prefill step takes about ``target`` seconds, so that with the growth of
    attention over a long context a full step stays within a quarter more.

    Steps of 8 and 32 tokens, and then of doubling size, are timed until one takes half of that: a
    shorter one would be dominated by reading the weights, which a larger step does not do again. A
    step of one token warms up.

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

    size, second = _SIZES
    time_step(1)
    seconds = time_best(size)
    while seconds < target / 2 and size * 2 <= highest:
        size = max(second, size * 2)
        seconds = time_best(size)
    tokens = int(size * target / max(seconds, 1e-9))
    return max(LOWEST, min(highest, tokens // MULTIPLE * MULTIPLE))


def ahead_from(
    time_step: Callable[[int], float],
    max_num_seqs: int,
    known: Mapping[int, float] = _NOTHING_KNOWN,
) -> int | None:
    """Tokens of a step from which on it is worth having it begin on its own, behind the one before:
    as many as take half a millisecond, because a step that is shorter than the Python of the engine
    thread and the loop only waits for the GIL on another thread.

    A step of eight tokens comes first, so that the large model, which is slow already, costs the
    start little.

    Args:
        time_step: as for ``calibrate_token_budget``.
        known: seconds of steps that were timed before, by their tokens: the step of eight tokens
            is not run again.

    Returns:
        None where no second step should be in flight: one token of each sequence takes more than
        10 ms, the best of three.
    """
    few = min(_SIZES[0], max_num_seqs)
    if (known[few] if few in known else time_step(few)) > SHORT_SECONDS:
        return None
    seconds = min(time_step(max_num_seqs) for _ in range(3))
    if seconds > SHORT_SECONDS:
        return None
    return max(1, round(max_num_seqs * WORTH_SECONDS / max(seconds, 1e-9)))
