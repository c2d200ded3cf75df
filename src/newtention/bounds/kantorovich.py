"""Newton-Kantorovich: a stationary point near a given one, its curvature, and its uniqueness.

Let g and H be gradient and Hessian of a twice differentiable f, H = H(x0) >= lambda I with
lambda > 0, ||H^-1 g|| <= eta, and ||H(x) - H(y)|| <= M ||x - y|| on the closed ball of radius delta
about x0.  With h = M eta / lambda < 1/2 let

    t* = (1 - sqrt(1 - 2 h)) lambda / M,    t** = (1 + sqrt(1 - 2 h)) lambda / M

(eta and infinity for M = 0).  If t* <= delta, exactly one stationary point x* lies in the open ball
of radius min(t**, delta) (in the closed ball of radius t* if that is larger); ||x* - x0|| <= t* and
lambda_min(H(x*)) >= lambda sqrt(1 - 2 h).

Proof.  Let K = M / lambda and T(x) = x - H^-1 g(x), so T' = H^-1 (H - H(x)) and ||T'(x)|| <= K r at
distance r <= delta.  Integrating along the ray, ||T(x) - x0|| <= eta + K r^2 / 2, which is at most
t* for r <= t*, as t* and t** are the roots of K t^2 / 2 - t + eta.  So T maps the closed ball of
radius t* into itself, and contracts it: K t* = 1 - sqrt(1 - 2 h) < 1.  Its one fixed point is x*.
Any other stationary point y in the larger ball is a fixed point too, r = ||y - x0|| <= eta +
K r^2 / 2, so r <= t* or r >= t**.  And H(x*) >= (lambda - M t*) I.

Sharp: f'(s) = lambda (K s^2 / 2 - s + eta), reflected, attains every figure in one dimension.

Source: Kantorovich (1948); the form with the roots of a majorant is that of Ortega (1968).  The
proof is short because H is symmetric positive definite and M is global on the ball.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple


class NewtonKantorovich(NamedTuple):
    """What is proved about the stationary point nearest to x0.

    certified: whether anything is; `reason` says why not, in a sentence.
    h: M eta / lambda, below 1/2 if certified.
    distance: upper bound of ||x* - x0||; infinite if not certified.
    uniqueness: x* is the only stationary point in the open ball of this radius and, unless
        whitened, in the closed ball of radius `distance`; 0 if not certified.
    curvature: lower bound of lambda_min(H(x*)), positive: a strict local minimum.
    delta: radius of the ball for which h, distance and curvature hold; the last one tried if none.
    M: the Lipschitz constant on that ball.
    """

    certified: bool
    h: float
    distance: float
    uniqueness: float
    curvature: float
    delta: float
    M: float
    reason: str


class _Roots(NamedTuple):
    """The majorant's figures, each rounded to its safe side; near is infinite if h >= 1/2."""

    h: float
    near: float
    far: float
    curvature: float


def newton_kantorovich(
    lam: float, eta: float, lipschitz: Callable[[float], float], evaluations: int = 24
) -> NewtonKantorovich:
    """Exactly one stationary point near x0, from one Hessian and a Lipschitz constant.

    Args:
        lam: proved lower bound of lambda_min(H(x0)).
        eta: proved upper bound of ||H(x0)^-1 g(x0)||.
        lipschitz: delta -> M, a proved Lipschitz constant (spectral norm) of the Hessian on the
            closed ball of radius delta about x0.  Infinity, NaN and OverflowError mean none.
        evaluations: how often `lipschitz` may be called; at least 1.

    delta starts at eta, which t* is never below, and grows to t* until t* <= delta; since t* <= 2
    eta, 2 eta is the last.  What calls are left go into the largest min(t**, delta).  Rounding is
    outward in every operation, so the figures hold as printed.
    """
    if not lam > 0:
        return _failed(math.inf, 0.0, math.inf, "The Hessian is not proved positive definite.")
    if not 0 <= eta < math.inf:
        return _failed(math.inf, 0.0, math.inf, "The Newton step is not bounded.")
    delta = eta if evaluations > 1 else 2 * eta
    M, roots, used = math.inf, _roots(lam, eta, math.inf), 0
    while used < evaluations:
        M = _constant(lipschitz, delta)
        roots = _roots(lam, eta, M)
        used += 1
        if roots.near <= delta or roots.near == math.inf:
            break
        # A little beyond, so that a slowly growing M ends the iteration.
        last = used == evaluations - 1
        delta = 2 * eta if last else min(2 * eta, 1.01 * roots.near)
    if not roots.near <= delta:
        reason = f"M eta / lambda = {roots.h:.3g} is not below 1/2: the point is not near enough."
        return _failed(roots.h, delta, M, reason)
    far = _uniqueness(lam, eta, lipschitz, delta, roots, evaluations - used)
    return NewtonKantorovich(True, roots.h, roots.near, far, roots.curvature, delta, M, "")


