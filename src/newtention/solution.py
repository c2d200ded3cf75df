"""What a solve returns: pure data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from newtention.display import Displayed, Row, Table, aligned, sparkline
from newtention.layers import AttentionLayer, BilinearAttention, MapAttention
from newtention.notation import Array

MATRIX_FREE = ("newton-cg", "sketched")
"""Methods that multiply by the curvature instead of factoring it."""


class Status(StrEnum):
    """Why a run ended; `sentence` says it in full."""

    CONVERGED = "converged"
    STALLED = "stalled"
    ITERATION_LIMIT = "iteration limit"
    TIME_LIMIT = "time limit"
    STOPPED = "stopped by the callback"
    INTERRUPTED = "interrupted"
    EARLY_STOP = "early stop"
    OVERFLOW = "overflow"
    LEFT_REGIME = "left the regime"

    @property
    def sentence(self) -> str:
        """The status as a full sentence."""
        return _SENTENCES[self]


_SENTENCES = {
    Status.CONVERGED: "Converged: the curvature is positive semidefinite to rounding, and a Newton "
    "step would lower the loss by less than the tolerance (or the fit is exact to rounding).",
    Status.STALLED: "Stalled at the limit of the arithmetic: no step lowers the loss measurably, "
    "but the tolerance was not met.",
    Status.ITERATION_LIMIT: "Stopped at the iteration limit, before the tolerance was met.",
    Status.TIME_LIMIT: "Stopped at the time limit, before the tolerance was met.",
    Status.STOPPED: "Stopped by the callback.",
    Status.EARLY_STOP: "Stopped early: the validation loss no longer falls; this is the point "
    "where it was lowest.",
    Status.INTERRUPTED: "Interrupted; this is the best point so far.",
    Status.OVERFLOW: "Stopped because the derivatives overflow or underflow here; rescale the "
    "tokens or the targets. This is the last usable point.",
    Status.LEFT_REGIME: "Left the regime in which the paper's approximate Newton steps are proved "
    'to contract; this is the best point so far. Larger token weights, or method="auto", would go '
    "on.",
}


@dataclass(frozen=True)
class Record:
    """One point of a run, and the step that led to it.

    At the point:
    iteration: 0 for the start.
    loss: total loss.
    gradient: norm of the projected loss's gradient in X.
    decrement: sqrt of the next step's predicted decrease over 1/2 sum_j q_j ||B_j||^2; compared
        with `tol` when that step is a full Newton step.
    damping: multiplier of the metric for the next step (the Newton system is scaled to a unit
        diagonal); 0 for "newton-cg" and "sketched", which have a radius alone.
    radius: trust-region radius for the next step, in the scaled metric or, for those two, the norm
        of the preconditioner.
    model: "gauss-newton", "newton" or "paper", the curvature used here.
    seconds: since the start of the run.
    validation: relative loss on the validation problem, None without one.
    bound: of the approximate Hessian's error, for "paper"; see `newtention.newton.regime.Regime`.

    Of the step (0, and None for the ratio, at the start):
    change: decrease of the loss.
    step: length relative to that of X, both in the scaled metric.
    ratio: actual over predicted decrease; None where it promised less than rounding can show.
    trials: steps tried, the accepted one included.
    inner: linear algebra behind the record: Cholesky factorisations of the whole batch since the
        last one, or products with the curvature for those two.
    """

    iteration: int
    loss: float
    gradient: float
    decrement: float
    change: float
    step: float
    ratio: float | None
    damping: float
    radius: float
    model: str
    trials: int
    inner: int
    seconds: float
    validation: float | None = None
    bound: float | None = None

    def __repr__(self) -> str:
        """One line."""
        return (
            f"Record(iteration {self.iteration}, loss {self.loss:.6g}, gradient "
            f"{self.gradient:.3g}, decrement {self.decrement:.3g}, {self.model})"
        )


class History(tuple[Record, ...], Displayed):
    """The records of a run, in order; `column` gives one field of all of them."""

    def column(self, name: str) -> list[Any]:
        """One field over the iterations."""
        return [getattr(record, name) for record in self]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Plain data, for JSON."""
        return [asdict(record) for record in self]

    def __repr__(self) -> str:
        """One line."""
        course = f", loss {self[0].loss:.6g} to {self[-1].loss:.6g}" if self else ""
        return f"History({len(self)} records{course})"

    def _table(self) -> Table:
        held_out = any(record.validation is not None for record in self)
        header = (*COLUMNS, *(["held out"] if held_out else []), "model")
        return Table(repr(self), [_history_row(record, held_out) for record in self], header)


