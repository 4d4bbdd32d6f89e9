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

from asyncllm.cli.text import format_rate, format_seconds, one_line
from asyncllm.cli.tracks import Show, Track, follow_all

_SHORT_HEIGHT = 4
_SHORT_WIDTH = 38
_MIN_TALL_HEIGHT = 6
_MAX_TALL_HEIGHT = 14
_MAX_TABLE_ROWS = 16
_OTHER_COLUMNS_WIDTH = 60
_CURSOR = "▌"


async def watch(show: Show) -> None:
    """Show the streams while they run, then their whole answers and a table."""
    console = Console()
    view = View(console, show)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        await follow_all(show, lambda: live.update(view.live_frame(), refresh=True))
    for part in view.final_frame():
        console.print(part)


class View:
    """Layout of the streams on one console."""

    def __init__(self, console: Console, show: Show) -> None:
        self._console = console
        self._show = show
        columns = 3 if console.width >= 150 else 2 if console.width >= 60 else 1
        self._tall_tracks = [t for t in show.tracks if t.prompt.long][:columns]
        self._tall_columns = max(len(self._tall_tracks), 1)
        columns = max(1, min(4, console.width // _SHORT_WIDTH))
        rows = (
            console.height - 4 - (_MIN_TALL_HEIGHT if self._tall_tracks else 0)
        ) // _SHORT_HEIGHT
        self._short_tracks = [t for t in show.tracks if not t.prompt.long][: max(rows, 0) * columns]
        self._short_columns = max(min(columns, len(self._short_tracks)), 1)

    def live_frame(self) -> RenderableType:
        """Frame that fits the window, while streams run."""
        rows = math.ceil(len(self._short_tracks) / self._short_columns)
        room = self._console.height - 4 - rows * _SHORT_HEIGHT
        tall_height = min(max(room, 3), _MAX_TALL_HEIGHT)
        return Group(
            self._header(),
            self._grid(self._tall_tracks, self._tall_columns, tall_height),
            self._grid(self._short_tracks, self._short_columns, _SHORT_HEIGHT),
            self._status_marks(),
            self._status(),
        )

    def final_frame(self) -> list[RenderableType]:
        """Whole answers and the table of figures."""
        parts: list[RenderableType] = [self._header()]
        for tracks, columns in (
            (self._tall_tracks, self._tall_columns),
            (self._short_tracks, self._short_columns),
        ):
            for i in range(0, len(tracks), columns):
                parts.append(self._grid(tracks[i : i + columns], columns, None))
        if len(self._show.tracks) <= _MAX_TABLE_ROWS:
            parts.append(self._table())
        parts.append(Text(self._show.totals_text(), style="bold"))
        return parts

    def _header(self) -> Text:
        header = Text.assemble(
            (" asyncllm ", "bold reverse"),
            ("  " + self._show.title, "bold"),
            (f"  {self._show.num_streams_text} on one event loop", "dim"),
        )
        header.truncate(self._console.width, overflow="ellipsis")
        return header

    def _grid(self, tracks: Sequence[Track], columns: int, height: int | None) -> RenderableType:
        """Panels side by side. If ``height`` is None, they are as high as the longest text."""
        if not tracks:
            return Group()
        width = self._console.width // columns
        bodies = [self._wrap_text(track, width - 4) for track in tracks]
        if height is None:
            height = max(len(lines) for lines in bodies) + 2
        grid = Table.grid(expand=False)
        for _ in range(columns):
            grid.add_column(width=width)
        panels = [
            self._panel(track, lines[-(height - 2) :], width, height)
            for track, lines in zip(tracks, bodies, strict=True)
        ]
        for i in range(0, len(panels), columns):
            grid.add_row(*panels[i : i + columns])
        return grid

    def _wrap_text(self, track: Track, width: int) -> list[Text]:
        text = track.error or track.text.strip()
        if not track.done:
            text += _CURSOR if track.first_token_at is not None else ""
        return list(Text(text).wrap(self._console, max(width, 1))) or [Text("")]

    def _panel(self, track: Track, lines: list[Text], width: int, height: int) -> Panel:
        style = _track_style(track)
        kind = f" {track.prompt.kind} "
        asked = one_line(track.prompt.title, max(width - len(kind) - 6, 0))
        return Panel(
            Text("\n").join(lines),
            box=box.ROUNDED,
            width=width,
            height=height,
            border_style=style,
            title=Text.assemble((kind, f"bold {style}"), (asked + " ", "dim")),
            title_align="left",
            subtitle=Text(_format_figures(track), style="dim"),
            subtitle_align="right",
        )

    def _status_marks(self) -> Text:
        """Status marks, one character per stream, cut to the width of the console."""
        strip = Text(" ")
        for track in self._show.tracks:
            mark = (
                "✗" if track.error else "●" if track.done else "◐" if track.first_token_at else "·"
            )
            strip.append(mark, style=_track_style(track))
        strip.truncate(self._console.width - 1, overflow="ellipsis")
        return strip

    def _status(self) -> Text:
        show, stats = self._show, self._show.stats
        figures = (
            ("batch", f"{stats.num_running}"),
            ("waiting", f"{stats.num_waiting}"),
            ("KV", f"{stats.kv_cache_usage:.1%}"),
            ("prefix hits", f"{show.prefix_hit_rate:.0%}"),
            ("step", format_seconds(stats.last_step_time)),
            ("", format_rate(show.num_tokens, show.elapsed)),
        )
        line = Text(" ")
        for name, value in figures:
            line.append(f"{name} " if name else "", style="dim")
            line.append(value, style="bold")
            line.append("   ")
        line.truncate(self._console.width - 1, overflow="ellipsis")
        return line

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False)
        asked = min(self._console.width - _OTHER_COLUMNS_WIDTH, 44)
        table.add_column("stream", no_wrap=True)
        table.add_column("asked" if asked > 8 else "", no_wrap=True, style="dim")
        for name in ("tokens", "first token", "then", "end"):
            table.add_column(name, justify="right", no_wrap=True)
        for track in self._show.tracks:
            table.add_row(
                track.prompt.kind,
                one_line(track.prompt.title, asked) if asked > 8 else "",
                str(track.num_tokens),
                format_seconds(track.ttft),
                track.speed,
                Text(track.finish_reason or "failed", style=_track_style(track)),
            )
        return table


def _track_style(track: Track) -> str:
    if track.error:
        return "red"
    if track.done:
        return "green"
    return "bright_black" if track.first_token_at is None else "cyan"


def _format_figures(track: Track) -> str:
    if track.first_token_at is None:
        return " failed " if track.error else " waiting "
    return f" {format_seconds(track.ttft)} · {track.num_tokens} tokens · {track.speed} "
