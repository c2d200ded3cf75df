"""How far the data's Hessian is from what dominates it: the approximate Hessian of Section 9.

Write H = K + E with K = blockdiag(R_x, H_yy), R_x the token-weight regulariser's curvature on X and
H_yy the exact block of Y.  For one sequence R_x = R1 (x) R2; in whitened coordinates

    q_j = scale R1^(-1/2) a1_j,   a_k = R2^(-1/2) a2_k,   b_hk = (H_yy^(-1/2))_h^T a3_k

K is the identity, sigma_jk = q_j^T U_h a_k, and along a direction (U, Z) of norms u and z the form
of E is, with the attention weights P_hj, weights w_j, residuals C_j, t = sigma - E sigma,

    sum_j w_j ||J_j U||^2 + sum_hjk T_hjk t_hjk^2 + 2 sum_j w_j <J_j U, (J_y Z)_j>
        + 2 sum_hj w_j Cov_hj(<b_h, Z C_j>, sigma)        J_j U = sum_h Cov_hj(v_h, sigma_h).

`T` is the gradient in the logits, w_j P_jk <C_j, v_k - F_j>.  Every term is bounded by forms

    sum_jk M_jk (q_j^T U (a_k - mu_j))^2,   M >= 0,

which keep the direction of either factor (`spread`):

    at most ||sum_j (sum_k M_jk ||a_k - mu_j||^2) q_j q_j^T||_2 u^2,
    and     ||sum_jk M_jk ||q_j||^2 (a_k - mu_j)(a_k - mu_j)^T||_2 u^2.

1. gauss_newton: ||J_j U||^2 <= (sum_h Var_hj(v)) (sum_h Var_hj(sigma)), M = w_j (sum_h Var v) P.
2. positive, negative: M the positive or the negative part of T.
3. mixed: |Cov_j(<b, Z C_j>, sigma)| <= sd_j(<b, Z C_j>) sd_j(sigma) and Cauchy-Schwarz over rows,
   balanced by x_j^2 = Var_j(b) / Var_j(a): (sum w_j x_j Var_j(sigma))^(1/2) times
   (sum w_j Var_j(<b, Z C_j>) / x_j)^(1/2), both as in `spread`.

*Several sequences.*  R_x = sum_s R_s, and each sequence is whitened by its own term: its part is
bounded by f_s u_s^2 with u_s^2 = <U, R_s U>, and sum_s f_s u_s^2 <= max_s f_s u^2.  In the mixed
term f_s multiplies the sequence's form of Z before those are added.

*Heads* share R_x and do not mix in 2 and 3; the largest over heads counts.

Cost: O(n m d) for a sequence.  Rounding is not counted but for an allowance in the variances.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Spread(NamedTuple):
    """The two matrices of a form on X, for each head: direction of q kept, and of a."""

    left: Float[Tensor, "h r1 r1"]
    right: Float[Tensor, "h r2 r2"]

    def plus(self, other: Spread) -> Spread:
        """Those of both sets of rows."""
        return Spread(self.left + other.left, self.right + other.right)

    def bound(self) -> float:
        """Upper bound of the form over ||U||_F = 1: the lesser of the two, the largest head."""
        return max(0.0, float(torch.minimum(_top(self.left), _top(self.right)).max()))


class Forms(NamedTuple):
    """One sequence's forms: matrices that add up over its query rows.

    coupling: of item 3 on X.  outputs, values: the two of item 3 on Z.
    """

    gauss_newton: Spread
    positive: Spread
    negative: Spread
    coupling: Spread
    outputs: Float[Tensor, "p p"]
    values: Float[Tensor, "k k"]

    def plus(self, other: Forms) -> Forms:
        """Those of both sets of rows."""
        return Forms(
            self.gauss_newton.plus(other.gauss_newton),
            self.positive.plus(other.positive),
            self.negative.plus(other.negative),
            self.coupling.plus(other.coupling),
            self.outputs + other.outputs,
            self.values + other.values,
        )


class Dominance(NamedTuple):
    """Bounds of the parts of E in the norm of K.

    gauss_newton: of ||J_x||^2.  positive, negative: of the residual's part on X from above and
    below.  mixed: of the residual's part between X and Y.  output: of ||J_y||^2, at most 1.
    """

    gauss_newton: float
    positive: float
    negative: float
    mixed: float
    output: float

    def eigenvalues(self) -> tuple[float, float]:
        """Bounds of the smallest and the largest eigenvalue of E.

        From above the form is at most (gauss_newton + positive) u^2 + 2 c u z with
        c = sqrt(gauss_newton output) + mixed; from below at least -negative u^2 - 2 c u z.
        """
        c = math.sqrt(self.gauss_newton * self.output) + self.mixed
        high, low = self.gauss_newton + self.positive, self.negative
        return -(low / 2 + math.hypot(low / 2, c)), high / 2 + math.hypot(high / 2, c)


class Accuracy(NamedTuple):
    """lower H <= H~ <= upper H; upper is infinite where H is not proved positive."""

    lower: float
    upper: float

    @property
    def rate(self) -> float:
        """Bound of ||I - H~^-1 H|| in the norm of H: what a step leaves of the error in the end."""
        above = 1 - 1 / self.upper if self.upper > 0 else math.inf
        return max(1 / self.lower - 1, above) if self.lower > 0 else math.inf

    @property
    def epsilon(self) -> float:
        """The least e with (1 - e) H <= H~ <= (1 - e) / (1 - 2 e) H; below 1/2 steps contract.

        The proofs of `newtention.bounds.contraction` use no more of the paper's condition with
        1 + e on the right, which is never weaker: they need ||I - H~^-1 H|| <= e / (1 - e).
        """
        return self.rate / (1 + self.rate) if self.rate < math.inf else 1.0

    @property
    def two_sided(self) -> float:
        """The paper's: the least e with (1 - e) H <= H~ <= (1 + e) H."""
        return max(1 - self.lower, self.upper - 1)