@dataclass(frozen=True, eq=False)
class Solution(Displayed):
    """The best point of a run.

    layer: the fitted weights, NumPy arrays if the problem's data were.
    start: the weights this run began from, the output map already solved for.
    loss: total, data_loss + penalty.
    data_loss, penalty: its parts; the penalty is the regulariser's.
    relative_loss: data loss over 1/2 sum_j q_j ||B_j||^2 (the data loss itself if B = 0).
    status: why the run ended.
    iterations: of the start that won.
    seconds: wall time of the whole call.
    method: the one that ran, where "auto" chose as well.
    tol: the tolerance that was applied.
    history: a `Record` of the start and of every iteration.
    start_losses: final loss of every start of `n_init`, in order; this solution is the lowest.
    validation_loss: relative loss of `layer` on the validation problem, if there was one; `layer`
        is then the point of the run where it was lowest.
    """

    layer: AttentionLayer
    start: AttentionLayer
    loss: float
    data_loss: float
    penalty: float
    relative_loss: float
    status: Status
    iterations: int
    seconds: float
    method: str
    tol: float
    history: History
    start_losses: tuple[float, ...]
    validation_loss: float | None = None

    @property
    def X(self) -> Array:
        """The query/key map, (d1, d2) or (h, d1, d2), of a fit in the bilinear form or of maps."""
        if isinstance(self.layer, MapAttention):
            return self.layer.X
        return self._bilinear("X").X

    @property
    def Y(self) -> Array:
        """The value map, (d3, p) or (h, d3, p), of a fit in the bilinear form."""
        return self._bilinear("Y").Y

    def _bilinear(self, name: str) -> BilinearAttention:
        if isinstance(self.layer, MapAttention):
            raise AttributeError(f"A fit of attention maps has no {name}: its values are fixed.")
        if not isinstance(self.layer, BilinearAttention):
            raise AttributeError(f"A fit of a factored layer has no {name}; use solution.layer.")
        return self.layer

    @property
    def success(self) -> bool:
        """True when the run converged."""
        return self.status is Status.CONVERGED

    @property
    def message(self) -> str:
        """The status as a sentence."""
        return self.status.sentence

    def summary(self) -> str:
        """A few lines for a terminal, in the manner of Ceres."""
        return "\n".join([f"method {self.method}", *aligned(self._rows()), self.message])

    def _rows(self) -> list[tuple[str, str]]:
        last = self.history[-1] if self.history else None
        first = self.history[0].loss if self.history else self.loss
        rows = [
            ("Loss at the start", f"{first:.6e}"),
            ("Loss", f"{self.loss:.6e}"),
            ("  data", f"{self.data_loss:.6e}"),
            ("  penalty", f"{self.penalty:.6e}"),
            ("Relative loss", f"{self.relative_loss:.6g}"),
        ]
        if self.validation_loss is not None:
            rows.append(("Validation loss", f"{self.validation_loss:.6g}"))
        if last is not None:
            rows.append(("Gradient norm", f"{last.gradient:.3e}"))
            rows.append(("Newton decrement", f"{last.decrement:.3e} (tolerance {self.tol:.0e})"))
            if last.bound is not None:
                worst = max(self.history.column("bound"))
                rows.append(("Error of the Hessian", f"at most {worst:.3g} (below 0.5 is needed)"))
            trials = sum(self.history.column("trials"))
            inner = sum(self.history.column("inner"))
            rows.append(("Steps tried", str(trials)))
            rows.append(
                ("Products" if self.method in MATRIX_FREE else "Factorisations", str(inner))
            )
        rows.append(("Iterations", str(self.iterations)))
        rows.append(("Seconds", f"{self.seconds:.3g}"))
        if len(self.start_losses) > 1:
            losses = sorted(self.start_losses)
            rows.append(
                ("Starts", f"{len(losses)}, final losses {losses[0]:.6g} to {losses[-1]:.6g}")
            )
        return rows

    def _table(self) -> Table:
        title = f"Solution: {self.status.value}, method {self.method}"
        course = sparkline(self.history.column("loss"), "Loss of every iteration, logarithmic")
        return Table(title, self._rows(), notes=(self.message,), figure=course)

    def __repr__(self) -> str:
        """One line."""
        return (
            f"Solution({self.status.value}, relative_loss {self.relative_loss:.6g}, "
            f"loss {self.loss:.6g}, {self.iterations} iterations, {self.seconds:.3g} s)"
        )


COLUMNS = {
    **{"iter": 4, "loss": 13, "change": 9, "gradient": 9, "step": 8, "ratio": 7},
    **{"damping": 8, "trials": 6, "inner": 5, "seconds": 8},
}
"""Of the iteration table, with their widths."""
TABLE_HEADER = " ".join(f"{name:>{width}}" for name, width in COLUMNS.items())


def _history_row(record: Record, held_out: bool) -> Row:
    """The iteration with all that a notebook has room for."""
    validation = "-" if record.validation is None else f"{record.validation:.5f}"
    return (*table_cells(record), *([validation] if held_out else []), record.model)


def table_cells(record: Record) -> Row:
    """The iteration in the columns of the table."""
    r = record
    ratio = "-" if r.ratio is None else f"{r.ratio:.3f}"
    return (
        *(f"{r.iteration}", f"{r.loss:.6e}", f"{r.change:.2e}", f"{r.gradient:.2e}"),
        *(f"{r.step:.1e}", ratio if len(ratio) <= COLUMNS["ratio"] else f"{r.ratio:.0e}"),
        *(f"{r.damping:.1e}", f"{r.trials}", f"{r.inner}", f"{r.seconds:.2f}"),
    )


def table_row(record: Record) -> str:
    """One line of the iteration table."""
    r = record
    cells = zip(table_cells(r), COLUMNS.values(), strict=True)
    line = " ".join(f"{cell:>{width}}" for cell, width in cells)
    model = "  Gauss-Newton" if r.model == "gauss-newton" else ""
    bound = "" if r.bound is None else f"  error {r.bound:.3g}"
    held = "" if r.validation is None else f"  validation {r.validation:.5f}"
    return f"{line}{held}{bound}{model}"
