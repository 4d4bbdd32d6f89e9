"""Hypothesis profiles, and numbers of examples under each."""

from __future__ import annotations

import os
from unittest import TestCase

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
THOROUGH = 10
"""Times as many examples in the profile "thorough"."""
STEPS = {"stateful_step_count": 40}

settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "thorough",
    parent=settings.get_profile("default"),
    max_examples=100 * THOROUGH,
    stateful_step_count=120,
)
# The same examples for every change, so that a failure is the change's own.
settings.register_profile(
    "check", parent=settings.get_profile("default"), derandomize=True, database=None
)
# The same examples for every mutant, none of them shrunk: that it fails is enough.
settings.register_profile(
    "mutation",
    parent=settings.get_profile("default"),
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile(PROFILE)


def examples(count: int, **more: int) -> settings:
    """The loaded profile with ``count`` examples, or ten times as many in "thorough"."""
    return settings(max_examples=count * (THOROUGH if PROFILE == "thorough" else 1), **more)


def quick_and_slow(
    machine: type[RuleBasedStateMachine], count: int
) -> tuple[type[TestCase], type[TestCase]]:
    """Test cases of a state machine: with a quarter of the examples, and, slow, with all."""
    quick = type("Quick", (machine.TestCase,), {"settings": examples(count // 4, **STEPS)})
    slow = type("Slow", (machine.TestCase,), {"settings": examples(count, **STEPS)})
    return quick, pytest.mark.slow(slow)
