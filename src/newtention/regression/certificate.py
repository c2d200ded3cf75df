"""`certify_softmax`: a proof that an exact local minimum of softmax regression lies near a point.

Newton-Kantorovich (`newtention.bounds.kantorovich`) with the Lipschitz constants of
`newtention.bounds.softmax` and derivatives whose rounding is counted (`regression.errors`).  First
in x; then in the variables s, x = x0 + W s with W such that the Hessian is about the identity,
where the problem is softmax regression with the design A W.  Where the point is not near enough,
Newton steps lead to a centre that is, and distances include the way.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.bounds.balls import enclosing_ball, norms_upper
from newtention.bounds.kantorovich import (
    NewtonKantorovich,
    newton_kantorovich,
    whitened_newton_kantorovich,
)
from newtention.bounds.rounding import (
    downward,
    gamma,
    norm_upper,
    smallest_eigenvalue_lower,
    solve_norm_upper,
    upward,
)
from newtention.bounds.softmax import rescaled_lipschitz, softmax_lipschitz
from newtention.certify.certificate import Verdict, rounded_down, rounded_up
from newtention.certify.local import coordinates
from newtention.chunks import TILE_ELEMENTS
from newtention.display import Displayed, Row, Table, sentences
from newtention.inputs import as_like, require_shape
from newtention.notation import ArrayLike
from newtention.regression.arguments import Settings, as_problem, stacked
from newtention.regression.errors import Point, rescaled_point, softmax_point
from newtention.regression.rescaled import Kind
from newtention.regression.result import Form
from newtention.regression.rows import Rows

REFINEMENTS = 4
"""Newton steps at most, from the given point to one so near that the proof succeeds."""
PASSES = 8
"""Of the search for a small ball about the rows of a small A; else it is about their mean."""


@dataclass(frozen=True)
class SoftmaxCertificate(Displayed):
    """The outcome of `certify_softmax`.

    local_minimum: "proved": within `distance` of x lies an exact stationary point, a strict local
        minimum.
    distance: proved bound on the Euclidean distance; infinite if nothing is proved.
    uniqueness_radius: no other stationary point is this near; 0 if nothing is proved.  It may be
        smaller than `distance`, where the proof was led elsewhere or with stretched coordinates.
    smallest_eigenvalue: of the Hessian at x; a lower bound if `eigenvalue_proved`, else an
        estimate.
    gradient: bound on the gradient's norm.  step: bound on the Newton step's, ||H^-1 g||.
    kantorovich: h of the proof, below 1/2 if it succeeds.
    lipschitz, lipschitz_radius: proved Lipschitz constant of the Hessian on the ball of that radius
        about x (or the centre that Newton steps lead to).
    form, unknowns, relative_loss: of the problem and the point.
    reasons: what stands in the way, one sentence each.
    """

    local_minimum: Verdict
    distance: float
    uniqueness_radius: float
    smallest_eigenvalue: float
    eigenvalue_proved: bool
    gradient: float
    step: float
    kantorovich: float
    lipschitz: float
    lipschitz_radius: float
    form: Form
    unknowns: int
    relative_loss: float
    reasons: tuple[str, ...]

    def summary(self) -> str:
        """Sentences that can be quoted."""
        return "\n".join([*sentences(self._rows()), *self.reasons])

    def _rows(self) -> list[Row]:
        rows: list[Row] = [("Local minimum", self.local_minimum)]
        if self.local_minimum == "proved":
            rows.append(
                (
                    f"Within a distance of {rounded_up(self.distance):.3g} of x lies an exact "
                    "stationary point and it is a strict local minimum.",
                )
            )
        if self.uniqueness_radius > 0:
            rows.append((f"There is no other within {rounded_down(self.uniqueness_radius):.3g}.",))
        smallest = f"about {self.smallest_eigenvalue:.3g} (an estimate)"
        if self.eigenvalue_proved:
            smallest = f"at least {rounded_down(self.smallest_eigenvalue):.3g}"
        gradient = f"gradient at most {rounded_up(self.gradient):.3g}"
        rows.append(("Smallest eigenvalue of the Hessian", f"{smallest}; {gradient}"))
        if math.isfinite(self.lipschitz):
            within = f"within {rounded_down(self.lipschitz_radius):.3g}"
            bound = f"at most {rounded_up(self.lipschitz):.3g}"
            rows.append((f"Lipschitz constant of the Hessian {within}", bound))
        return rows

    def _table(self) -> Table:
        title = f"Certificate of {self.form} regression in {self.unknowns} unknowns"
        return Table(title, self._rows(), notes=self.reasons)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; infinity as a string, so that any JSON reader takes it."""
        return {
            k: str(v) if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in asdict(self).items()
        }

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=2)

    def __repr__(self) -> str:
        """One line."""
        far = f"within {rounded_up(self.distance):.3g}, " if math.isfinite(self.distance) else ""
        return (
            f"SoftmaxCertificate(local minimum {self.local_minimum}; {far}{self.form}, "
            f"{self.unknowns} unknowns)"
        )

    def __str__(self) -> str:
        """The summary."""
        return self.summary()


