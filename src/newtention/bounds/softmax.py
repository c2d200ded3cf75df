"""Lipschitz constants of the Hessian of softmax regression on a ball of radius delta about x0.

f = softmax(A x), r = f - b.  Along a unit direction, sigma = A u, the derivatives of f are the
cumulants of `newtention.bounds.cumulants` with the unit vectors as values:

    f' = f o t,   f'' = f o (t^2 - s),   f''' = f o (t^3 - 3 s t - k),     t = sigma - E sigma

under f, s = E t^2 and k = E t^3, and the loss has L''' = 3 <r', r''> + <r, r'''>.  Let rho be the
radius of A's rows, so that |sigma - c| <= rho about some c.  Two bounds of the norms:

- unit vectors lie within sqrt((n - 1) / n) of their mean: with the constants SECOND and THIRD

      |f'| <= nu rho,   |f''| <= SECOND nu rho^2,   |f'''| <= THIRD nu rho^3,   nu^2 = (n - 1) / n;

- |t| <= 2 rho and, for mu = |E sigma - c| / rho, |t| <= (1 + mu) rho and s <= (1 - mu^2) rho^2, so
  |t^2 - s| <= (1 + mu)^2 rho^2 <= 4 rho^2, and |t^3 - 3 s t - k| <= 8 rho^3, because it is at most
  (1 + mu) max(3 (1 - mu^2), (1 + mu)^2) + (1 + mu)^2 (1 - mu) in units of rho^3, which is largest,
  8, at mu = 1.  Hence

      |f'| <= 2 N rho,   |f''| <= 4 N rho^2,   |f'''| <= 8 N rho^3,   N >= ||f|| on the ball.

  Within delta every logit moves by at most rho delta about a common value, and every weight by a
  factor of at most exp(2 rho delta): N = min(1, exp(2 rho delta) ||f(x0)||).

The second is the better one where the weights spread over many rows, ||f|| being about n^(-1/2).

Rescaled: r = (I - b 1^T) u(A x), with u and its derivatives at most exp(|z|) in size (exp(z) for
exp), and ||I - b 1^T|| <= 1 + sqrt(n) ||b||.  So the i-th derivative of r is at most

    e_i = (1 + sqrt(n) ||b||) || exp(z_k + delta ||a_k||) ||a_k||^i ||_k     on the ball.

In both cases M = 3 e1 e2 + (||r(x0)|| + delta e1) e3.  A ridge changes nothing.
Arguments are upper bounds and results are rounded up.  Source: derived here; proofs in
docs/softmax-regression.md.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.bounds.cumulants import SECOND, THIRD
from newtention.bounds.rounding import UNIT, norm_upper, upward

SPREAD = (2.0, 4.0, 8.0)
"""Bounds of |t|, |t^2 - s| and |t^3 - 3 s t - k| for |sigma - c| <= 1."""


def softmax_lipschitz(
    radius: float, weights_norm: float, residual_norm: float, rows: int, delta: float
) -> float:
    """M of plain softmax regression.

    Args:
        radius: of A's rows about any centre.
        weights_norm: ||f(x0)||.
        residual_norm: ||f(x0) - b||.
        rows: n.
        delta: radius of the ball.
    """
    exponent = upward(2.0 * radius * delta, 4)
    growth = math.exp(exponent) if exponent < 700.0 else math.inf
    N = min(1.0, upward(growth * weights_norm, 4)) if weights_norm > 0.0 else 0.0
    nu = upward(math.sqrt((rows - 1) / rows), 4)
    simplex = (nu, SECOND * nu, THIRD * nu)
    e1, e2, e3 = (
        min(a, b * N) * radius**i
        for i, (a, b) in enumerate(zip(simplex, SPREAD, strict=True), start=1)
    )
    return _third(e1, e2, e3, residual_norm, delta)


def rescaled_lipschitz(
    exponents: Float[Tensor, " n"],
    norms: Float[Tensor, " n"],
    target_norm: float,
    residual_norm: float,
    delta: float,
) -> float:
    """M of rescaled softmax regression, in units of exp(2 shift) for any shift.

    Args:
        exponents: z_k - shift (exp) or |z_k| - shift, z = A x0.
        norms: ||a_k||.
        target_norm: ||b||.
        residual_norm: ||r(x0)|| exp(-shift).
        delta: radius of the ball.
    """
    n = len(norms)
    # exp and the few products: eight units of rounding each, and those of their arguments.
    moved = exponents + delta * norms
    size = upward(moved.exp(), 64) * (1.0 + 8.0 * UNIT * (exponents.abs() + delta * norms))
    spread = upward(1.0 + math.sqrt(n) * target_norm, 8)
    e1, e2, e3 = (
        spread * norm_upper(upward(torch.where(norms > 0, size * norms**i, 0.0), 8))
        for i in (1, 2, 3)
    )
    return _third(e1, e2, e3, residual_norm, delta)


def _third(e1: float, e2: float, e3: float, residual: float, delta: float) -> float:
    value = upward(3.0 * e1 * e2 + (residual + delta * e1) * e3, 40)
    return math.inf if math.isnan(value) else value
