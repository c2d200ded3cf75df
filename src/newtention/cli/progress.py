"""What a fit shows while it runs: lines in a pipe, a live display on a terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import accumulate
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from newtention.cli.terminal import say
from newtention.display import course
from newtention.run import Progress
from newtention.solution import COLUMNS, TABLE_HEADER, Record, table_row

ROWS = 12
BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 24
HELD_OUT = 9
"""Width of the column of validation losses."""


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
        self.watch = Watch()
        self.begun = False

    def __call__(self, progress: Progress) -> None:
        """Print the best start that took part in this iteration."""
        record = self.watch.note(progress)
        if not self.begun:
            if len(progress.ended) > 1:
                say(caption(len(progress.ended), self.watch.one_by_one))
            say(header(record))
            self.begun = True
        model = "" if record.model == "newton" else "  Gauss-Newton"
        left = self.watch.left()
        say(f"{row(record)}{model}{'  ' + left if left else ''}")


class Display(Silent):
    """The last rows of the table under a line with the loss and its course."""

    def __init__(self, console: Console) -> None:
        self.watch = Watch()
        self.records: list[Record] = []
        self.running = self.starts = 1
        self.live = Live(
            console=console,
            get_renderable=self.render,
            refresh_per_second=4,
            redirect_stderr=sys.stderr.isatty(),  # else warnings would miss the user's file
        )

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
        self.records.append(self.watch.note(progress))
        self.starts = len(progress.ended)
        self.running = self.starts - sum(progress.ended)

    def render(self) -> Group:
        """The state now."""
        seconds = self.watch.seconds()
        if not self.records:
            return Group(Text(f"starting  {seconds:.1f} s", style="dim"))
        lines = [self._head(seconds), *self._validation(), Text()]
        latest = self.records[-1]
        width = whole_columns(self.live.console.width, latest.validation is not None)
        lines.append(Text(header(latest)[:width], style="dim"))
        both = len({record.model for record in self.records}) > 1
        for record in self.records[-ROWS:]:
            dim = both and record.model != "newton"
            lines.append(Text(row(record)[:width], style="dim" if dim else ""))
        lines.append(Text("; ".join(self._notes(both)), style="dim"))
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
        return Group(*lines)

    def _head(self, seconds: float) -> Text:
        losses = list(accumulate((record.loss for record in self.records), min))
        first, last = losses[0], losses[-1]
        unicode = (self.live.console.encoding or "").startswith("utf")
        left = self.watch.left()
        return Text.assemble(
            ("loss ", "dim"),
            (f"{last:.6e}", "bold"),
            f"   {100 * (1 - last / first) if first > 0 else 0.0:.2f} %",
            (" below the first   ", "dim"),
            sparkline(losses) if unicode else "",
            (f"   {seconds:.1f} s", "dim"),
            f", {left}" if left else "",
        )

    def _validation(self) -> list[Text]:
        losses = [r.validation for r in self.records if r.validation is not None]
        if not losses:
            return []
        best = min(losses)
        age = len(losses) - 1 - losses.index(best)
        ago = f", {age} iteration(s) ago" if age else ""
        return [
            Text.assemble(
                ("validation ", "dim"),
                (f"{losses[-1]:.6g}", "bold"),
                (f"   lowest {best:.6g}{ago}", "dim"),
            )
        ]

    def _notes(self, both: bool) -> list[str]:
        notes = []
        if any(record.model != "newton" for record in self.records[-ROWS:]):
            before = "dim rows: Gauss-Newton steps, before the full Hessian"
            notes.append(before if both else "Gauss-Newton steps")
        if self.starts > 1:
            notes.append(f"{self.running} of {self.starts} starts running")
            notes.append(caption(self.starts, self.watch.one_by_one))
        return notes


class Watch:
    """The pace of a run, the time that is left, and the start to show."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.first = self.latest = math.nan  # when points were reached
        self.steps = -1
        self.progress: Progress | None = None
        self.one_by_one = False

    def seconds(self) -> float:
        """Since the start of this call, whatever a checkpoint adds."""
        return time.perf_counter() - self.began

    def note(self, progress: Progress) -> Record:
        """Take an iteration in; the lowest loss among the starts that took part in it."""
        before = self.progress.ended if self.progress else progress.ended
        self.progress = progress
        self.latest = time.perf_counter()
        self.steps += 1
        if self.steps == 0:
            self.first = self.latest
        self.one_by_one |= any(record is None for record in progress.records)
        active = [
            (record.loss, i, record)
            for i, record in enumerate(progress.records)
            if record is not None and record.iteration == progress.iteration and not before[i]
        ]
        return min(active)[2] if active else progress.record

    def left(self) -> str:
        """The time until a limit ends the run; empty where it is not known or short."""
        if self.progress is None or all(self.progress.ended):
            return ""
        limits = []
        if self.progress.max_seconds is not None:
            limits.append((self.progress.max_seconds - self.seconds(), "at most"))
        if self.steps > 0:
            pace = (self.latest - self.first) / self.steps
            since = time.perf_counter() - self.latest
            limits.append((self._iterations_left() * pace - since, "at most about"))
        seconds, words = min(limits, default=(0.0, ""))
        every = " for all starts" if self.one_by_one else ""
        return f"{words} {duration(seconds)} left{every}" if seconds >= 1 else ""

    def _iterations_left(self) -> int:
        assert self.progress is not None
        limit = self.progress.max_iter
        counts = [
            limit + 1 if record is None else limit - record.iteration
            for record, ended in zip(self.progress.records, self.progress.ended, strict=True)
            if not ended
        ]
        return sum(counts) if self.one_by_one else max(counts, default=0)


def caption(starts: int, one_by_one: bool) -> str:
    """What a row of the table is of, where there are several starts."""
    if one_by_one:
        return f"{starts} starts, one after the other: the table begins again with each."
    return (
        f"{starts} starts at once: a row is of the best of those still running, so that the loss "
        "may rise once a better one has ended."
    )


def header(record: Record) -> str:
    """Names of the columns of `row`."""
    return TABLE_HEADER if record.validation is None else f"{TABLE_HEADER} {'held out':>{HELD_OUT}}"


def row(record: Record) -> str:
    """One line of the table, the validation loss in its last column."""
    line = table_row(replace(record, validation=None, model="newton"))
    return line if record.validation is None else f"{line} {record.validation:>{HELD_OUT}.5f}"


def whole_columns(width: int, held_out: bool) -> int:
    """Characters of a row that a narrow terminal shows: a number cut short would be another."""
    widths = [*COLUMNS.values(), *([HELD_OUT] if held_out else [])]
    ends = accumulate(widths, lambda end, column: end + 1 + column)
    return max((end for end in ends if end <= width), default=width)


def duration(seconds: float) -> str:
    """Rounded, with a unit that suits."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def busy(text: str) -> AbstractContextManager[object]:
    """Show on a terminal that something takes its time."""
    console = terminal()
    return nullcontext() if console is None else console.status(text)


def terminal() -> Console | None:
    """The console of standard output if it is a terminal that can redraw lines, else None.

    FORCE_COLOR, which logs of continuous integration set, does not make one of a pipe.
    """
    console = Console(highlight=False)
    return console if console.is_interactive and sys.stdout.isatty() else None


def sparkline(losses: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """The course of the losses on a logarithmic scale, in at most `width` characters."""
    return "".join(BARS[round(height * (len(BARS) - 1))] for height in course(losses, width))
