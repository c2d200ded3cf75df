"""Global minimum: a regulariser strong enough leaves exactly one stationary point.

The loss, h heads sharing tokens, query weights q_j, X and Y stacked over heads:

    L(X, Y) = 1/2 sum_j q_j ||F_j - B_j||^2 + quadratic,  F_j = sum_h Y_h^T w_hj,  w_hj = A3^T P_hj

and along (U, Z), under the attention weights of row j (Cov and E over keys, t = sigma - E sigma)

    L'' = sum_j q_j (||F_j'||^2 + <C_j, F_j''>) + quadratic''
    F_j'' = sum_h E[(v - F_hj) t^2] + 2 Cov(Z_h^T a3, sigma),   sigma_k = scale a1_j^T U_h a2_k.

Write r_j = |scale| rho2_j a1_j, with rho2_j half the largest distance between two of row j's
allowed keys and rho3_j the same of its value tokens (the radius about any centre is never less and
may stand for it).  Only scalars occur: sigma varies over an interval of half-length
rho2_j ||scale U_h^T a1_j|| = ||U_h^T r_j||, so E|t| <= ||U_h^T r_j|| and E|t^2 - E t^2| <=
K ||U_h^T r_j||^2, K = 4/(3 sqrt 3), both sharp on two points.  <a3, Y_h C_j> varies over one of
half-length rho3_j ||Y_h C_j||, and a covariance with it may be taken about the interval's centre:

    |<C_j, F_j''>| <= rho3_j sum_h (K ||Y_h C_j|| ||U_h^T r_j||^2 + 2 ||Z_h C_j|| ||U_h^T r_j||).

Summed over j with the weights, by Cauchy-Schwarz and ||Z_h C^T||_F <= ||C||_2 ||Z_h||_F,

    L'' >= (lambda_x - a) u^2 - 2 b u z + lambda_y z^2,   u = ||U||_F, z = ||Z||_F,
    a = K R || sum_j q_j c_j rho3_j r_j r_j^T ||_2,     c_j >= ||C_j||,   R >= ||Y||_2 (stacked),
    b = || diag(sqrt(q_j) rho3_j) (r_j) ||_2 c,         c >= || diag(sqrt q) C ||_2.

The spectral norms are what the sums over rows of norms become when the direction is kept: about
sqrt(d1 p) smaller in b and d1 smaller in a than sum_j ||r_j|| ||C_j||.

*Coordinates.*  Nothing above needs the given ones.  With X = T1 X~ T2, Y = T3 Y~ the tokens become
A1 T1, A2 T2^T, A3 T3, and T = (regulariser)^(-1/2) makes lambda_x = lambda_y = 1: for a single
Kronecker term that is much sharper than lambda_x = lambda_min(L) lambda_min(R).  Distances are then
those of the regulariser's own norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from jaxtyping import Float
from torch import Tensor

from newtention.bounds.balls import norms_upper
from newtention.bounds.cumulants import SECOND
from newtention.bounds.rounding import UNIT, largest_eigenvalue_upper

Where = Literal["ball", "best response"]


class GlobalSizes(NamedTuple):
    """What the theorem needs of the data; every entry an upper bound.

    targets: ||diag(sqrt q) B||_2.
    values: largest ||diag(sqrt q) (w_1 ... w_h)||_2 over all X.
    mixed: ||diag(sqrt(q) rho3) r||_2, r the rows r_j.
    cubic: ||sum_j q_j ||B_j|| rho3_j r_j r_j^T||_2.
    cubic_values: ||sum_j q_j sqrt(h) m3_j rho3_j r_j r_j^T||_2.
    cubic_uniform: ||sum_j sqrt(q_j) rho3_j r_j r_j^T||_2.
    """

    targets: float
    values: float
    mixed: float
    cubic: float
    cubic_values: float
    cubic_uniform: float


class Convexity(NamedTuple):
    """The 2 x 2 condition: L'' >= (lambda_x - a) u^2 - 2 b u z + lambda_y z^2.

    where: "ball" when that holds for every X and every ||Y||_2 <= radius; "best response" when it
        holds for every X at the Y that is best for it.
    radius: bound of ||Y||_2.  residual: bound of ||diag(sqrt q) C||_2 there.
    mu: lower bound of the 2 x 2 matrix's lowest eigenvalue; positive: a single stationary point.
    schur: lower bound of (lambda_x - a) - b^2 / lambda_y, the curvature of X -> min_Y L(X, Y).
    """

    where: Where
    mu: float
    schur: float
    radius: float
    residual: float
    a: float
    b: float
    lambda_x: float
    lambda_y: float


def global_sizes(
    rows: Float[Tensor, "n d1"],
    rho3: Float[Tensor, " n"],
    m3: Float[Tensor, " n"],
    weight: Float[Tensor, " n"],
    B: Float[Tensor, "n p"],
    heads: int = 1,
) -> GlobalSizes:
    """The sizes from per-row quantities of all real query rows of all sequences, in float64.

    Args:
        rows: r_j = |scale| rho2_j a1_j, rho2 as in the module's text.  Their norms alone, as
            (n, 1), are allowed and weaker.
        rho3: half the largest distance between two of the row's allowed value tokens, or a radius.
        m3: largest norm of them.
        weight: query weights.
        B: targets.
        heads: number of heads.

    `values`: w_hj lies in the hull of the row's value tokens, so ||sum_h z_h . w_hj|| <=
    sqrt(h) m3_j ||z||, whence h sum_j q_j m3_j^2: attained in the limit when every row may attend
    to one token that is the longest of all.
    """
    root, target = weight.sqrt(), norms_upper(B)
    return GlobalSizes(
        math.sqrt(weighted_norm_squared(root, B)),
        math.sqrt(heads * weighted_norm_squared(root, m3[:, None])),
        math.sqrt(weighted_norm_squared(root * rho3, rows)),
        weighted_norm_squared((weight * target * rho3).sqrt(), rows),
        math.sqrt(heads) * weighted_norm_squared((weight * m3 * rho3).sqrt(), rows),
        weighted_norm_squared((root * rho3).sqrt(), rows),
    )


def weighted_norm_squared(factor: Float[Tensor, " n"], M: Float[Tensor, "n d"]) -> float:
    """Upper bound of ||diag(factor) M||_2^2.

    The entries carry a few roundings each and the product n more; |M|^T |M| has at most the trace
    as its norm.
    """
    M = factor[:, None] * M
    trace = float(M.square().sum())
    if not math.isfinite(trace):
        return math.inf
    rounding = 1.01 * (len(M) + 64) * UNIT * trace
    return max(0.0, largest_eigenvalue_upper(M.T @ M, rounding))


def output_radius(targets: float, values: float, lambda_y: float, centre: float = 0.0) -> float:
    """R: every point stationary in Y has ||Y||_2 <= R (heads stacked).  Infinite if lambda_y <= 0.

    Args:
        targets: upper bound of ||diag(sqrt q) B||_2.
        values: upper bound of ||diag(sqrt q) W||_2, W = (w_1 ... w_h), at the points in question.
        lambda_y: lower bound of the lowest eigenvalue of the regulariser's Gram matrix G on Y.
        centre: upper bound of ||G^(1/2) Y0||_2, Y0 the regulariser's centre.

    R = (centre + targets t / (1 + t^2)) / sqrt(lambda_y), t = min(1, values / sqrt(lambda_y)); so
    never more than targets / (2 sqrt(lambda_y)) without a centre.

    Proof.  Let q = 1 (else rows times sqrt q) and N = W G^(-1/2).  Stationarity is
    (W^T W + G) Y = W^T B + G Y0, or G^(1/2) Y = (N^T N + I)^-1 (N^T B + G^(1/2) Y0).  The first
    factor has norm at most 1, its product with N^T has singular values s / (1 + s^2) with
    s <= values / sqrt(lambda_y), which increase up to s = 1 and are at most 1/2.  Attained: one
    key, n equal targets, lambda_y = n ||a3||^2.
    """
    if not lambda_y > 0:
        return math.inf
    root = math.sqrt(lambda_y)
    return (centre + targets * _ridge_gain(values / root)) / root


def residual_radius(targets: float, values: float, lambda_y: float, centre: float = 0.0) -> float:
    """Upper bound of ||diag(sqrt q) C||_2 at points stationary in Y; arguments as before.

    C = W Y - B = -(I - N (N^T N + I)^-1 N^T) B + N (N^T N + I)^-1 G^(1/2) Y0 in the notation of
    `output_radius`; the first bracket lies between 0 and I.  Without a centre the residual is never
    larger than the targets: one needs no radius for it.
    """
    if not lambda_y > 0:
        return math.inf if centre else targets
    return targets + centre * _ridge_gain(values / math.sqrt(lambda_y))


def _ridge_gain(t: float) -> float:
    """Largest s / (1 + s^2) over s <= t."""
    return t / (1 + t * t) if t < 1 else 0.5


def kronecker_curvature(left: Iterable[float], right: Iterable[float]) -> float:
    """Lower bound of lambda_min(sum_t L_t (x) R_t), all positive semidefinite.

    left, right: lower bounds of lambda_min(L_t) and lambda_min(R_t); negative ones count as 0.
    The eigenvalues of L (x) R are the products, and lowest eigenvalues add up to at most that of
    the sum.  TokenWeights: s_min(A1)^2 s_min(W A2)^2 summed over sequences.
    """
    pairs = zip(left, right, strict=True)
    return sum((max(0.0, x) * max(0.0, y) for x, y in pairs), 0.0) * (1 - 2**-40)


def convexity(
    sizes: GlobalSizes,
    lambda_x: float,
    lambda_y: float,
    centre: float = 0.0,
    where: Where = "ball",
    radius: float = 0.0,
) -> Convexity:
    """The 2 x 2 condition under a regulariser of curvature lambda_x on X and lambda_y on Y.

    Args:
        sizes: of the data.
        lambda_x: lower bound of the regulariser's lowest eigenvalue on X.
        lambda_y: the same on Y.
        centre: upper bound of ||G^(1/2) Y0||_2, see `output_radius`.
        where: "ball" or "best response"; the second is tighter.
        radius: for "ball": at least this radius, so that a given point lies inside.

    *Ball.*  For every X and ||Y||_2 <= R: ||F_j|| <= sqrt(h) m3_j R and ||diag(sqrt q) F||_2 <=
    values R, hence c_j = ||B_j|| + sqrt(h) m3_j R (or, as a row is no longer than the spectral
    norm, sqrt(q_j) c_j = c) and c = targets + values R in the module's a and b.  If mu > 0 the loss
    is mu-strongly convex on this convex set.  Every stationary point lies in it (`output_radius`)
    and a minimiser exists, as the loss is coercive: exactly one stationary point in the whole
    space, the global minimum.

    *Best response.*  phi(X) = min_Y L(X, Y) is attained at a single Y(X), smooth in X, and
    phi'' = H_xx - H_xy H_yy^-1 H_yx at (X, Y(X)): the least over Z of the quadratic form.  So only
    the points (X, Y(X)) count, whose residual is at most `residual_radius`, without values R.  The
    2 x 2 form gives phi'' >= schur for every X; schur > 0 (equivalent to mu > 0) makes phi
    strongly convex on the whole space.  The stationary points of L are the (X, Y(X)) with
    grad phi(X) = 0: exactly one.
    """
    R = output_radius(sizes.targets, sizes.values, lambda_y, centre)
    if where == "ball":
        R = max(R, radius)
    reach = sizes.targets + sizes.values * R
    residual = reach
    if where == "best response":
        residual = min(reach, residual_radius(sizes.targets, sizes.values, lambda_y, centre))
    by_rows = sizes.cubic + sizes.cubic_values * R
    a = SECOND * R * min(by_rows, residual * sizes.cubic_uniform)
    b = sizes.mixed * residual
    if not (lambda_y > 0 and math.isfinite(a) and math.isfinite(b)):
        return Convexity(where, -math.inf, -math.inf, R, residual, a, b, lambda_x, lambda_y)
    # a and b carry fewer than 20 relative roundings, the last lines of arithmetic a few more.
    slack = 64 * UNIT
    p, q = lambda_x - a, lambda_y
    mu = (p + q) / 2 - math.hypot((p - q) / 2, b) - slack * (abs(lambda_x) + a + q + b)
    turned = b * (b / q)
    schur = p - turned - slack * (abs(lambda_x) + a + turned)
    return Convexity(where, mu, schur, R, residual, a, b, lambda_x, lambda_y)


def distance_in_ball(certificate: Convexity, gradient: float) -> float:
    """Upper bound of the distance to the minimum from a point with ||Y||_2 <= radius.

    gradient: upper bound of the gradient's Euclidean norm there.  Infinite unless mu > 0 was proved
    on a ball.  From mu ||e||^2 <= <g(x) - g(x*), e> <= ||g|| ||e||.
    """
    if certificate.where != "ball" or not certificate.mu > 0:
        return math.inf
    return gradient / certificate.mu


def loss_gap(certificate: Convexity, gradient: float) -> float:
    """Upper bound of L - min L at a point with ||Y||_2 <= radius: ||g||^2 / (2 mu)."""
    return gradient * distance_in_ball(certificate, gradient) / 2


def distance_from_best_response(
    sizes: GlobalSizes, certificate: Convexity, gradient_x: float, gradient_y: float, norm_y: float
) -> tuple[float, float]:
    """Upper bounds of ||X - X*||_F and ||Y - Y*||_F from any point (X, Y).

    Args:
        sizes: of the data.
        certificate: of `convexity`, either kind.
        gradient_x: upper bound of ||L_X(X, Y)||_F.
        gradient_y: upper bound of ||L_Y(X, Y)||_F.
        norm_y: upper bound of ||Y||_2.

    Proof.  L is quadratic in Y with curvature at least lambda_y, so e = ||Y - Y(X)||_F <=
    gradient_y / lambda_y.  The mixed block is at most mixed (c + values R'), c the residual's norm
    and R' that of Y: the module's b, and <Cov(v, sigma), Z^T w> in the Gauss-Newton part.  On the
    segment from Y to Y(X), R' = max(norm_y, radius) and c = targets + values R', so
    ||grad phi(X)|| <= gradient_x + K e with K = mixed (targets + 2 values R').  Strong convexity of
    phi gives ||X - X*|| <= ||grad phi(X)|| / schur.  Finally Y(X)' = -H_yy^-1 H_yx has norm at most
    mixed (residual + values radius) / lambda_y.
    """
    if not certificate.schur > 0:
        return math.inf, math.inf
    reach = max(norm_y, certificate.radius)
    coupling = sizes.mixed * (sizes.targets + 2 * sizes.values * reach)
    e = gradient_y / certificate.lambda_y
    x = (gradient_x + coupling * e) / certificate.schur
    response = sizes.mixed * (certificate.residual + sizes.values * certificate.radius)
    return x, e + response / certificate.lambda_y * x


def certifying_ridge(
    sizes: GlobalSizes,
    lambda_x: float = 1.0,
    lambda_y: float = 1.0,
    centre: float = 0.0,
    where: Where = "best response",
) -> float:
    """A multiple r of the regulariser with mu > 0, within 1e-9 of the smallest; infinite if none.

    With the defaults r is the ridge itself, lambda_x = lambda_y = r; with (1, ratio) the ridge on
    X; with the present regulariser's numbers the multiple of it.  centre: ||G^(1/2) Y0||_2 of the
    regulariser as given (r times it has sqrt(r) times that).

    Every larger multiple certifies as well: mu > 0 is 1 - a / (r lambda_x) > b^2 / (r^2 lambda_x
    lambda_y), and a / r and b / r decrease in r.
    """
    if not (lambda_x > 0 and lambda_y > 0):
        return math.inf

    def certifies(r: float) -> bool:
        found = convexity(sizes, r * lambda_x, r * lambda_y, math.sqrt(r) * centre, where)
        return found.mu > 0

    low, high = 1.0, 1.0
    while not certifies(high):
        low, high = high, 4 * high
        if high > 1e300:
            return math.inf
    while low > 1e-300 and certifies(low):
        low, high = low / 4, low
    while high > low * (1 + 1e-9):
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = (low, middle) if certifies(middle) else (middle, high)
    return high