def certify_softmax(
    A: ArrayLike,
    b: ArrayLike,
    x: ArrayLike,
    *,
    ridge: float = 0.0,
    rescaled: bool = False,
    kind: Kind = "exp",
) -> SoftmaxCertificate:
    """Prove that an exact local minimum of softmax regression lies within a stated distance of x.

    Computed in float64 on the CPU from these arguments alone; they are those of
    `softmax_regression`.

    Args:
        A: (n, d) design.
        b: (n,) target.
        x: (d,) point, such as the x of a SoftmaxRegression.
        ridge: strength.
        rescaled: which of the two losses.
        kind: u of the rescaled form.

    Returns:
        The verdict and the numbers behind it; `print` gives sentences to quote.

    Raises:
        ValueError: shapes that do not fit, NaN or infinity, a setting out of range.
        TypeError: arrays of the wrong kind or of mixed kinds.

    Source: docs/softmax-regression.md.
    """
    settings = Settings(ridge, rescaled, kind)
    design, target, _ = as_problem(A, b)
    design, target = design.cpu().double(), target.cpu().double()
    point = as_like("x", x, design)
    require_shape("x", point, (design.shape[1],), "columns of A")
    rows = stacked([design], [target], float(settings.ridge), 1)
    return _certificate(_Problem(rows, settings.kind if rescaled else "softmax"), point)


class _Problem(NamedTuple):
    """One problem."""

    rows: Rows
    form: Form

    def at(self, x: Float[Tensor, " d"]) -> Point:
        """Derivatives with their errors."""
        if self.form == "softmax":
            return softmax_point(self.rows, x)
        return rescaled_point(self.form, self.rows, x)

    def lipschitz(self, point: Point, design: Tensor, error: float) -> Callable[[float], float]:
        """delta -> M about a point, for a design whose rows are off by at most `error`."""
        if self.form == "softmax":
            every = torch.ones(1, len(design), dtype=torch.bool)
            passes = PASSES if design.numel() <= TILE_ELEMENTS else 0
            radius = float(enclosing_ball(design[None], every, passes)[1]) + error
            f, r, n = point.weights_norm, point.residual_norm, len(design)
            return lambda delta: softmax_lipschitz(radius, f, r, n, delta)
        norms = upward(norms_upper(design) + error, 2)
        b = norm_upper(self.rows.B)
        e, r = point.exponents, point.residual_norm
        return lambda delta: rescaled_lipschitz(e, norms, b, r, delta)


class _Proof(NamedTuple):
    """Outcome about a centre, in x; lam and eta of the theorem there."""

    point: Point
    lam: float
    eta: float
    found: NewtonKantorovich


