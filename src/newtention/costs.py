"""What the methods cost: work predicted from sizes, before anything is computed.

Work is counted in multiply-adds of a matrix product.  A pass over the pairs of queries and keys
also exponentiates, multiplies and sums elementwise, which costs as much as some hundred
multiply-adds for each pair, whatever the width; the constants below were fitted to measured times
(`python -m benchmarks --only methods` prints predicted and measured ones side by side).
"""

from __future__ import annotations

from dataclasses import dataclass

from newtention.layers import AttentionMap, Bilinear, Parametrisation
from newtention.newton.sampled import default_rows
from newtention.problem import AttentionProblem
from newtention.sampling import WHOLE

EVALUATION, GRADIENT, GAUSS_NEWTON, FULL, HESSIAN = 120.0, 230.0, 370.0, 800.0, 400.0
"""Elementwise work for each pair and head of: attention weights; the backward pass; a projected
Gauss-Newton product; one of the full Hessian; the dense Hessian."""
FACTORISATIONS = 3
"""Cholesky factors of an iteration of "newton"."""
FULL_PRODUCTS, GAUSS_NEWTON_PRODUCTS = 5, 8
"""Products of an iteration of "sketched" and "newton-cg"."""
SKETCHED_ITERATIONS, CG_ITERATIONS = 1.4, 20.0
"""Iterations of these methods for each of "newton": the one of "sketched" from good starts, which
also suits the packaged head (docs/choices.md); the one of "newton-cg" from random starts (from good
ones it is 3)."""
SINGLE = 0.5
"""float32 work relative to that of float64."""


@dataclass(frozen=True)
class Work:
    """Multiply-adds of what the methods are made of, for one start of every problem.

    start: evaluations and gradient.  gauss_newton, full: one product with the curvature, the output
    map eliminated.  hessian: the exact Hessian, formed.  reduction: eliminating the output map from
    it.  factor: one Cholesky factor.
    """

    start: float
    gauss_newton: float
    full: float
    hessian: float
    reduction: float
    factor: float

    @property
    def newton(self) -> float:
        """An iteration of the dense method."""
        return self.start + self.hessian + self.reduction + FACTORISATIONS * self.factor

    def sketched(self, share: float) -> float:
        """What "sketched" does, with this share of the rows, for an iteration of "newton"."""
        products = self.sketched_overhead(share) + FULL_PRODUCTS
        return SKETCHED_ITERATIONS * products * self.full

    def sketched_overhead(self, share: float) -> float:
        """An iteration of "sketched" without its products, in products with the full Hessian."""
        matrix = SINGLE * (share * self.hessian + self.reduction + self.factor)
        return (self.start + matrix) / self.full

    @property
    def newton_cg(self) -> float:
        """What "newton-cg" does for an iteration of "newton"."""
        return CG_ITERATIONS * (self.start + GAUSS_NEWTON_PRODUCTS * self.gauss_newton)


def work(problem: AttentionProblem, layer: Parametrisation, cached: bool) -> Work:
    """The work on a problem.

    cached: evaluations are kept between products, rather than computed again for each.
    """
    pairs, rows, keys = _counts(problem)
    h, (d1, d2, d3, p) = layer.heads, problem.widths
    values = p if isinstance(layer, Bilinear) else 0
    tokens = rows * d1 * d2 + keys * d3 * p
    evaluation = h * (pairs * (EVALUATION + d2 + values) + tokens)
    again = 0.0 if cached else evaluation
    backward = h * (pairs * (GRADIENT + d2 + 2 * values) + tokens)
    gauss_newton = again + h * (pairs * (GAUSS_NEWTON + 2 * d2 + 3 * values) + 2 * tokens)
    full = 2 * again + h * (pairs * (FULL + 4 * d2 + 5 * values) + 4 * tokens)
    start = evaluation + backward
    if isinstance(layer, AttentionMap):
        nx, ny = layer.size, 0
        hessian = pairs * (HESSIAN + d2 * (d2 + 1) / 2) + rows * (nx / 2) ** 2
    else:
        nx, ny = h * d1 * d2, h * d3 * p
        features = d2 * p + d2 * (d2 + 1) / 2 + d2 * d3
        hessian = h * pairs * (HESSIAN + features) + rows * (nx * nx / 4 + 2 * nx * ny)
    factor = nx**3 / 6
    return Work(start, gauss_newton, full, hessian, float(nx) * nx * ny, factor)


def sample_share(problem: AttentionProblem, layer: Bilinear, rows: int | None) -> float:
    """Share of the rows that "sketched" takes."""
    wanted = default_rows(layer) if rows is None else rows
    share = wanted * problem.batch / _counts(problem)[1]
    return share if share < WHOLE else 1.0


def _counts(problem: AttentionProblem) -> tuple[float, float, float]:
    """Pairs, query rows and key rows, padding included."""
    pairs = rows = keys = 0.0
    for chunk in problem.chunks:
        o, s, n = chunk.weight.shape
        m = chunk.A2.shape[2]
        pairs, rows, keys = pairs + o * s * n * m, rows + o * s * n, keys + o * s * m
    return pairs, rows, keys
