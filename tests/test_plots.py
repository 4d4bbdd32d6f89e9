"""Plots of the README against their figures."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from benchmarks import plots


def test_the_pictures_are_of_the_figures() -> None:
    """`python -m benchmarks.plots` draws them anew."""
    result = json.loads((plots.RESULTS / "batch.json").read_text(encoding="utf-8"))
    drawn = {"peers.svg": plots.draw_peers(), "batch.svg": plots.draw_batch(result)}
    for name, svg in drawn.items():
        assert (plots.IMAGES / name).read_text(encoding="utf-8") == svg
    frame = ElementTree.parse(plots.IMAGES / "demo.svg").getroot()
    assert "asyncllm/demo" in "".join(frame.itertext()).replace("\xa0", " ")
