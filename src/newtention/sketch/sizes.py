"""How many rows a sketch needs: proved sizes.

U = U1 (x) U2 is an orthonormal basis of the column space of A1 (x) A2, D = d1 d2 its rank.  S is a
(1 +- epsilon) subspace embedding when all eigenvalues of (S U)^T S U lie in [1 - epsilon,
1 + epsilon].  Every function returns rows with which that fails with probability at most delta.
Proofs: docs/sketches.md.

The tools, for independent symmetric X_r (D x D):

chernoff   X_r >= 0, lambda_max(X_r) <= L / size, sum of means I: failure at most
           2 D exp(-size psi(epsilon) / L), psi(e) = (1 + e) ln(1 + e) - e
           (Tropp, "User-friendly tail bounds for sums of random matrices", Found. Comput. Math. 12
           (2012), Theorem 1.1; the lower tail has the larger exponent psi(-e)).
bernstein  X_r of mean 0, ||X_r|| <= R / size, ||sum of E X_r^2|| <= v / size: failure at most
           2 D exp(-size epsilon^2 / (2 v + 2 R epsilon / 3)) (the same, Theorem 1.4).
quadratic  random signs s: ||M s||^2 <= ||M||_F^2 + 2 sqrt(t) ||M^T M||_F + 2 t ||M^T M||_2 but with
           probability e^-t (Hsu, Kakade, Zhang, Electron. Commun. Probab. 17 (2012), Theorem 2.1).
markov     E ||(S U)^T S U - I||_F^2 <= c / size: failure at most c / (size epsilon^2).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from newtention.inputs import require_count
from newtention.notation import ArrayLike
from newtention.sketch.arguments import require_fraction
from newtention.sketch.base import Distribution
from newtention.sketch.hadamard import padded
from newtention.sketch.kinds import find_kind
from newtention.sketch.leverage import orthonormal_bases
from newtention.sketch.tensor_srht import TensorSRHT


def size_for(
    kind: str | type[Distribution],
    epsilon: float,
    delta: float,
    *,
    d1: int,
    d2: int = 1,
    n1: int | None = None,
    n2: int = 1,
) -> int:
    """Rows with which a sketch is a (1 +- epsilon) embedding but with probability delta.

    They often exceed n1 n2 on small problems, where a sketch of this proved quality does not
    compress; `calibrate` measures what the data at hand need.

    Args:
        kind: class or name.
        epsilon: distortion of the Gram matrix, between 0 and 1.
        delta: probability of failure, between 0 and 1.
        d1: rank of A1 (its width is an upper bound).
        d2: rank of A2.
        n1: rows of A1; only the SRHT kinds depend on it.
        n2: rows of A2.

    Returns:
        Rows, at least 1.

    Raises:
        TypeError, ValueError: an argument is missing or out of range.
    """
    formula = _FORMULAS[find_kind(kind).name]
    require_fraction("epsilon", epsilon)
    require_fraction("delta", delta)
    d1, d2 = require_count("d1", d1, 1), require_count("d2", d2, 1)
    if formula in (srht, tensor_srht):
        if n1 is None:
            raise TypeError(f"n1 is missing: a size for {find_kind(kind).name} depends on it.")
        N1, N2 = require_count("n1", n1, 1), require_count("n2", n2, 1)
    else:
        N1 = N2 = 1
    return max(1, math.ceil(formula(epsilon, delta, d1, d2, N1, N2)))


def size_after_transform(
    A1: ArrayLike, A2: ArrayLike, epsilon: float, delta: float, seed: int = 0
) -> int:
    """Rows of a TensorSRHT that suffice given its signs, those of `TensorSRHT(..., seed=seed)`.

    Z_i = H D_i U_i has Z_i^T Z_i = N_i I.  With L_i = max ||z||^2 and v_i = lambda_max(mean of
    ||z||^2 z z^T) over its rows z, X = z1 z1^T (x) z2 z2^T - I has mean 0, ||X|| <=
    max(L1 L2 - 1, 1) and ||E X^2|| = v1 v2 - 1: bernstein, or chernoff with L = L1 L2.  The signs
    do not depend on the size, so that it may be chosen after them.

    Args:
        A1: (n1, d1).
        A2: (n2, d2).
        epsilon: distortion of the Gram matrix, between 0 and 1.
        delta: probability of failure, between 0 and 1.
        seed: of the signs.

    Returns:
        Rows, at least 1.

    Raises:
        TypeError, ValueError: as in `size_for`; a factor is not a finite real matrix, or zero.
    """
    require_fraction("epsilon", epsilon)
    require_fraction("delta", delta)
    bases = orthonormal_bases({"A1": (A1, None), "A2": (A2, None)})
    L, v = 1.0, 1.0
    signs = TensorSRHT(len(bases[0]), len(bases[1]), 1, seed).sample()
    for Z in signs.transformed(*bases):
        norms = Z.square().sum(1)
        fourth = (Z * norms[:, None]).mT @ Z / len(Z)
        L *= float(norms.max())
        v *= _largest_eigenvalue(fourth)
    D = bases[0].shape[1] * bases[1].shape[1]
    rows = min(
        _bernstein(epsilon, delta, D, v - 1.0, max(L - 1.0, 1.0)), _chernoff(epsilon, delta, D, L)
    )
    return max(1, math.ceil(rows))


def leverage(e: float, delta: float, d1: int, d2: int, n1: int, n2: int) -> float:
    """X_r = (D / size) w w^T with unit vectors w of mean w w^T = I / D.

    chernoff with L = D; bernstein for X_r - I / size with R = D - 1 (1 below) and v = D - 1.  A
    single column is embedded exactly by any row.
    """
    D = d1 * d2
    if D == 1:
        return 1.0
    return min(_bernstein(e, delta, D, D - 1.0, D - 1.0), _chernoff(e, delta, D, float(D)))


def gaussian(e: float, delta: float, d1: int, d2: int, n1: int, n2: int) -> float:
    """S U is Gaussian, size x D: its singular values lie within 1 +- (sqrt D + t) / sqrt(size).

    But with probability 2 exp(-t^2 / 2) (Davidson, Szarek, "Local operator theory, random matrices
    and Banach spaces", 2001, Theorem II.13).  1 + x <= sqrt(1 + e) implies 1 - x >= sqrt(1 - e).
    """
    t = math.sqrt(2 * math.log(2 / delta))
    return ((math.sqrt(d1 * d2) + t) / (math.sqrt(1 + e) - 1)) ** 2


def srht(e: float, delta: float, d1: int, d2: int, n1: int, n2: int) -> float:
    """Rows of H D U are M s for random signs s, with M^T M a projector of rank D.

    All N rows satisfy ||z||^2 <= L = D + 2 sqrt(D t) + 2 t, t = ln(2 N / delta), but with
    probability delta / 2 (quadratic); then chernoff.  Tropp 2011, Lemma 3.3, has
    L = (sqrt D + sqrt(8 t))^2, which is larger.
    """
    D, N = d1 * d2, padded(n1 * n2)
    return _chernoff(e, delta / 2, D, _row_norm(D, math.log(2 * N / delta)))


def tensor_srht(e: float, delta: float, d1: int, d2: int, n1: int, n2: int) -> float:
    """As for the SRHT, factor by factor: rows of S are products, so that L = L1 L2.

    t_i = ln(4 N_i / delta), each with probability delta / 4.  For Kronecker factors only; for
    arbitrary vectors Ahle et al., SODA 2020, have the order of the size.
    """
    norms = [_row_norm(d, math.log(4 * padded(n) / delta)) for d, n in ((d1, n1), (d2, n2))]
    return _chernoff(e, delta / 2, d1 * d2, norms[0] * norms[1])


def countsketch(e: float, delta: float, d1: int, d2: int, n1: int, n2: int) -> float:
    """Markov with c = D^2 + D: two rows meet with probability 1 / size.

    Nelson, Nguyen, FOCS 2013; Meng, Mahoney, STOC 2013.
    """
    D = d1 * d2
    return (D * D + D) / (e * e * delta)


def tensor_sketch(e: float, delta: float, d1: int, d2: int, n1: int, n2: int) -> float:
    """Markov with c = D^2 + D (d1 + d2) + 3 D + 2 D (d1 + d2) / size.

    (S^T S - I) has the parts of pairs that differ in j, in k and in both; their signs are
    uncorrelated.  Avron, Nguyen, Woodruff, NeurIPS 2014, have c = 11 D^2, which is larger.
    """
    D = d1 * d2
    a = (D * D + D * (d1 + d2) + 3 * D) / (e * e * delta)
    b = 2 * D * (d1 + d2) / (e * e * delta)
    return (a + math.sqrt(a * a + 4 * b)) / 2


_FORMULAS: dict[str, Callable[[float, float, int, int, int, int], float]] = {
    "leverage": leverage,
    "gaussian": gaussian,
    "srht": srht,
    "tensor-srht": tensor_srht,
    "countsketch": countsketch,
    "tensor-sketch": tensor_sketch,
}


def _chernoff(e: float, delta: float, D: int, L: float) -> float:
    return L * math.log(2 * D / delta) / ((1 + e) * math.log1p(e) - e)


def _bernstein(e: float, delta: float, D: int, v: float, R: float) -> float:
    return (2 * v + 2 * R * e / 3) * math.log(2 * D / delta) / (e * e)


def _row_norm(D: int, t: float) -> float:
    return D + 2 * math.sqrt(D * t) + 2 * t


def _largest_eigenvalue(M: Tensor) -> float:
    return float(torch.linalg.eigvalsh(M)[-1])
