"""Traces across a handle: a replica's span is a child of the caller's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

try:
    from opentelemetry import context, propagate
except ImportError:  # Without the extra asyncllm[tracing] there are no spans to carry.
    context = propagate = None


def current_trace() -> dict[str, str]:
    """The caller's current span, as headers; empty without one, or without OpenTelemetry."""
    headers: dict[str, str] = {}
    if propagate is not None:
        propagate.inject(headers)
    return headers


@contextlib.contextmanager
def in_trace(headers: dict[str, str]) -> Iterator[None]:
    """Context in which the current span is the one of ``headers``."""
    if context is None or propagate is None or not headers:
        yield
        return
    token = context.attach(propagate.extract(headers))
    try:
        yield
    finally:
        context.detach(token)
