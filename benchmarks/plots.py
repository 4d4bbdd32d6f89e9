"""The plots of the README, as SVG: python -m benchmarks.plots

``peers.svg`` draws the table of docs/performance.md, ``batch.svg`` what ``benchmarks.timeline`` has
measured, ``demo.svg`` is a frame of ``asyncllm demo``, taken while it runs (``--demo``).
"""

from __future__ import annotations

import argparse
import asyncio
import html
import io
import itertools
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results"

WIDTH = 760
# Told apart in greys as well, on paper and in the dark.
STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #38434a; }
.title { font-weight: 600; font-size: 15px; fill: #16211f; }
.soft { fill: #68757c; font-size: 12px; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
.ground { fill: #ffffff; } .line { stroke: #dfe4e6; }
.c0 { fill: #0b6e66; } .c1 { fill: #9aa7ae; } .c2 { fill: #c08a3e; } .c3 { fill: #7b6aa8; }
.queued { fill: #e3d3b4; } .prefill { fill: #c08a3e; } .decode { fill: #0b6e66; }
@media (prefers-color-scheme: dark) {
  text { fill: #c3ccd0; } .title { fill: #eef2f3; } .soft { fill: #94a1a7; }
  .ground { fill: #0e1514; } .line { stroke: #2b3538; }
  .c0, .decode { fill: #4fb8ac; } .c1 { fill: #6c7a81; } .c2, .prefill { fill: #d8a45c; }
  .c3 { fill: #a493cf; } .queued { fill: #5a4c33; }
}
"""


class Canvas:
    """An SVG of a fixed width, in user units."""

    def __init__(self, height: float, title: str) -> None:
        self.height = height
        self.title = title
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        kind = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{kind}>{html.escape(text)}</text>')

    def bar(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        shape = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.8):.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect {shape} rx="2" class="{kind}"/>')

    def line(self, x: float, top: float, bottom: float) -> None:
        self.parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}" class="line"/>'
        )

    def svg(self) -> str:
        size = f'width="{WIDTH}" height="{self.height:.0f}" viewBox="0 0 {WIDTH} {self.height:.0f}"'
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n'
            f"<title>{html.escape(self.title)}</title>\n<style>{STYLE}</style>\n"
            f'<rect width="100%" height="100%" class="ground"/>\n{body}\n</svg>\n'
        )


# --- beside peers -----------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """A table of rates: a row of tokens per second for each workload."""

    engines: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]


def rates(page: str, heading: str) -> Rates:
    """The first table below a heading; columns without rates, as ratios, are left out.

    Raises:
        ValueError: for a page without it.
    """
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    lines = re.findall(r"^\|(.+)\|$", section[1], re.M) if section else []
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    if len(cells) < 3:
        raise ValueError(f"a page without a table below {heading!r}")
    head, rows = cells[0], cells[2:]
    kept = [i for i in range(1, len(head)) if rows[0][i].endswith("tok/s")]
    if not kept:
        raise ValueError(f"a table without rates (tok/s) below {heading!r}")
    values = [tuple(float(row[i].split()[0].replace(",", "")) for i in kept) for row in rows]
    names = [row[0] for row in rows]
    return Rates(tuple(head[i] for i in kept), tuple(zip(names, values, strict=True)))


def draw_rates(found: Rates, title: str, note: str) -> str:
    """Bars, longest is full; workload by workload, because their scales differ."""
    left, right, tall, gap = 128, 120, 18, 4
    block = len(found.engines) * (tall + gap) + 30
    canvas = Canvas(64 + len(found.rows) * block + 22, title)
    canvas.text(16, 28, title, "title")
    y = 56.0
    for name, values in found.rows:
        canvas.text(16, y, name, "soft")
        y += 8
        for i, (engine, value) in enumerate(zip(found.engines, values, strict=True)):
            width = (WIDTH - left - right) * value / max(values)
            canvas.text(left - 10, y + 13.5, engine, "end")
            canvas.bar(left, y, width, tall, f"c{i % 4}")
            canvas.text(left + width + 8, y + 13.5, f"{value:,.0f} tok/s")
            y += tall + gap
        y += 22
    canvas.text(16, canvas.height - 14, note, "soft")
    return canvas.svg()


def draw_peers() -> str:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    title = "Output tokens per second of the packaged model, one CPU thread, float32"
    note = "Greedy, medians of five; conditions and command: docs/performance.md"
    return draw_rates(rates(page, "Beside transformers"), title, note)


# --- a batch over time ------------------------------------------------------------------


def draw_batch(result: dict[str, Any]) -> str:
    """A lane for each request: in the queue, to the first token, to the last. Above them, how
    many run."""
    requests = sorted(result["requests"], key=lambda one: one["submitted"])
    left, top, tall, gap = 30, 62, 9, 3
    lanes = len(requests) * (tall + gap)
    canvas = Canvas(top + lanes + 62, "Requests of one engine over time")
    end = max(one["finished"] for one in requests)

    def x(seconds: float) -> float:
        return left + (WIDTH - left - 20) * seconds / end

    canvas.text(16, 28, f"{len(requests)} requests, at most {result['max_num_seqs']} at a time")
    canvas.parts[-1] = canvas.parts[-1].replace("<text", '<text class="title"', 1)
    for kind, name, at in (
        ("queued", "waiting", 446),
        ("prefill", "to the first token", 528),
        ("decode", "streaming", 668),
    ):
        canvas.bar(at, 19, 12, 10, kind)
        canvas.text(at + 18, 28, name, "soft")
    for second in _ticks(end):
        canvas.line(x(second), top - 8, top + lanes)
        canvas.text(x(second), top + lanes + 18, f"{second:g} s", "soft middle")
    for i, one in enumerate(requests):
        y = top + i * (tall + gap)
        times = [one[name] for name in ("submitted", "scheduled", "first_token", "finished")]
        spans = itertools.pairwise(times)
        for kind, (start, stop) in zip(("queued", "prefill", "decode"), spans, strict=True):
            if stop - start > end / 2000:
                canvas.bar(x(start), y, x(stop) - x(start), tall, kind)
    tokens = sum(one["tokens"] for one in requests)
    note = f"{tokens:,} tokens in {end:.2f} s; {result['conditions']}"
    canvas.text(16, canvas.height - 14, note, "soft")
    return canvas.svg()


def _ticks(end: float) -> Iterator[float]:
    step = next(s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if end / s <= 9)
    n = 0
    while n * step <= end:
        yield round(n * step, 1)
        n += 1


# --- streams running --------------------------------------------------------------------


async def draw_demo(streams: int = 8, seed: int = 11) -> str:
    """The frame of ``asyncllm demo`` that has most text of streams under way, three or more."""
    from rich.console import Console

    from asyncllm import AsyncLLMEngine
    from asyncllm.cli.arguments import parse
    from asyncllm.cli.demo import _start_streams
    from asyncllm.cli.demo_streams import follow_streams
    from asyncllm.cli.demo_view import DemoView

    given = parse(["demo", "--streams", str(streams), "--seed", str(seed)])
    async with AsyncLLMEngine() as engine:
        demo = _start_streams(engine, given)
        view = DemoView(Console(width=110, height=24), demo)
        most, frame = 0, view.live_frame()

        def look() -> None:
            nonlocal most, frame
            running = [t for t in demo.streams if t.first_token_at and not t.is_done]
            text = sum(len(t.text) for t in running)
            if len(running) >= 3 and text > most:
                most, frame = text, view.live_frame()

        await follow_streams(demo, look)
    console = Console(width=110, height=24, record=True, file=io.StringIO())
    console.print(frame)
    return console.export_svg(title="asyncllm demo", unique_id="demo")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", action="store_true", help="take the picture of the demo anew")
    chosen = parser.parse_args(arguments)
    pictures = {"peers.svg": draw_peers()}
    batch = RESULTS / "batch.json"
    pictures["batch.svg"] = draw_batch(json.loads(batch.read_text(encoding="utf-8")))
    if chosen.demo:
        pictures["demo.svg"] = asyncio.run(draw_demo())
    for name, svg in pictures.items():
        (IMAGES / name).write_text(svg, encoding="utf-8")
        print(f"{time.strftime('%H:%M:%S')} docs/images/{name}: {len(svg)} bytes")


if __name__ == "__main__":
    main()
