"""The outcome of `regularisation_path`: plain data, a table and sentences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from newtention.display import Displayed, Row, Table, columns
from newtention.notation import Array
from newtention.selection import SelectedTokens
from newtention.solution import Status
from newtention.svm import AttentionSVM

DIVIDED = 0.9
"""A query whose largest weight is below this at the end of a path has not selected a key."""
_SHOWN = 6


@dataclass(frozen=True, eq=False, repr=False)
class RegularisationPath(Displayed):
    """Minima of the same loss under a ridge on X from large to small; k ridges.

    ridges: (k,).  X: (k, d1, d2).  losses: (k,), data losses.  norms: (k,), ||X||_F.
    angles: (k,), degrees to the SVM's X (90 for X = 0); None if the SVM has no X, or X = 0.
    entropies: (k,), mean entropy of the queries' attention, in nats.
    margins: (k,), smallest lead of a wanted key over every other, over ||X||_F; negative where
        another key has the largest logit, infinite where no query has a second key.
    shares: (k,), share of the queries whose wanted key is the selected one.
    statuses: how the fits ended.
    selected: the wanted keys, in the layout of the problem's rows; -1 in padded ones.
    svm: the attention SVM of the wanted keys, scale and mask counted.
    last: the selection of the last fit, with its own SVM.
    """

    ridges: Array
    X: Array
    losses: Array
    norms: Array
    angles: Array | None
    entropies: Array
    margins: Array
    shares: Array
    statuses: tuple[Status, ...]
    selected: Array
    svm: AttentionSVM
    last: SelectedTokens

    @property
    def angles_times_norms(self) -> Array | None:
        """(k,), degrees times ||X||_F, which tends to stay bounded; None without angles."""
        return None if self.angles is None else self.angles * self.norms

    @property
    def growth(self) -> float | None:
        """Slope of ||X|| against ln(1 / ridge), fitted to the half with the smaller ridges.

        Of these, to the last ones with one share of wanted keys: a path may leave a local minimum.
        None for fewer than two points.
        """
        x, y, share = (np.asarray(_floats(a)) for a in (self.ridges, self.norms, self.shares))
        changes = np.flatnonzero(share != share[-1]) + 1
        late = slice(max([len(x) // 2, *changes[-1:]]), None)
        return float(np.polyfit(-np.log(x[late]), y[late], 1)[0]) if len(x[late]) > 1 else None

    @property
    def predicted_growth(self) -> float | None:
        """What the slope tends to where the loss tends to 0: ||X_svm|| / 2; None without an SVM."""
        return None if self.angles is None else 0.5 * self.svm.objective

    @property
    def wrong(self) -> tuple[int, ...]:
        """Queries whose selected key, at the last ridge, is not the wanted one, ties included.

        Rows of all sequences, one after the other, padding not counted.
        """
        right = (self.last.keys == self.selected) & (self.last.margins > 0)
        return tuple(np.flatnonzero(~self._real(right).astype(bool)).tolist())

    @property
    def ended(self) -> str:
        """Where the path ended, in a sentence or two."""
        where = f"At ridge {float(self.ridges[-1]):.3g}"
        if not self.wrong:
            return f"{where} every wanted key is selected."
        shown = ", ".join(map(str, self.wrong[:_SHOWN])) + ", ..." * (len(self.wrong) > _SHOWN)
        where += f" the selection is wrong in rows {shown} ({len(self.wrong)} of "
        where += f"{len(self._real(self.selected))})"
        if self.svm.infeasible:
            return f"{where}: no X selects every wanted key."
        if self.statuses[-1] not in (Status.CONVERGED, Status.STALLED):
            return f"{where}; the fit ended before it converged."
        least = float(self._real(self.last.weights)[list(self.wrong)].min())
        if least < DIVIDED:
            return f"{where}: a local minimum where a query gives no key more than {least:.2f}."
        where += ": a local minimum with another selection"
        if self.last.angle is None:
            return f"{where}."
        return f"{where}, {self.last.angle:.3g} degrees from the SVM of that selection."

    def _real(self, rows: Array) -> np.ndarray:
        """Entries without padding."""
        return np.asarray(_floats(rows))[np.asarray(_floats(self.selected)) >= 0]

    def summary(self) -> str:
        """A table of the fits and what they show, for a terminal."""
        return "\n".join([*columns([_HEADER, *self._rows()], _WIDTHS), *self._notes()])

    def _rows(self) -> list[Row]:
        angles = [None] * len(self.statuses) if self.angles is None else _floats(self.angles)
        first = (self.ridges, self.losses, self.norms)
        more = (self.entropies, self.margins, self.shares)
        fits = zip(*map(_floats, first), angles, *map(_floats, more), self.statuses, strict=True)
        rows: list[Row] = []
        for ridge, data, norm, angle, entropy, margin, share, status in fits:
            known = angle is not None
            degrees, product = (f"{angle:.2f}", f"{angle * norm:.1f}") if known else ("-", "-")
            size = (f"{ridge:.1e}", f"{data:.3e}", f"{norm:.4g}")
            kept = (f"{entropy:.2e}", f"{margin:.4f}", f"{share:.3f}")
            rows.append((*size, degrees, product, *kept, status.value))
        return rows

    def _notes(self) -> list[str]:
        lines = []
        if self.growth is not None and self.predicted_growth is not None:
            lines.append(
                f"||X|| grew by {self.growth:.4g} for each unit of ln(1 / ridge); "
                f"||X_svm|| / 2 is {self.predicted_growth:.4g}."
            )
        lines.append(self.ended)
        if not self.svm.success:
            lines.append(self.svm.message)
        return lines

    def _table(self) -> Table:
        title = f"RegularisationPath: {len(self.statuses)} ridges"
        return Table(title, self._rows(), header=_HEADER, notes=self._notes())

    def to_dict(self) -> dict[str, Any]:
        """Plain data without X; infinity as a string."""
        names = ("ridges", "losses", "norms", "angles", "entropies", "margins", "shares")
        columns = {name: _plain(getattr(self, name)) for name in names}
        return {
            **columns,
            "statuses": [status.value for status in self.statuses],
            "growth": self.growth,
            "predicted_growth": self.predicted_growth,
            "selected": self.selected.tolist(),
            "last_selected": self.last.keys.tolist(),
            "wrong": list(self.wrong),
            "ended": self.ended,
            "svm": self.svm.to_dict(),
        }

    def __repr__(self) -> str:
        """One line."""
        first, last = (float(self.ridges[i]) for i in (0, -1))
        return f"RegularisationPath(ridges {first:.3g} to {last:.3g}; {self.ended})"

    def __str__(self) -> str:
        """The summary."""
        return self.summary()


_HEADER = (
    *("ridge", "data loss", "||X||", "angle", "* ||X||"),
    *("entropy", "margin", "right", "status"),
)
_WIDTHS = (8, 10, 9, 6, 7, 9, 8, 6)


def _floats(values: Array) -> list[float]:
    return values.tolist()


def _plain(values: Array | None) -> list[float | str] | None:
    if values is None:
        return None
    return [v if math.isfinite(v) else str(v) for v in _floats(values)]
