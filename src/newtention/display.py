"""How objects show their facts: rows of text for a terminal, an HTML table for a notebook.

The HTML is one element without scripts, images or colours of its own, for light and dark themes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Row = tuple[str, ...]
"""A label and a value; one sentence; or as many cells as a header has."""

MOST_ROWS = 40
"""Of a table in a notebook; of a longer one the first and the last are shown."""

_CELL = 'style="text-align: left; vertical-align: top; font-weight: normal; white-space: pre-wrap"'


@dataclass(frozen=True)
class Table:
    """What an object shows in a notebook.

    title: one line above.  rows: see `Row`.  header: names of the columns, if they have any.
    notes: sentences below.  figure: an element below them, as HTML.
    """

    title: str
    rows: Sequence[Row]
    header: Row = ()
    notes: Sequence[str] = ()
    figure: str = ""

    def html(self) -> str:
        """One element, everything but the figure escaped."""
        columns = max(map(len, [self.header, *self.rows]), default=1)
        head = "".join(f'<th scope="col" {_CELL}>{escape(name)}</th>' for name in self.header)
        return "".join(
            [
                f"<div><div><b>{escape(self.title)}</b></div>",
                "<table>" if self.rows else "",
                f"<thead><tr>{head}</tr></thead>" if head else "",
                *(_html_row(row, columns, bool(head)) for row in _shortened(self.rows)),
                "</table>" if self.rows else "",
                *(f"<div>{escape(note)}</div>" for note in self.notes),
                self.figure,
                "</div>",
            ]
        )


class Displayed(ABC):
    """An object that a notebook shows as a table."""

    @abstractmethod
    def _table(self) -> Table: ...

    def _repr_html_(self) -> str:
        return self._table().html()


def aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Lines of a label and a value, the values below each other."""
    width = max(len(label) for label, _ in rows)
    return [f"{label:<{width}}  {value}" for label, value in rows]


def sentences(rows: Sequence[Row]) -> list[str]:
    """Lines "label: value."; a row of one cell is a sentence already."""
    return [f"{': '.join(row)}." if len(row) > 1 else row[0] for row in rows]


def columns(rows: Sequence[Row], widths: Sequence[int]) -> list[str]:
    """Lines of right-aligned cells, the last one left-aligned after two spaces."""
    return [
        " ".join(f"{cell:>{width}}" for cell, width in zip(row[:-1], widths, strict=True))
        + f"  {row[-1]}"
        for row in rows
    ]


def course(values: Sequence[float], most: int) -> list[float]:
    """Heights of up to `most` of the values, taken evenly, from 0 to 1 on a logarithmic scale.

    A value of 0 counts as a tenth of the smallest one above.
    """
    count = min(most, len(values))
    picked = [values[round(i * (len(values) - 1) / max(1, count - 1))] for i in range(count)]
    least = min((v for v in picked if v > 0), default=1.0) / 10
    logs = [math.log10(v) if v > 0 else math.log10(least) for v in picked]
    low, span = min(logs, default=0.0), max(logs, default=0.0) - min(logs, default=0.0)
    return [(x - low) / (span or 1.0) for x in logs]


def sparkline(values: Sequence[float], label: str) -> str:
    """The course of the finite values as an SVG element; empty for fewer than two."""
    heights = course([v for v in values if math.isfinite(v)], 200)
    if len(heights) < 2:
        return ""
    width, height, edge = 240, 40, 2
    step = (width - 2 * edge) / (len(heights) - 1)
    rise = height - 2 * edge
    points = " ".join(
        f"{edge + i * step:.1f},{edge + (1 - y) * rise:.1f}" for i, y in enumerate(heights)
    )
    return (
        f'<svg width="{width}" height="{height}" role="img"><title>{escape(label)}</title>'
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    )


def _html_row(row: Row, columns: int, uniform: bool) -> str:
    if len(row) == 1:
        return f'<tr><td colspan="{columns}" {_CELL}>{escape(row[0])}</td></tr>'
    first = "td" if uniform else "th"
    cells = "".join(f"<td {_CELL}>{escape(cell)}</td>" for cell in row[1:])
    return f"<tr><{first} {_CELL}>{escape(row[0])}</{first}>{cells}</tr>"


def _shortened(rows: Sequence[Row]) -> list[Row]:
    """All rows, or the first and the last around a row that counts the others."""
    left_out = len(rows) - MOST_ROWS
    if left_out <= 0:
        return list(rows)
    half = MOST_ROWS // 2
    return [*rows[:half], (f"... {left_out} more ...",), *rows[-half:]]
