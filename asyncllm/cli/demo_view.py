"""Terminal view of the demo: a panel for each stream, and a line of engine statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asyncllm.cli.demo_streams import Demo, DemoStream, follow_streams
from asyncllm.cli.text import format_rate, format_seconds, one_line

_SHORT_PANEL_HEIGHT = 4
_MIN_SHORT_PANEL_WIDTH = 38
_MIN_TALL_PANEL_HEIGHT = 6
_MAX_TALL_PANEL_HEIGHT = 14
_MAX_TABLE_ROWS = 16
_WIDTH_OF_COLUMNS_BESIDE_TITLE = 60
_CURSOR_CHARACTER = "▌"


async def show_demo(demo: Demo) -> None:
    """Show the streams while they run, then their whole answers and a table."""
    console = Console()
    view = DemoView(console, demo)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        await follow_streams(demo, lambda: live.update(view.live_frame(), refresh=True))
    for part in view.final_frame():
        console.print(part)


class DemoView:
    """Layout of the streams on one console."""

    def __init__(self, console: Console, demo: Demo) -> None:
        self._console = console
        self._demo = demo
        columns = 3 if console.width >= 150 else 2 if console.width >= 60 else 1
        self._tall_streams = [stream for stream in demo.streams if stream.prompt.is_long][:columns]
        self._short_columns = max(1, min(4, console.width // _MIN_SHORT_PANEL_WIDTH))
        tall_height = _MIN_TALL_PANEL_HEIGHT if self._tall_streams else 0
        rows = max(self._num_lines_above_status() - tall_height, 0) // _SHORT_PANEL_HEIGHT
        short_streams = [stream for stream in demo.streams if not stream.prompt.is_long]
        self._short_streams = short_streams[: rows * self._short_columns]

    def _num_lines_above_status(self) -> int:
        """Number of console lines between the header and the two lines of status."""
        return self._console.height - 4

    def live_frame(self) -> RenderableType:
        """Frame that fits the window, while streams run."""
        rows = math.ceil(len(self._short_streams) / self._short_columns)
        room = self._num_lines_above_status() - rows * _SHORT_PANEL_HEIGHT
        tall_height = min(max(room, 3), _MAX_TALL_PANEL_HEIGHT)
        panels = self._panels(tall_height, _SHORT_PANEL_HEIGHT)
        return Group(self._header(), *panels, self._status_marks(), self._status_line())

    def final_frame(self) -> list[RenderableType]:
        """Frame for the end: all answers in full, and the table of statistics."""
        parts = [self._header(), *self._panels(None, None)]
        if len(self._demo.streams) <= _MAX_TABLE_ROWS:
            parts.append(self._stats_table())
        parts.append(Text(self._demo.totals_text(), style="bold"))
        return parts

    def _panels(self, tall_height: int | None, short_height: int | None) -> list[RenderableType]:
        """Rows of panels: long answers in rows of ``tall_height`` lines, then short answers in rows
        of ``short_height`` lines. With None a row is as high as its longest text."""
        rows: list[RenderableType] = []
        for streams, max_columns, height in (
            (self._tall_streams, len(self._tall_streams), tall_height),
            (self._short_streams, self._short_columns, short_height),
        ):
            columns = min(max_columns, len(streams))
            for i in range(0, len(streams), columns or 1):
                row = streams[i : i + columns]
                rows.append(self._panel_row(row, self._console.width // columns, height))
        return rows

    def _header(self) -> Text:
        header = Text.assemble(
            (" asyncllm ", "bold reverse"),
            ("  " + self._demo.title, "bold"),
            (f"  {self._demo.num_streams_text} on one event loop", "dim"),
        )
        header.truncate(self._console.width, overflow="ellipsis")
        return header

    def _panel_row(
        self, streams: Sequence[DemoStream], width: int, height: int | None
    ) -> RenderableType:
        texts = [self._wrap_text(stream, width - 4) for stream in streams]
        height = height or max(map(len, texts)) + 2
        row = Table.grid()
        row.add_row(
            *(
                self._panel(stream, lines[-(height - 2) :], width, height)
                for stream, lines in zip(streams, texts, strict=True)
            )
        )
        return row

    def _wrap_text(self, stream: DemoStream, width: int) -> list[Text]:
        text = stream.error or stream.text.strip()
        if not stream.is_done and stream.first_token_at is not None:
            text += _CURSOR_CHARACTER
        return list(Text(text).wrap(self._console, max(width, 1))) or [Text("")]

    def _panel(self, stream: DemoStream, lines: list[Text], width: int, height: int) -> Panel:
        style, _ = _style_and_mark(stream)
        kind = f" {stream.prompt.kind} "
        title = one_line(stream.prompt.title, max(width - len(kind) - 6, 0))
        return Panel(
            Text("\n").join(lines),
            box=box.ROUNDED,
            width=width,
            height=height,
            border_style=style,
            title=Text.assemble((kind, f"bold {style}"), (title + " ", "dim")),
            title_align="left",
            subtitle=Text(_format_timings(stream), style="dim"),
            subtitle_align="right",
        )

    def _status_marks(self) -> Text:
        """Status marks, one character per stream, cut to the width of the console."""
        marks = Text(" ")
        for stream in self._demo.streams:
            style, mark = _style_and_mark(stream)
            marks.append(mark, style)
        marks.truncate(self._console.width - 1, overflow="ellipsis")
        return marks

    def _status_line(self) -> Text:
        demo, stats = self._demo, self._demo.stats
        figures = (
            ("batch", f"{stats.num_running}"),
            ("waiting", f"{stats.num_waiting}"),
            ("KV", f"{stats.kv_cache_usage:.1%}"),
            ("prefix hits", f"{demo.prefix_hit_rate:.0%}"),
            ("step", format_seconds(stats.last_step_time)),
            ("", format_rate(demo.num_tokens, demo.elapsed)),
        )
        line = Text(" ")
        for name, value in figures:
            line.append(f"{name} " if name else "", style="dim")
            line.append(value, style="bold")
            line.append("   ")
        line.truncate(self._console.width - 1, overflow="ellipsis")
        return line

    def _stats_table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False)
        title_width = min(self._console.width - _WIDTH_OF_COLUMNS_BESIDE_TITLE, 44)
        table.add_column("stream", no_wrap=True)
        table.add_column("asked" if title_width > 8 else "", no_wrap=True, style="dim")
        for name in ("tokens", "first token", "then", "end"):
            table.add_column(name, justify="right", no_wrap=True)
        for stream in self._demo.streams:
            table.add_row(
                stream.prompt.kind,
                one_line(stream.prompt.title, title_width) if title_width > 8 else "",
                str(stream.num_tokens),
                format_seconds(stream.ttft),
                stream.rate_text,
                Text(stream.finish_reason or "failed", style=_style_and_mark(stream)[0]),
            )
        return table


def _style_and_mark(stream: DemoStream) -> tuple[str, str]:
    """Colour and status mark of a stream."""
    if stream.error:
        return "red", "✗"
    if stream.is_done:
        return "green", "●"
    return ("bright_black", "·") if stream.first_token_at is None else ("cyan", "◐")


def _format_timings(stream: DemoStream) -> str:
    if stream.first_token_at is None:
        return " failed " if stream.error else " waiting "
    return f" {format_seconds(stream.ttft)} · {stream.num_tokens} tokens · {stream.rate_text} "
