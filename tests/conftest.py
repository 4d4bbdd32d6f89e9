"""Shared fixtures and settings."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "thorough", parent=settings.get_profile("default"), max_examples=2000, stateful_step_count=120
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
