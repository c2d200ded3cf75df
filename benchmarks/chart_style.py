"""How all charts look."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS = "#c0392b"
OTHERS = ("#2c3e50", "#2980b9", "#16a085", "#8e44ad", "#7f8c8d")
FAINT = "#bdc3c7"


def one_panel(title: str, width: float = 7.0, height: float = 4.2) -> tuple[Figure, Axes]:
    whole = Figure(figsize=(width, height), layout="constrained")
    axes = whole.add_subplot()
    axes.set_title(title, loc="left")
    plain(axes)
    return whole, axes


def plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="#ecf0f1")
    axes.set_axisbelow(True)
