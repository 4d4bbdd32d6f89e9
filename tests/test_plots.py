"""The plots of the README: they are what the figures say, and drawn to scale."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from benchmarks import plots

SVG = "{http://www.w3.org/2000/svg}"
PAGE = """# Figures

## Rates

Text | with a bar.

| | ours | theirs | ratio |
|---|---|---|---|
| 1 stream | 1,650 tok/s | 165 tok/s | 10 |
| a < b | 30 tok/s | 60 tok/s | 0.5 |

## None

| a | b |
|---|---|
| 1 | 2 ms |
"""


def bars(svg: str) -> list[tuple[str, float, float]]:
    """Class, beginning and width of each bar."""
    rects = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    found = ((r.get("class", ""), float(r.get("x", 0)), r.get("width", "")) for r in rects)
    return [(kind, x, float(width)) for kind, x, width in found if kind != "ground"]


def test_a_table_is_drawn_to_scale() -> None:
    found = plots.rates(PAGE, "Rates")
    assert found.engines == ("ours", "theirs")
    assert found.rows == (("1 stream", (1650.0, 165.0)), ("a < b", (30.0, 60.0)))
    [ours, theirs, slow, fast] = bars(plots.draw_rates(found, "A & B", "note"))
    assert theirs[2] == pytest.approx(ours[2] / 10, rel=0.01)
    assert slow[2] == pytest.approx(fast[2] / 2, rel=0.01)
    assert ours[2] == fast[2]
    for heading in ("None", "Nowhere"):
        with pytest.raises(ValueError, match=heading):
            plots.rates(PAGE, heading)


def test_a_request_is_drawn_where_it_was() -> None:
    first = {"submitted": 0.0, "scheduled": 0.0, "first_token": 1.0, "finished": 2.0, "tokens": 5}
    second = {"submitted": 1.0, "scheduled": 3.0, "first_token": 3.5, "finished": 4.0, "tokens": 7}
    result = {"max_num_seqs": 1, "conditions": "none", "requests": [second, first]}
    svg = plots.draw_batch(result)
    assert "2 requests, at most 1 at a time" in svg
    assert "12 tokens in 4.00 s; none" in svg
    lanes = bars(svg)[3:]  # behind the legend
    assert [kind for kind, _, _ in lanes] == ["prefill", "decode", "queued", "prefill", "decode"]
    second_long = lanes[0][2]
    assert [width / second_long for _, _, width in lanes] == pytest.approx(
        [1, 1, 2, 0.5, 0.5], 0.01
    )
    assert lanes[2][1] == pytest.approx(lanes[1][1], abs=0.2)


def test_the_pictures_are_of_the_figures() -> None:
    """`python -m benchmarks.plots` draws them anew."""
    result = json.loads((plots.RESULTS / "batch.json").read_text(encoding="utf-8"))
    drawn = {"peers.svg": plots.draw_peers(), "batch.svg": plots.draw_batch(result)}
    for name, svg in drawn.items():
        assert (plots.IMAGES / name).read_text(encoding="utf-8") == svg
    frame = ElementTree.parse(plots.IMAGES / "demo.svg").getroot()
    assert "asyncllm/demo" in "".join(frame.itertext()).replace("\xa0", " ")
