"""Hypothesis: its profiles, and how many examples a test of its own number runs under each."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
THOROUGH = 10
"""Times as many examples in the profile "thorough"."""

settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "thorough",
    parent=settings.get_profile("default"),
    max_examples=100 * THOROUGH,
    stateful_step_count=120,
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
