"""A local minimum near a point, by Newton-Kantorovich on the complement of the flat directions.

x = x0 + W s, with W an orthonormal basis of that complement (the identity where nothing is flat),
or W = (basis) L^-T, H = L L^T, which makes the Hessian the identity: with the unfolded third
derivative in those variables the proof reaches much further.  W is taken as the floating-point
matrix that it is; its norms are proved.  Cheap Lipschitz constants are tried first.

Where x0 is not near enough, Newton steps lead to a centre that is; distances then include the way.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.bounds.contraction import basin, iterations, largest_step_ratio
from newtention.bounds.kantorovich import (
    NewtonKantorovich,
    newton_kantorovich,
    whitened_newton_kantorovich,
)
from newtention.bounds.lipschitz import lipschitz_unfolding
from newtention.bounds.rounding import (
    UNIT,
    downward,
    gamma,
    norm_upper,
    smallest_eigenvalue_lower,
    solve_norm_upper,
    spectral_norm_upper,
    upward,
)
from newtention.certify.certificate import Basin
from newtention.certify.evaluation import PointEvaluation, evaluate_point, sharpened
from newtention.certify.invariances import FlatSpace, complement
from newtention.certify.lipschitz import PointBounds
from newtention.certify.map_lipschitz import bounds_about
from newtention.problem import AttentionProblem

UNFOLD_ALWAYS = 256
"""Unknowns up to which the third derivative is unfolded for the sake of a tight constant."""
UNFOLD_MOST = 640
"""Unknowns up to which it is unfolded where the proof needs it: minutes of work."""
REFINEMENTS = 4
"""Newton steps at most, from the given point to one so near that the proof succeeds."""
FACTOR = 0.5
"""Contraction that the reported basin promises."""


class LocalProof(NamedTuple):
    """The Newton-Kantorovich theorem's outcome, and what went into it.

    found: distances are Euclidean ones of (X, Y), from the centre.
    bounds: with all levels that were computed, about the centre.
    moved: distance of the centre from the given point.
    eigenvalue: lower bound of the smallest eigenvalue at the given point, on the complement of the
        flat directions; an estimate unless `proved`.
    step: bound of ||H^-1 g|| at the given point.
    inflation: what a Lipschitz constant in (X, Y) is multiplied by in the variables s.
    """

    found: NewtonKantorovich
    bounds: PointBounds
    moved: float
    eigenvalue: float
    proved: bool
    step: float
    inflation: float

    @property
    def distance(self) -> float:
        """From the given point."""
        return upward(self.moved + self.found.distance, 2)

    @property
    def uniqueness(self) -> float:
        """About the given point."""
        left = math.nextafter(self.found.uniqueness - upward(self.moved, 2), -math.inf)
        return max(0.0, left)


class Coordinates(NamedTuple):
    """The problem in s: Hessian, gradient and their errors, and bounds of ||W|| and ||W^-1||."""

    W: Float[Tensor, "N r"] | None
    hessian: Float[Tensor, "r r"]
    hessian_error: float
    gradient: Float[Tensor, " r"]
    gradient_error: float
    norm: float
    inverse_norm: float


class _Centre(NamedTuple):
    """A point with lambda and eta of the theorem there."""

    point: PointEvaluation
    at: Coordinates
    lam: float
    eta: float


def prove_local(
    problem: AttentionProblem,
    data: AttentionProblem,
    point: PointEvaluation,
    flat: FlatSpace,
    unfolding: bool | None,
) -> LocalProof:
    """Try the levels in the order of their cost, about the point or one that Newton leads to.

    unfolding: True to unfold in any case, False never, None where it is cheap or needed.
    """
    W = complement(flat.basis) if flat.basis.shape[1] else None
    first = centre = _centre(point, W)
    bounds = bounds_about(data, point)
    if not centre.lam > 0:
        at = centre.at.hessian
        estimate = float(torch.linalg.eigvalsh(at)[0]) if len(at) else math.inf
        found = newton_kantorovich(centre.lam, math.inf, lambda delta: math.inf)
        return LocalProof(found, bounds, 0.0, estimate, False, math.inf, 1.0)
    found = _kantorovich(centre, bounds)
    if not found.certified:
        # Usually it is the rounding of the gradient that hides the minimum.
        sharp = _centre(sharpened(point, problem), W)
        first = sharp if sharp.eta < first.eta else first
        centre, bounds, found = _refined(problem, data, first, W)
    if not found.certified:
        bounds = bounds.with_statistics()
        found = _kantorovich(centre, bounds)
    unknowns = point.layer.size
    affordable = unfolding is not False and (unknowns <= UNFOLD_MOST or unfolding is True)
    wanted = not found.certified or unknowns <= UNFOLD_ALWAYS or unfolding is True
    if affordable and wanted:
        bounds = bounds.with_unfolding()
        found = _kantorovich(centre, bounds)
        if not found.certified:
            found = _whitened(bounds, centre.at) or found
    moved = norm_upper(centre.point.theta - point.theta)
    norm = first.at.norm
    inflation = 1.0 if W is None else upward(norm**3, 4)
    # From s to (X, Y): ||W s|| <= norm ||s||.
    lam = first.lam if W is None else downward(first.lam / upward(norm**2, 2), 2)
    eta = first.eta if W is None else upward(norm * first.eta, 2)
    return LocalProof(found, bounds, moved, lam, True, eta, inflation)


def _centre(point: PointEvaluation, W: Float[Tensor, "N r"] | None) -> _Centre:
    """The point in the coordinates W."""
    at = coordinates(point.hessian, point.hessian_error, point.gradient, point.gradient_error, W)
    lam = smallest_eigenvalue_lower(at.hessian, at.hessian_error) if len(at.hessian) else math.inf
    eta = solve_norm_upper(at.hessian, at.gradient, lam, at.hessian_error, at.gradient_error)
    return _Centre(point, at, lam, eta)


def _refined(
    problem: AttentionProblem, data: AttentionProblem, centre: _Centre, W: Tensor | None
) -> tuple[_Centre, PointBounds, NewtonKantorovich]:
    """Where Newton steps lead, until the cheap proof succeeds or they stop getting shorter.

    Gradients there are evaluated beyond float64.
    """
    best = centre
    bounds = bounds_about(data, best.point)
    found = _kantorovich(best, bounds)
    for _ in range(REFINEMENTS):
        if found.certified:
            break
        step = torch.linalg.solve(best.at.hessian, best.at.gradient)
        theta = best.point.theta - (step if W is None else W @ step)
        trial = _centre(evaluate_point(problem, best.point.layer, theta[None], precise=True), W)
        if not (trial.lam > 0 and trial.eta < best.eta):
            break
        best, bounds = trial, bounds_about(data, trial.point)
        found = _kantorovich(best, bounds)
    return best, bounds, found


def coordinates(
    H: Float[Tensor, "N N"],
    hessian_error: float,
    g: Float[Tensor, " N"],
    gradient_error: float,
    W: Float[Tensor, "N r"] | None,
) -> Coordinates:
    """Gradient and Hessian in s, the rounding of the products included."""
    if W is None:
        return Coordinates(None, H, hessian_error, g, gradient_error, 1.0, 1.0)
    N = len(g)
    norm = spectral_norm_upper(W)
    a = W.abs()
    product = a.mT @ (H.abs() @ a)
    moved = W.mT @ (H @ W)
    rounding = upward(gamma(2 * N + 4) * norm_upper(product), N)
    gradient = W.mT @ g
    slack = upward(gamma(N) * norm_upper(a.mT @ g.abs()), N)
    square = smallest_eigenvalue_lower(W.mT @ W, upward(gamma(N) * norm_upper(W) ** 2, N))
    inverse = upward(1 / math.sqrt(square), 4) if square > 0 else math.inf
    return Coordinates(
        W,
        0.5 * (moved + moved.mT),
        upward(norm**2 * hessian_error + rounding + UNIT * norm_upper(moved), 8),
        gradient,
        upward(norm * gradient_error + slack, 4),
        norm,
        inverse,
    )


def _kantorovich(centre: _Centre, bounds: PointBounds) -> NewtonKantorovich:
    """The theorem in s."""
    at, lam, eta = centre.at, centre.lam, centre.eta
    if at.W is None:
        return newton_kantorovich(lam, eta, lambda delta: bounds.at(delta).value)

    def in_s(delta: float) -> float:
        return upward(bounds.at(upward(at.norm * delta, 2)).value * at.norm**3, 8)

    return whitened_newton_kantorovich(lam, eta, in_s, at.norm, at.inverse_norm)


def _whitened(bounds: PointBounds, at: Coordinates) -> NewtonKantorovich | None:
    """The same with W such that the Hessian is about the identity."""
    L, failed = torch.linalg.cholesky_ex(at.hessian)
    if int(failed):
        return None
    every = torch.eye(len(L), dtype=L.dtype, device=L.device)
    W = torch.linalg.solve_triangular(L, every, upper=False).mT
    point = bounds.point
    white = coordinates(
        point.hessian,
        point.hessian_error,
        point.gradient,
        point.gradient_error,
        W if at.W is None else at.W @ W,
    )
    assert white.W is not None
    lam = smallest_eigenvalue_lower(white.hessian, white.hessian_error)
    if not lam > 0:
        return None
    eta = solve_norm_upper(
        white.hessian, white.gradient, lam, white.hessian_error, white.gradient_error
    )
    unfolded = bounds.unfolded(white.W, white.norm)

    def lipschitz(delta: float) -> float:
        fourth = bounds.fourth(upward(white.norm * delta, 2)) * white.norm**4
        return upward(lipschitz_unfolding(unfolded, fourth, delta), 8)

    found = whitened_newton_kantorovich(lam, eta, lipschitz, white.norm, white.inverse_norm)
    return found if found.certified else None


def widest_basin(proof: LocalProof, epsilon: float, accuracy: float) -> Basin | None:
    """The largest basin about the proved minimum that the Lipschitz constants allow.

    A start within `radius` in the norm of the Hessian there is within radius / sqrt(l) in the
    Euclidean one, which has to stay in the ball that M holds on.
    """
    found = proof.found
    if not found.certified or not found.curvature > 0:
        return None
    l, distance = found.curvature, found.distance
    ratio = largest_step_ratio(epsilon, FACTOR)
    if not ratio > 0:
        return None
    best, best_M = 0.0, math.inf
    delta = max(2 * distance, 1e-12)
    for _ in range(60):
        M = upward(proof.bounds.at(delta).value * proof.inflation, 4)
        radius = min(basin(M, l, epsilon, FACTOR), (delta - distance) * math.sqrt(l) * (1 - 1e-12))
        if radius > best:
            best, best_M = radius, M
        elif best > 0:
            break
        delta *= 2
    H = proof.bounds.point.hessian
    largest = float(H.abs().sum(1).max()) * (1 + 1e-9) + proof.bounds.point.hessian_error
    # From the given point, not from the centre.
    reach = math.sqrt(largest + proof.bounds.at(distance).value * distance) * proof.distance
    steps = iterations(epsilon, ratio, accuracy)
    return Basin(epsilon, l, best_M, best, FACTOR, accuracy, steps, reach * (1 + 1e-9) <= best)
