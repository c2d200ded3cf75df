"""The paper's constants: bounds with exp(R^2) composed term by term, in logarithms.

They exceed 10^400 on ordinary problems, so every number is a `Magnitude`, its decimal logarithm.

*What is the paper's and what is ours.*  The printed figures quoted here are 30 R^8 and the factor
100 of Lemma 9.1.  The assumptions (norms at most R, |b| at most R^2, alpha >= beta, R >= 4), the
basic functions and the way of composing, a product rule for every product with exponentials
bounded by exp(R^2), are those of its Sections 8 to 12; the constants themselves are composed by
this module from the *corrected* Hessians (docs/errata.md), and are true under the stated
assumptions.  They show what the method gives, not each printed digit.

The paper's setting: one head, no bias, one sequence.  Sequences add (n counts all queries), a mask
only removes keys, a logit scale belongs to the block, and query weights count through n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

LOG10_E = math.log10(math.e)


@dataclass(frozen=True, order=True)
class Magnitude:
    """A nonnegative number, held as its decimal logarithm (minus infinity for 0)."""

    log10: float

    @classmethod
    def of(cls, value: float) -> Magnitude:
        """From a nonnegative float.

        Raises:
            ValueError: value is negative or not a number.
        """
        if not value >= 0:
            raise ValueError(f"value must be at least 0; found {value}.")
        return cls(math.log10(value) if value > 0 else -math.inf)

    @classmethod
    def exp(cls, exponent: float) -> Magnitude:
        """e^exponent."""
        return cls(exponent * LOG10_E)

    def __add__(self, other: Magnitude) -> Magnitude:
        high, low = max(self.log10, other.log10), min(self.log10, other.log10)
        if low == -math.inf or high == math.inf:
            return Magnitude(high)
        return Magnitude(high + math.log1p(10.0 ** (low - high)) * LOG10_E)

    def __mul__(self, other: Magnitude) -> Magnitude:
        if -math.inf in (self.log10, other.log10):
            return Magnitude(-math.inf)
        return Magnitude(self.log10 + other.log10)

    def __pow__(self, power: float) -> Magnitude:
        return Magnitude(self.log10 * power)

    def __str__(self) -> str:
        """As 1.2e345."""
        if not math.isfinite(self.log10):
            return "0" if self.log10 < 0 else "inf"
        exponent = math.floor(self.log10)
        return f"{10 ** (self.log10 - exponent):.1f}e{exponent:+d}"


ONE = Magnitude(0.0)


@dataclass(frozen=True)
class Term:
    """Bounds of a function's norm and of its Lipschitz constant on the region.

    Norms are spectral for matrices, Euclidean for vectors; Lipschitz in (x, y) jointly.  A product
    whose norm is at most the product of the norms has bound b1 b2 and constant b1 l2 + l1 b2.
    """

    bound: Magnitude
    lipschitz: Magnitude

    def __add__(self, other: Term) -> Term:
        return Term(self.bound + other.bound, self.lipschitz + other.lipschitz)

    def __mul__(self, other: Term) -> Term:
        return Term(
            self.bound * other.bound, self.bound * other.lipschitz + self.lipschitz * other.bound
        )

    def times(self, factor: float | Magnitude) -> Term:
        """A nonnegative constant times this."""
        by = factor if isinstance(factor, Magnitude) else Magnitude.of(factor)
        return Term(by * self.bound, by * self.lipschitz)


class Assumptions(NamedTuple):
    """The paper's assumptions, on the region ||X||_F <= R, ||Y||_F <= R.

    R: at least 4, max_j ||A_j||_2 (A_j = a1_j^T (x) A2, the block of query j, scale included),
        ||A3||_2, and the square root of the largest |b|.
    n: the sum of the query weights.  m: the most keys of a query.  p: columns of B.
    beta: lower bound of the normalisers alpha(x)_j on the region.
    """

    R: float
    n: float
    m: int
    p: int
    beta: Magnitude


class HessianBounds(NamedTuple):
    """The data part's blocks and the whole: norm and Lipschitz constant on the region."""

    xx: Term
    xy: Term
    yy: Term
    whole: Term


def assumptions(
    block: float,
    A3: float,
    x: float,
    y: float,
    b: float,
    n: float,
    m: int,
    p: int,
    fewest: int | None = None,
    beta: Magnitude | None = None,
) -> Assumptions:
    """The assumptions with the smallest R that fits the norms (upper bounds).

    Args:
        block: max_j |scale| ||a1_j|| ||A2||_2.
        A3: ||A3||_2.
        x: largest ||X||_F on the region of interest.
        y: largest ||Y||_F there.
        b: largest |B_ji|.
        n: queries, or the sum of their weights.
        m: the most keys that a query may attend to.
        p: columns of B.
        fewest: the fewest keys that a query may attend to; m if not given.
        beta: a better lower bound of alpha on the region, if one is known.  Without one, logits are
            at least -R^2, so alpha >= fewest exp(-R^2).
    """
    R = max(4.0, block, A3, x, y, math.sqrt(b))
    if beta is None:
        beta = Magnitude.of(float(m if fewest is None else fewest)) * Magnitude.exp(-R * R)
    return Assumptions(R, n, m, p, beta)