def whitened_newton_kantorovich(
    lam: float,
    eta: float,
    lipschitz: Callable[[float], float],
    norm: float,
    inverse_norm: float,
    evaluations: int = 24,
) -> NewtonKantorovich:
    """The same in the variables s, x = x0 + W s, with any invertible W, usually about H^(-1/2).

    Args:
        lam: proved lower bound of lambda_min(W^T H W), about 1.
        eta: proved upper bound of ||(W^T H W)^-1 W^T g||, about ||H^(-1/2) g||.
        lipschitz: delta -> M, a Lipschitz constant of s -> W^T H(x0 + W s) W on ||s|| <= delta.
        norm: proved upper bound of ||W||_2.
        inverse_norm: proved upper bound of ||W^-1||_2.
        evaluations: how often `lipschitz` may be called.

    `distance`, `uniqueness` and `curvature` are in the variable x: ||x - x0|| <= norm ||s||,
    ||s|| <= inverse_norm ||x - x0||, and W^T H(x*) W >= c I gives H(x*) >= c / norm^2.  The ball of
    s becomes an ellipsoid, so `uniqueness` may be less than `distance`.  h, delta and M are in s.
    """
    found = newton_kantorovich(lam, eta, lipschitz, evaluations)
    if not found.certified:
        return found
    return found._replace(
        distance=_up(found.distance * norm),
        uniqueness=_down(found.uniqueness / inverse_norm),
        curvature=_down(found.curvature / _up(norm * norm)),
    )


def _constant(lipschitz: Callable[[float], float], delta: float) -> float:
    try:
        M = lipschitz(delta)
    except OverflowError:
        return math.inf
    return math.inf if math.isnan(M) else M


def _roots(lam: float, eta: float, M: float) -> _Roots:
    """h, t*, t** and lambda sqrt(1 - 2 h)."""
    if not math.isfinite(M):
        return _Roots(math.inf, math.inf, 0.0, 0.0)
    h = _up(_up(M * eta) / lam) if M > 0 and eta > 0 else 0.0
    if not h < 0.5:
        return _Roots(h, math.inf, 0.0, 0.0)
    root = _down(math.sqrt(_down(1 - 2 * h))) if h > 0 else 1.0
    far = _down(_down(_down(1 + root) * lam) / M) if M > 0 else math.inf
    # (1 - root) lambda / M without the cancellation.
    near = _up(2 * eta / _down(1 + root)) if h > 0 else eta
    return _Roots(h, near, far, _down(lam * root) if h > 0 else lam)


def _uniqueness(
    lam: float,
    eta: float,
    lipschitz: Callable[[float], float],
    delta: float,
    roots: _Roots,
    evaluations: int,
) -> float:
    """Largest min(t**, delta) found.

    t** falls and delta rises: the best radius is where they meet, below the t** in hand.
    """
    best = min(roots.far, delta)
    low, high = delta, min(roots.far, 1e150)
    trial = high
    for _ in range(evaluations):
        if not low < trial:
            break
        at = _roots(lam, eta, _constant(lipschitz, trial))
        if at.near <= trial:
            best = max(best, min(at.far, trial))
        if at.near <= trial and at.far >= trial:
            low = trial
        else:
            high = trial
            if at.near <= trial:
                low = max(low, at.far)
        if high <= low * (1 + 1e-6):
            break
        # Far apart, halve the exponent.
        base = max(low, high * 2**-40)
        trial = math.sqrt(base) * math.sqrt(high) if high > 4 * base else (base + high) / 2
    return best


def _failed(h: float, delta: float, M: float, reason: str) -> NewtonKantorovich:
    return NewtonKantorovich(False, h, math.inf, 0.0, -math.inf, delta, M, reason)


def _up(x: float) -> float:
    return math.nextafter(x, math.inf)


def _down(x: float) -> float:
    return math.nextafter(x, -math.inf)