def accuracy(dominance: Dominance, sketch: tuple[float, float] = (1.0, 1.0)) -> Accuracy:
    """Of H~ = blockdiag(R~_x, H_yy), R~_x between sketch[0] R_x and sketch[1] R_x.

    H lies between (1 + smallest) K and (1 + largest) K, E's eigenvalues, and H~ between
    min(1, sketch[0]) K and max(1, sketch[1]) K.
    """
    smallest, largest = dominance.eigenvalues()
    upper = max(1.0, sketch[1]) / (1 + smallest) if smallest > -1 else math.inf
    return Accuracy(min(1.0, sketch[0]) / (1 + largest), upper)


def tile_forms(
    P: Float[Tensor, "h n m"],
    T: Float[Tensor, "h n m"],
    v: Float[Tensor, "h m p"],
    C: Float[Tensor, "n p"],
    weight: Float[Tensor, " n"],
    q: Float[Tensor, "n r1"],
    a: Float[Tensor, "m r2"],
    b: Float[Tensor, "h m k"],
) -> Forms:
    """The forms of some query rows of a sequence.

    Args:
        P: attention weights.
        T: gradient in the logits, query weights included.
        v: values.
        C: residuals.
        weight: query weights.
        q: whitened queries, scale included.
        a: whitened keys.
        b: value tokens, whitened by each head's rows of H_yy^(-1/2).
    """
    keys = a.expand(len(P), *a.shape)
    mu, variance = _moments(P, keys)
    mean, deviation = _moments(P, b)
    channels = _moments(P, v)[1].sum(0)
    size = (variance * deviation).sqrt() * weight
    known = size > 0
    # w_j x_j and w_j / x_j
    to_keys = torch.where(known, size / variance.where(known, torch.ones_like(size)), 0.0)
    to_values = torch.where(known, size / deviation.where(known, torch.ones_like(size)), 0.0)
    lengths = C.square().sum(1)
    return Forms(
        spread((weight * channels)[:, None] * P, q, keys, mu),
        spread(T.clamp(min=0), q, keys, mu),
        spread((-T).clamp(min=0), q, keys, mu),
        spread(to_keys[..., None] * P, q, keys, mu),
        C.mT @ (size.sum(0)[:, None] * C),
        _scatter((to_values * lengths)[..., None] * P, b, mean).sum(0),
    )


def spread(
    M: Float[Tensor, "h n m"],
    q: Float[Tensor, "n r1"],
    a: Float[Tensor, "h m r2"],
    mu: Float[Tensor, "h n r2"],
) -> Spread:
    """The matrices of sum_jk M_jk (q_j^T U (a_k - mu_j))^2, M >= 0."""
    total = M.sum(-1)
    squares = (M @ a.square().sum(-1, keepdim=True))[..., 0]
    distance = squares - 2 * (mu * (M @ a)).sum(-1) + total * mu.square().sum(-1)
    left = q.mT @ (distance.clamp(min=0)[..., None] * q)
    return Spread(left, _scatter(q.square().sum(1)[:, None] * M, a, mu))


def combined(sequences: Iterable[Forms], output: float) -> Dominance:
    """All sequences together; output: bound of ||J_y||^2 in the norm of H_yy."""
    found = list(sequences)
    coupled = [(forms.coupling.bound(), forms) for forms in found]
    outputs = torch.stack([f * forms.outputs for f, forms in coupled]).sum(0)
    values = torch.stack([f * forms.values for f, forms in coupled]).sum(0)
    mixed = max(0.0, min(float(_top(outputs)), float(_top(values))))
    return Dominance(
        max(forms.gauss_newton.bound() for forms in found),
        max(forms.positive.bound() for forms in found),
        max(forms.negative.bound() for forms in found),
        math.sqrt(mixed),
        min(1.0, max(0.0, output)),
    )


def _moments(
    P: Float[Tensor, "h n m"], x: Float[Tensor, "h m k"]
) -> tuple[Float[Tensor, "h n k"], Float[Tensor, "h n"]]:
    """Mean and total variance of every row, the latter with an allowance for its rounding."""
    mean = P @ x
    square = (P @ x.square().sum(-1, keepdim=True))[..., 0]
    rounding = 16 * torch.finfo(P.dtype).eps * square
    return mean, (square - mean.square().sum(-1)).clamp(min=0) + rounding


def _scatter(
    M: Float[Tensor, "h n m"], a: Float[Tensor, "h m k"], mu: Float[Tensor, "h n k"]
) -> Float[Tensor, "h k k"]:
    """sum_jk M_jk (a_k - mu_j)(a_k - mu_j)^T."""
    cross = mu.mT @ (M @ a)
    return (
        a.mT @ (M.sum(-2)[..., None] * a) - cross - cross.mT + mu.mT @ (M.sum(-1)[..., None] * mu)
    )


def _top(S: Float[Tensor, "*h k k"]) -> Float[Tensor, "*h"]:
    """Largest eigenvalue; infinite where entries are not finite."""
    finite = torch.isfinite(S).flatten(-2).all(-1)
    safe = torch.where(finite[..., None, None], S, torch.zeros_like(S))
    if not S.shape[-1]:
        return S.new_zeros(S.shape[:-2])
    return torch.where(finite, torch.linalg.eigvalsh(safe)[..., -1], torch.inf)
