"""Contraction of approximate Newton steps (Section 14 of the paper), corrected.

Let x* be a stationary point, H* = H(x*) >= l I with l > 0, e_k = x_k - x*, r = ||e_k|| and
||e||_* = sqrt(e . H* e).  A step is x_{k+1} = x_k - H~^-1 g(x_k) with some

    (1 - eps) H(x_k) <= H~ <= (1 + eps) H(x_k),   0 <= eps < 1,

and a < 1 measures how much the Hessian changes between x* and x_k, relative to H*:

    -a |s - t| H* <= H(x* + s e_k) - H(x* + t e_k) <= a |s - t| H*   for s, t in [0, 1].

a = M r / l will do, M a Lipschitz constant of the Hessian on the segment, and so will
a = M_* ||e_k||_* with M_* <= M / l^(3/2) the same constant in the variables H*^(1/2) x.

The paper's printed bound ignores the condition number and is false unless eps = 0: docs/errata.md.
"""

from __future__ import annotations

import math


def energy_factor(eps: float, a: float) -> float:
    """||e_{k+1}||_* <= factor ||e_k||_*: the bound of the errata page, proved there.

    [eps (1 + a) + a / 2] / [(1 - eps)(1 - a)]; infinite unless a < 1 and eps < 1.
    """
    if not (eps < 1 and a < 1):
        return math.inf
    return (eps * (1 + a) + a / 2) / ((1 - eps) * (1 - a))


def sharp_energy_factor(eps: float, a: float) -> float:
    """||e_{k+1}||_* <= factor ||e_k||_*, never above `energy_factor`.

    eps / (1 - eps) sqrt((1 + a) / (1 - a)) + a / (2 (1 - eps)(1 - a)).

    Proof.  g = H- e with H- the mean of H on the segment, so
    e' = (I - H~^-1 H) e + H~^-1 (H - H-) e, H = H(x_k).  With S = H^(-1/2) H~ H^(-1/2), which lies
    between 1 - eps and 1 + eps, I - H~^-1 H = H^(-1/2) (I - S^-1) H^(1/2) and ||I - S^-1|| <=
    eps / (1 - eps).  From (1 - a) H* <= H <= (1 + a) H* the two outer factors, turned into the norm
    of H*, are at most (1 - a)^(-1/2) and (1 + a)^(1/2).  The second term: H~ >= (1 - eps)(1 - a) H*
    and -a/2 H* <= H - H- <= a/2 H*, the integral of a (1 - t).

    Attained for eps = 0 (the cubic l e^2 / 2 + M e^3 / 6 at e = -r) and for a = 0
    (H~ = (1 - eps) H).
    """
    if not (eps < 1 and a < 1):
        return math.inf
    return (eps * math.sqrt((1 + a) / (1 - a)) + a / (2 * (1 - a))) / (1 - eps)


def euclidean_factor(eps: float, a: float, condition: float) -> float:
    """||e_{k+1}|| <= factor ||e_k|| in the Euclidean norm, with a = M r / l.

    sqrt(condition) eps / (1 - eps) + a / (2 (1 - eps)(1 - a)), condition = cond H(x_k) or an upper
    bound.  The same split: H^(-1/2) and H^(1/2) contribute sqrt(cond), H~ >= (1 - eps)(l - M r).
    """
    if not (eps < 1 and a < 1):
        return math.inf
    return (math.sqrt(condition) * eps + a / (2 * (1 - a))) / (1 - eps)


def printed_factor(eps: float, a: float) -> float:
    """The paper's 2 (eps + a / (1 - a)), printed for the Euclidean norm.

    False unless eps = 0: M = 0, H = diag(1, 1e6), eps = 0.01 allows a factor of 10 against its
    0.02.  In the norm of H* it does hold for eps, a <= 1/10, being above `sharp_energy_factor`.
    """
    return 2 * (eps + a / (1 - a)) if a < 1 else math.inf


def largest_step_ratio(eps: float, factor: float = 1.0) -> float:
    """Largest a, from below, with sharp_energy_factor(eps, a) <= factor; 0 if there is none.

    The factor increases in a from eps / (1 - eps), so bisection finds it; with eps = 0 it is
    2 factor / (1 + 2 factor).
    """
    low, high = 0.0, 1.0
    while high - low > 2**-50 * high:
        middle = (low + high) / 2
        if sharp_energy_factor(eps, middle) * (1 + 2**-48) <= factor:
            low = middle
        else:
            high = middle
        if high < 2**-60:
            return 0.0
    return low


def basin(M: float, l: float, eps: float, factor: float = 1.0) -> float:
    """Radius in ||.||_* of a basin in which every step contracts at least by `factor` <= 1.

    Args:
        M: Lipschitz constant of the Hessian on the Euclidean ball of radius basin / sqrt(l).
        l: lower bound of lambda_min(H*).
        eps: of the approximate Hessians.
        factor: wanted.

    Since r <= ||e||_* / sqrt(l), a start with M ||e_0||_* <= a l^(3/2), a = `largest_step_ratio`,
    has a_0 <= a; the factor is then at most `factor`, ||e_k||_* does not grow, and a_k <= a
    persists.  The paper's M ||e_0||_* <= 0.1 l^(3/2) is the case factor = 0.0673 at eps = 0.01; all
    that a factor below 1 needs is a < 0.660 there.  Infinite for M = 0.
    """
    a = largest_step_ratio(eps, factor)
    if not (l > 0 and a > 0):
        return 0.0
    return a * l * math.sqrt(l) / M * (1 - 2**-50) if M > 0 else math.inf


def iterations(eps: float, a: float, ratio: float, limit: int = 1_000_000) -> int:
    """Steps after which ||e_k||_* <= ratio ||e_0||_*, from a_0 <= a.

    Follows the bound with a_k = M_* ||e_k||_*, which shrinks with the error.  Linear at the rate
    eps / (1 - eps) in the end, quadratic for eps = 0.

    Raises:
        ValueError: the factor at a is not below 1, ratio is not positive, or `limit` steps do not
            suffice.
    """
    if not ratio > 0:
        raise ValueError(f"ratio must be positive; found {ratio}.")
    if not sharp_energy_factor(eps, a) < 1:
        raise ValueError(
            f"a must lie in the basin, where steps contract; found a = {a} with eps = {eps}."
        )
    left = 1.0
    for k in range(limit + 1):
        if left <= ratio:
            return k
        left *= sharp_energy_factor(eps, a * left) * (1 + 2**-48)
    raise ValueError(f"limit must be raised: {limit} steps reach {left:.3g}, wanted {ratio}.")