def basic_functions(given: Assumptions) -> dict[str, Term]:
    """The basic functions of a query j and a channel i (the kind of Lemmas 8.4 and 8.5).

    Logits A_j x have norm at most R^2 and Lipschitz constant R, so an entry of u = exp(A_j x) is at
    most E = exp(R^2) and

        u       sqrt(m) E      R E
        alpha   m E            sqrt(m) R E                         <u, 1>
        1/alpha 1/beta         sqrt(m) R E / beta^2
        f       1              R E / beta + m R E^2 / beta^2       u / alpha: a probability vector
        h       R^2            R                                   A3 Y_i
        gamma   R^2            by the product rule                 <f, h>
        c       2 R^2          the same                            gamma - b
        f o h   R^2            by the product rule

    with f o h no longer than ||f|| ||h||.  diag(f) has the bounds of f, diag(f o h) those of f o h.
    """
    R, m = Magnitude.of(given.R), Magnitude.of(float(given.m))
    E, inverse = Magnitude.exp(given.R**2), given.beta**-1.0
    slope = m**0.5 * R * E
    u = Term(m**0.5 * E, R * E)
    reciprocal = Term(inverse, inverse**2.0 * slope)
    # Of both bounds the product rule gives the second, the first is that of a probability vector.
    f = Term(ONE, (u * reciprocal).lipschitz)
    h = Term(R**2.0, R)
    gamma = f * h
    c = Term(gamma.bound + R**2.0, gamma.lipschitz)
    return {
        "u": u,
        "alpha": Term(m * E, slope),
        "1/alpha": reciprocal,
        "f": f,
        "h": h,
        "gamma": gamma,
        "c": c,
        "f o h": f * h,
    }


def logit_blocks(given: Assumptions) -> tuple[Term, Term]:
    """The m x m matrices of one query and channel: d2/ds2 and d2/ds dv of c^2 / 2, corrected.

    The first has norm at most 16 R^4: below the 30 R^8 of Lemma 9.1 even when summed over
    30 R^4 / 16 channels, so that figure survives the erratum.
    """
    terms = basic_functions(given)
    f, gamma, c, fh = (terms[name] for name in ("f", "gamma", "c", "f o h"))
    xx = (
        c * fh
        + c * gamma * f
        + (gamma + c).times(2.0) * fh * f
        + ((gamma * c).times(2.0) + gamma * gamma) * f * f
        + fh * fh
    )
    return xx, (fh + gamma * f) * f + c * (f + f * f)


def hessian_bounds(given: Assumptions) -> HessianBounds:
    """H_xx (Section 8), H_xy (Section 12), H_yy and the whole, composed from the basic functions.

    H_xx = sum_ji A_j^T (.) A_j: n p R^2.  H_xy has p blocks side by side, sum_j A_j^T (.) A3 each:
    sqrt(p) n R^2.  H_yy = (sum_j A3^T f f^T A3) (x) I_p: n R^2.  A symmetric matrix of blocks has
    norm at most max(||H_xx||, ||H_yy||) + ||H_xy||.
    """
    xx_logits, xy_logits = logit_blocks(given)
    f = basic_functions(given)["f"]
    size = Magnitude.of(given.n) * Magnitude.of(given.R) ** 2.0
    channels = Magnitude.of(float(given.p))
    xx = xx_logits.times(size * channels)
    xy = xy_logits.times(size * channels**0.5)
    yy = (f * f).times(size)
    whole = Term(max(xx.bound, yy.bound) + xy.bound, max(xx.lipschitz, yy.lipschitz) + xy.lipschitz)
    return HessianBounds(xx, xy, yy, whole)


def composed_ridge(given: Assumptions) -> Magnitude:
    """A ridge lambda_x = lambda_y that makes the Hessian positive on the region, in this manner.

    ||H_xx|| + ||H_xy|| from `hessian_bounds`: (lambda - ||H_xx||) lambda = ||H_xy|| lambda >=
    ||H_xy||^2, and H_yy >= 0.
    """
    bounds = hessian_bounds(given)
    return bounds.xx.bound + bounds.xy.bound


def lemma_9_1(R: float) -> Magnitude:
    """30 R^8, printed: the data part in the logits is at least -30 R^8 I.

    Any w^2 above it makes the regularised matrix between the A_j positive.
    """
    return Magnitude.of(30.0) * Magnitude.of(R) ** 8.0


def lemma_9_1_dominance(R: float) -> Magnitude:
    """100 x 30 R^8, printed: w^2 from which the regulariser dominates (Parts 4 and 6)."""
    return Magnitude.of(100.0) * lemma_9_1(R)


def lemma_10_1(curvature: float, sigma_min: float) -> Magnitude:
    """w^2 from which H_yy >= curvature I.

    The data part of H_yy is positive semidefinite and W^2 adds A3^T W^2 A3 >= w^2 sigma_min^2,
    w the smallest weight and sigma_min the smallest singular value of A3 (lower bound).
    """
    if not sigma_min > 0:
        return Magnitude(math.inf)
    return Magnitude.of(curvature) * Magnitude.of(sigma_min) ** -2.0


def lemma_6_1(alpha_1: float, alpha_2: float, mixed: float) -> float:
    """Lower bound of lambda_min(H) from H_xx >= alpha_1 I, H_yy >= alpha_2 I, ||H_xy||_2 <= mixed.

    The lowest eigenvalue of [[alpha_1, -mixed], [-mixed, alpha_2]], sharp, rounded down; positive
    exactly if alpha_1 > 0 and alpha_1 alpha_2 > mixed^2.
    """
    half = math.hypot((alpha_1 - alpha_2) / 2, mixed)
    return (alpha_1 + alpha_2) / 2 - half - 2**-48 * (abs(alpha_1) + abs(alpha_2) + mixed)