def _certificate(problem: _Problem, x: Float[Tensor, " d"]) -> SoftmaxCertificate:
    point = problem.at(x)
    first = best = _proof(problem, point)
    for _ in range(REFINEMENTS):
        if best.found.certified or not best.lam > 0:
            break
        centre = best.point.x - torch.linalg.solve(best.point.hessian, best.point.gradient)
        trial = _proof(problem, problem.at(centre))
        if not trial.eta < best.eta:
            break
        best = trial
    found = best.found
    moved = upward(norm_upper(best.point.x - x), 2)
    proved = first.lam > 0
    lam = first.lam if proved else _estimate(point.hessian)
    return SoftmaxCertificate(
        local_minimum="proved" if found.certified else "not certified",
        distance=upward(moved + found.distance, 2) if moved > 0 else found.distance,
        uniqueness_radius=max(0.0, downward(found.uniqueness - moved, 2)),
        smallest_eigenvalue=_absolute(lam, point.log_unit, below=True),
        eigenvalue_proved=proved,
        gradient=_absolute(norm_upper(point.gradient) + point.gradient_error, point.log_unit),
        step=first.eta,
        kantorovich=found.h,
        lipschitz=_absolute(found.M, best.point.log_unit),
        lipschitz_radius=found.delta,
        form=problem.form,
        unknowns=len(x),
        relative_loss=point.relative_loss,
        reasons=() if found.certified else _reasons(problem, best, proved),
    )


def _proof(problem: _Problem, point: Point) -> _Proof:
    """The theorem in x, then in whitened variables."""
    H, g = point.hessian, point.gradient
    finite = bool(torch.isfinite(H).all()) and bool(torch.isfinite(g).all())
    lam = smallest_eigenvalue_lower(H, point.hessian_error) if finite else -math.inf
    eta = solve_norm_upper(H, g, lam, point.hessian_error, point.gradient_error)
    A = problem.rows.A[0]
    if not lam > 0:
        return _Proof(point, lam, eta, newton_kantorovich(lam, eta, lambda delta: math.inf))
    lipschitz = problem.lipschitz(point, A, 0.0)
    found = newton_kantorovich(lam, eta, lipschitz)
    if not found.certified:
        white = _whitened(problem, point)
        if white is not None:
            found = white._replace(M=lipschitz(white.distance), delta=white.distance)
    return _Proof(point, lam, eta, found)


def _whitened(problem: _Problem, point: Point) -> NewtonKantorovich | None:
    """In s with x = x0 + W s, W^T H W about the identity."""
    L, failed = torch.linalg.cholesky_ex(point.hessian)
    if int(failed):
        return None
    W = torch.linalg.solve_triangular(L, torch.eye(len(L), dtype=L.dtype), upper=False).mT
    at = coordinates(
        point.hessian, point.hessian_error, point.gradient, point.gradient_error, W
    )  # fmt: skip
    lam = smallest_eigenvalue_lower(at.hessian, at.hessian_error)
    if not lam > 0:
        return None
    eta = solve_norm_upper(at.hessian, at.gradient, lam, at.hessian_error, at.gradient_error)
    A = problem.rows.A[0]
    rounding = gamma(len(L)) * float(norms_upper(A).max()) * norm_upper(W)
    lipschitz = problem.lipschitz(point, A @ W, upward(rounding, 4))
    found = whitened_newton_kantorovich(lam, eta, lipschitz, at.norm, at.inverse_norm)
    return found if found.certified else None


def _reasons(problem: _Problem, proof: _Proof, positive: bool) -> tuple[str, ...]:
    if positive:
        return (proof.found.reason,)
    reasons = [proof.found.reason]
    if problem.form == "softmax" and not float(problem.rows.ridge) > 0:
        reasons.append(
            "Without a ridge the loss is constant along every e for which A e is a multiple of 1, "
            "and flat where the softmax saturates."
        )
    return tuple(reasons)


def _estimate(H: Float[Tensor, "d d"]) -> float:
    """The smallest eigenvalue, unproved."""
    return float(torch.linalg.eigvalsh(H)[0]) if bool(torch.isfinite(H).all()) else -math.inf


def _absolute(value: float, log_unit: float, below: bool = False) -> float:
    """A number without the unit exp(log_unit), rounded to its safe side."""
    if log_unit == 0.0 or value == 0.0 or not math.isfinite(value):
        return value
    log = math.log(abs(value)) + log_unit
    size = math.exp(log) if log < 709.0 else math.inf
    # The logarithm's rounding is an absolute error of a few units of its terms.
    slack = 1e-14 * (abs(log) + abs(log_unit) + 1.0)
    if not below:
        return size * (1.0 + slack)
    return math.copysign(min(size * (1.0 - slack), sys.float_info.max), value)
