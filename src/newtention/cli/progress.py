"""What a fit shows while it runs: lines in a pipe, a live display on a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from newtention.cli.terminal import say
from newtention.run import Progress
from newtention.solution import TABLE_HEADER, Record, table_row

ROWS = 12
BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 24


class Silent:
    """No display."""

    def __enter__(self) -> Silent:
        """Nothing to open."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing to close."""

    def __call__(self, progress: Progress) -> None:
        """Ignore the iteration."""


class Lines(Silent):
    """The iteration table, one line as each iteration ends."""

    def __init__(self) -> None:
        self.begun = False

    def __call__(self, progress: Progress) -> None:
        """Print the best start that took part in this iteration."""
        if not self.begun:
            say(TABLE_HEADER)
            self.begun = True
        say(table_row(best_active(progress)))


class Display(Silent):
    """The last rows of the table under a line with the loss and its course."""

    def __init__(self, console: Console) -> None:
        self.records: list[Record] = []
        self.running = self.starts = 1
        self.began = time.perf_counter()
        self.live = Live(console=console, get_renderable=self.render, refresh_per_second=4)

    def __enter__(self) -> Display:
        """Start drawing."""
        self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Draw the last state and leave it on the screen."""
        self.live.stop()

    def __call__(self, progress: Progress) -> None:
        """Note the iteration; the display redraws itself four times a second."""
        self.records.append(best_active(progress))
        self.starts = len(progress.ended)
        self.running = self.starts - sum(progress.ended)

    def render(self) -> Group:
        """The state now."""
        seconds = time.perf_counter() - self.began
        if not self.records:
            return Group(Text(f"starting  {seconds:.1f} s", style="dim"))
        losses = [record.loss for record in self.records]
        first, last = losses[0], losses[-1]
        unicode = (self.live.console.encoding or "").startswith("utf")
        head = Text.assemble(
            ("loss ", "dim"),
            (f"{last:.6e}", "bold"),
            f"   {100 * (1 - last / first) if first > 0 else 0.0:.2f} %",
            (" below the first   ", "dim"),
            sparkline(losses) if unicode else "",
            (f"   {seconds:.1f} s", "dim"),
        )
        rows = [
            Text(
                table_row(record).removesuffix("  Gauss-Newton"),
                style="" if record.model == "newton" else "dim",
            )
            for record in self.records[-ROWS:]
        ]
        notes = []
        if any(record.model != "newton" for record in self.records[-ROWS:]):
            notes.append("dim rows: Gauss-Newton steps, before the full Hessian")
        if self.starts > 1:
            notes.append(f"{self.running} of {self.starts} starts running")
        lines = [head, Text(), Text(TABLE_HEADER, style="dim"), *rows]
        lines.append(Text("; ".join(notes), style="dim"))
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
        return Group(*lines)


def busy(text: str) -> AbstractContextManager[object]:
    """Show on a terminal that something takes its time."""
    console = Console(highlight=False)
    return console.status(text) if console.is_terminal else nullcontext()


def best_active(progress: Progress) -> Record:
    """The lowest loss among the starts that took part in this iteration."""
    active = [r for r in progress.records if r.iteration == progress.iteration]
    return min(active, key=lambda r: r.loss)


def sparkline(losses: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """The course of positive losses on a logarithmic scale, in at most `width` characters."""
    count = min(width, len(losses))
    picked = [losses[round(i * (len(losses) - 1) / max(1, count - 1))] for i in range(count)]
    logs = [math.log10(max(loss, 1e-300)) for loss in picked]
    low, high = min(logs), max(logs)
    span = (high - low) or 1.0
    return "".join(BARS[round((x - low) / span * (len(BARS) - 1))] for x in logs)
