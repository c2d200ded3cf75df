"""The outcome of `softmax_regression`: plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from newtention.display import Displayed, Table, aligned, sparkline
from newtention.notation import Array
from newtention.solution import History, Status

Form = Literal["softmax", "exp", "sinh", "cosh"]
"""Plain softmax regression, or the rescaled one with this u."""


@dataclass(frozen=True, eq=False)
class SoftmaxRegression(Displayed):
    """The best point of a run.

    x: (d,).
    fitted: (n,), softmax(A x), or u(A x) / <u(A x), 1>, which b is to equal.
    loss: total, data_loss + penalty; infinite where it exceeds the largest floating-point number,
        as rescaled losses can.  log10_loss: its logarithm, always finite but for a loss of 0.
    relative_loss: data loss over 1/2 ||b||^2 (the data loss itself for b = 0); rescaled, over
        1/2 ||u(A x)||^2.
    form: "softmax", or u of the rescaled form.
    data_loss, penalty: the parts of the loss.
    status: why the run ended.
    iterations: of the start that won.
    tol: the tolerance that was applied.
    history: a `Record` of the start and of every iteration.
    start_losses: final loss of every start of `n_init`, in order; this one is the lowest.
    seconds: wall time of the whole call.
    """

    x: Array
    fitted: Array
    form: Form
    loss: float
    log10_loss: float
    data_loss: float
    penalty: float
    relative_loss: float
    status: Status
    iterations: int
    seconds: float
    tol: float
    history: History
    start_losses: tuple[float, ...]

    @property
    def success(self) -> bool:
        """True when the run converged."""
        return self.status is Status.CONVERGED

    @property
    def message(self) -> str:
        """The status as a sentence."""
        if self.loss == math.inf:
            where = f"about 10^{self.log10_loss:.0f}"
            return f"{self.status.sentence}  The loss, {where}, exceeds the floating-point range."
        return self.status.sentence

    def summary(self) -> str:
        """A few lines for a terminal."""
        return "\n".join([self._kind, *aligned(self._rows()), self.message])

    @property
    def _kind(self) -> str:
        return f"{'' if self.form == 'softmax' else 'rescaled '}{self.form} regression"

    def _rows(self) -> list[tuple[str, str]]:
        first, last = self.history[0], self.history[-1]
        loss = f"{self.loss:.6e}" if math.isfinite(self.loss) else f"10^{self.log10_loss:.6f}"
        rows = [
            ("Loss at the start", f"{first.loss:.6e}"),
            ("Loss", loss),
            ("  data", f"{self.data_loss:.6e}"),
            ("  penalty", f"{self.penalty:.6e}"),
            ("Relative loss", f"{self.relative_loss:.6g}"),
            ("Gradient norm", f"{last.gradient:.3e}"),
            ("Newton decrement", f"{last.decrement:.3e} (tolerance {self.tol:.0e})"),
            ("Iterations", str(self.iterations)),
            ("Seconds", f"{self.seconds:.3g}"),
        ]
        if len(self.start_losses) > 1:
            losses = sorted(self.start_losses)
            words = f"{len(losses)}, final losses {losses[0]:.6g} to {losses[-1]:.6g}"
            rows.append(("Starts", words))
        return rows

    def _table(self) -> Table:
        title = f"SoftmaxRegression: {self.status.value}, {self._kind}"
        course = sparkline(self.history.column("loss"), "Loss of every iteration, logarithmic")
        return Table(title, self._rows(), notes=(self.message,), figure=course)

    def __repr__(self) -> str:
        """One line."""
        return (
            f"SoftmaxRegression({self.status.value}, relative_loss {self.relative_loss:.6g}, "
            f"loss {self.loss:.6g}, {self.iterations} iterations, {self.seconds:.3g} s)"
        )
