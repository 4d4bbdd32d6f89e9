"""Metrics as a scraper reads them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def samples(metrics):
    """``(name, labels without model and engine) -> value``, as a scraper reads them."""
    return {
        (
            sample.name,
            *sorted((k, v) for k, v in sample.labels.items() if k not in ("model_name", "engine")),
        ): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }
