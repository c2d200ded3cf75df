"""The third derivative of the data loss at a point, exactly, and its unfolding norm.

T, the symmetric N x N x N tensor of third derivatives of the data loss, is never held: its slices
T d are the derivatives of the exact Hessian along directions d, a few at a time.  With the row
cumulants of `newtention.bounds.cumulants`, a direction (U, Z) and e_j = U^T a_j,

    Q' = K3 e,   w' = Q^T e,   Rho' = K e + Q Z,   r' = sum over heads of Rho^T e + Z^T w
    M' = Rho' Rho^T + Rho Rho'^T + sum_i r'_i K_i + K4 e + sum_e (Z r)_e K3_e
    H_xx' = sum_j q_j a_j a_j^T (x) M'_j
    H_xy' = sum_j q_j a_j (x) (Rho' (x) w + Rho (x) w' + r' (x) Q + r (x) Q')
    H_yy' = sum_j q_j (w' w^T + w w'^T) (x) I_p

which is the product rule applied to the two-product form of the Hessian.  Between two heads only
the terms with two Rho or w remain.

The spectral norm of T as a trilinear form is the largest value of T(d, d, d) over unit d (a
symmetric form attains its norm on the diagonal), and at most that of the unfolding, N x N^2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.bounds.cumulants import RowCumulants, Statistics, Tile, row_cumulants
from newtention.bounds.moments import Rows

BATCH_ELEMENTS = 1 << 22
"""Elements that the slices, and each intermediate, of a batch of directions may hold."""

SHIFT = 0.3
"""Shift of the ascent on T(d, d, d), relative to the largest gradient seen.  A shift of 2 ||T||
would guarantee ascent; a small one is faster, and the best value seen counts."""


def hessian_derivative(
    rows: RowCumulants, directions: Float[Tensor, "k N"]
) -> Float[Tensor, "k N N"]:
    """T d for k directions d in the flat order (all X head by head, then all Y)."""
    c = rows
    h, _, d2, p = c.Rho.shape
    d1, d3 = c.a1.shape[1], c.w.shape[-1]
    k, nx = len(directions), h * d1 * d2
    U = directions[:, :nx].unflatten(1, (h, d1, d2))
    Z = directions[:, nx:].unflatten(1, (h, d3, p))

    e = torch.einsum("ra,khab->khrb", c.a1, U)
    Q_t = torch.einsum("hrebc,khrc->khrbe", c.K3, e)
    w_t = torch.einsum("hrbe,khrb->khre", c.Q, e)
    Rho_t = torch.einsum("hribc,khrc->khrbi", c.K, e) + c.Q @ Z[:, :, None]
    r_t = torch.einsum("hrbi,khrb->kri", c.Rho, e) + torch.einsum("hre,khei->kri", c.w, Z)
    M = torch.einsum("kri,hribc->khrbc", r_t, c.K) + torch.einsum("hrabc,khra->khrbc", c.K4, e)
    M += torch.einsum("khei,ri,hrebc->khrbc", Z, c.residual, c.K3)

    # Heads side by side, (r, h ...): the Gauss-Newton part couples them.
    Rho, w, Q = (t.transpose(0, 1).flatten(1) for t in (c.Rho, c.w, c.Q))
    Rho_t, w_t, Q_t = (t.transpose(1, 2).flatten(2) for t in (Rho_t, w_t, Q_t))
    qa = c.weight[:, None] * c.a1

    # H_xx'
    both = Rho_t.unflatten(2, (h * d2, p)) @ Rho.unflatten(1, (h * d2, p)).mT
    both = both + both.mT
    within = both.unflatten(3, (h, d2)).unflatten(2, (h, d2))  # k r h d2 h d2
    within.diagonal(dim1=2, dim2=4).add_(M.permute(0, 2, 3, 4, 1))
    a, a2 = torch.triu_indices(d1, d1, device=U.device)
    packed = (qa[:, a] * c.a1[:, a2]).mT @ both.flatten(2)
    at = torch.empty(d1, d1, dtype=torch.int64, device=U.device)
    at[a, a2] = at[a2, a] = torch.arange(len(a), device=U.device)
    xx = packed.index_select(1, at.flatten()).view(k, d1, d1, h, d2, h, d2)

    # H_xy': axes a, value head, e, head, b, i; then the residual's part, within a head.
    cross = _kr(qa, w).mT @ Rho_t + _kr(qa, w_t).mT @ Rho
    xy = cross.view(k, d1, h, d3, h, d2, p).permute(0, 4, 1, 5, 2, 3, 6).contiguous()
    own = _kr(qa, r_t).mT @ Q + _kr(qa, c.residual).mT @ Q_t
    own = own.view(k, d1, p, h, d2, d3).permute(0, 1, 4, 5, 2, 3)  # k a b e i h
    xy.diagonal(dim1=1, dim2=4).add_(own)

    gram = (c.weight[:, None] * w).mT @ w_t
    T = U.new_zeros(k, directions.shape[1], directions.shape[1])
    T[:, :nx, :nx] = xx.permute(0, 3, 1, 4, 5, 2, 6).reshape(k, nx, nx)
    T[:, :nx, nx:] = xy.view(k, nx, -1)
    T[:, nx:, :nx] = T[:, :nx, nx:].mT
    yy = T[:, nx:, nx:].unflatten(1, (h * d3, p)).unflatten(3, (h * d3, p))
    yy.diagonal(dim1=2, dim2=4).copy_((gram + gram.mT)[..., None].expand(-1, -1, -1, p))
    return T


def _kr(U: Float[Tensor, "r a"], V: Float[Tensor, "*#k r b"]) -> Float[Tensor, "*#k r ab"]:
    """Row-wise Kronecker product."""
    return (U[:, :, None] * V[..., None, :]).flatten(-2)


def cumulants_of(tiles: Sequence[Tile], Y: Float[Tensor, "h d3 p"]) -> RowCumulants:
    """The row cumulants of all tiles, without rows of weight 0."""
    parts = [row_cumulants(tile, Y) for tile in tiles]
    parts = [part.select(part.weight != 0) for part in parts]
    joined = [torch.cat(t, 0 if i < 3 else 1) for i, t in enumerate(zip(*parts, strict=True))]
    return RowCumulants(*joined)


def unfolding_gram(
    rows: RowCumulants, whitening: Float[Tensor, "N N"] | None = None
) -> Float[Tensor, "N N"]:
    """G = unfold(T) unfold(T)^T; with W given, of T in variables xi where x = x0 + W xi.

    lambda_max(G) = || unfold ||_2^2, and its root is at least the spectral norm of T.  W may be any
    matrix with W W^T close to the inverse Hessian: an inverse square root, or the inverse
    transposed Cholesky factor (an orthogonal factor on the right changes no norm).

    T vanishes on three directions of Y, and T d for the directions of X holds all other entries,
    so that half of the slices suffice without W.  Memory: the row cumulants and a batch of slices.
    """
    h, _, d2, p = rows.Rho.shape
    nx, ny = h * rows.a1.shape[1] * d2, h * rows.w.shape[-1] * p
    N = nx + ny
    G = rows.a1.new_zeros(N, N)
    if whitening is not None:
        return whitened_gram(rows, whitening)[0]
    yy = rows.a1.new_zeros(nx, ny * ny)
    basis = torch.eye(nx, N, dtype=G.dtype, device=G.device)
    for start, T in _slices(rows, basis):
        A, B, D = T[:, :nx, :nx], T[:, :nx, nx:], T[:, nx:, nx:]
        A_, B_, D_ = (t.transpose(0, 1).flatten(1) for t in (A, B, D))  # (., k .)
        stacked = B.mT.flatten(0, 1)  # (k y, x)
        G[:nx, :nx] += A_ @ A.flatten(0, 1) + 2 * (B_ @ stacked)
        G[:nx, nx:] += A_ @ B.flatten(0, 1) + 2 * (B_ @ D.flatten(0, 1))
        G[nx:, nx:] += B.flatten(0, 1).mT @ B.flatten(0, 1) + 2 * (D_ @ D.flatten(0, 1))
        yy[start : start + len(T)] = D.flatten(1)
    G[:nx, :nx] += yy @ yy.mT
    G[nx:, :nx] = G[:nx, nx:].mT
    return G


def whitened_gram(
    rows: RowCumulants, whitening: Float[Tensor, "N r"]
) -> tuple[Float[Tensor, "r r"], float]:
    """`unfolding_gram` in the variables xi, x = x0 + W xi; see `squared_slices`."""
    return squared_slices((T for _, T in _slices(rows, whitening.mT)), whitening)


def squared_slices(
    slices: Iterable[Float[Tensor, "b N N"]], whitening: Float[Tensor, "N r"] | None
) -> tuple[Float[Tensor, "r r"], float]:
    """G of the tensor in the variables xi, x = x0 + W xi, from batches of T w_k, w_k columns of W.

    Slices are whitened before they are squared.  Where large entries of T and W cancel, rounding
    then disturbs the result by u || T || ||W||^3, and not by the square root of u.

    Returns:
        G, and (sum_k || T w_k ||_F^2)^(1/2) as computed.
    """
    G, square = None, 0.0
    for T in slices:
        square += float(T.square().sum())
        moved = T if whitening is None else whitening.mT @ (T @ whitening)
        flat = moved.transpose(0, 1).flatten(1)
        part = flat @ flat.mT
        G = part if G is None else G + part
    assert G is not None
    return G, math.sqrt(square)


def _slices(
    rows: RowCumulants, directions: Float[Tensor, "k N"]
) -> Iterator[tuple[int, Float[Tensor, "b N N"]]]:
    """Batches of slices T d, with the place of the first."""
    h, r, d2, p = rows.Rho.shape
    d1, d3 = rows.a1.shape[1], rows.w.shape[-1]
    per_row = max(h * d2 * h * d2, d1 * h * d3, h * d2 * p, d1 * p, h * d2 * d3)
    for start, part in batches(directions, r * per_row):
        yield start, hessian_derivative(rows, part)


def batches(
    directions: Float[Tensor, "k N"], elements: int
) -> Iterator[tuple[int, Float[Tensor, "b N"]]]:
    """So many directions at a time that slices, and `elements` for each, stay within bounds."""
    step = max(1, BATCH_ELEMENTS // max(directions.shape[1] ** 2, elements))
    for start in range(0, len(directions), step):
        yield start, directions[start : start + step]


def unfolding_norm(rows: RowCumulants, whitening: Float[Tensor, "N N"] | None = None) -> float:
    """|| unfold(T) ||_2, or of the whitened tensor: root of the Gram matrix's largest eigenvalue.

    Exact to the rounding of a symmetric eigenvalue problem and of the sums that make the Gram
    matrix; the caller accounts for it.
    """
    gram = unfolding_gram(rows, whitening)
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(gram)[-1])))


def unfolding_error(
    rows: Rows, statistics: Statistics, Y_norms: Float[Tensor, " h"], p: int, error: float
) -> float:
    """A bound of || unfold(T computed) - unfold(T) ||_F for relative errors of the data.

    It also bounds the error of the slices T d for |d| = 1, with the rounding of the sums of
    `hessian_derivative`.

    Proof.  Tokens, shifted, are at most s2 and s3 long; y = max ||Y_h||, A = s2 ||a_j||, eta =
    size s3 y with size >= ||r_j||.  With e for error, in Frobenius norms, the terms counted that
    the code adds:

        w    <= m3             error 2 e m3           Q  <= s2 s3          error 4 e s2 s3
        Rho  <= y s2 s3        error 5 e y s2 s3      K3 <= 2 s3 s2^2      error 16 e s3 s2^2
        K    <= 2 y s3 s2^2    error 18 e y s3 s2^2   K4 <= 7 eta s2^3     error 200 e eta s2^3

    The first three derivatives of r, the third times r, are at most f1 = y s3 A + m3 sqrt(p),
    f2 = 2 y s3 A^2 + s3 A sqrt(p) and f3 = size s3 A^2 (7 y A + 2), off by 5 e f1, 9 e f2 and
    29 e f3.  The terms of H_xx', H_xy' and H_yy' add up to h (10 f1 f2 + 2.5 f3), also where each
    entry is replaced by its magnitude, so that e may stand for the rounding of the sums as well.
    With a quarter for products of errors the slices are off by e h (190 f1 f2 + 95 f3).  The Gram
    matrix takes each entry up to three times instead of once, which is a factor of sqrt(3), and
    uses slices as symmetric that are so only up to twice that error: sqrt(lambda) + (1 + sqrt 2)
    times it.  In all 5.  Infinite where e is beyond 1/128, so that the quarter would not do.

    Args:
        rows: radii, weights and residuals of the rows.
        statistics: of the same rows; only a1 and the sizes are used.
        Y_norms: spectral norms of Y_h.
        p: width of the outputs.
        error: see `newtention.bounds.lipschitz.lipschitz_covariances`; gamma of the number of rows
            and widths has to be added for the sums over them.
    """
    if not error <= 1 / 128:
        return math.inf
    y, root = float(Y_norms.max()), math.sqrt(p)
    s3, A = statistics.size3, statistics.size2 * statistics.a1.norm(dim=1)
    f1 = y * s3 * A + rows.m3 * root
    f2 = (2 * y * s3 * A + s3 * root) * A
    size = rows.residual + rows.m3 * float(Y_norms.sum())
    f3 = size * s3 * A**2 * (7 * y * A + 2)
    total = float((rows.weight * (1000 * f1 * f2 + 500 * f3)).sum())
    return len(Y_norms) * error * total


def third_derivative(
    tiles: Sequence[Tile],
    Y: Float[Tensor, "h d3 p"],
    steps: Float[Tensor, "k N"],
    directions: Float[Tensor, "k N"],
) -> Float[Tensor, " k"]:
    """L'''(x0 + step)[d, d, d] of k pairs, differentiable, from the cumulants of each row.

    The attention weights at x0 + step are those at x0 times exp of the logits' change, normalised.
    """
    h, d3, p = Y.shape
    total = torch.zeros(len(steps), dtype=Y.dtype, device=Y.device)
    for t in tiles:
        d1, d2 = t.A1.shape[-1], t.A2.shape[-1]
        nx = h * d1 * d2

        (dX, dY), (U, Z) = (
            (x[:, :nx].unflatten(1, (h, d1, d2)), x[:, nx:].unflatten(1, (h, d3, p)))
            for x in (steps, directions)
        )
        moved, sigma = (torch.einsum("sna,khab,smb->kshnm", t.A1, W, t.A2) for W in (dX, U))

        B = (t.P @ (t.A3[:, None] @ Y)).sum(1) - t.C
        P = (t.P.log() + moved).softmax(-1)
        v = t.A3[:, None] @ (Y + dY)[:, None]  # k s h m p
        w = t.A3[:, None] @ Z[:, None]
        tau = sigma - (P * sigma).sum(-1, keepdim=True)
        s = (P * tau**2).sum(-1, keepdim=True)
        r = (P @ v).sum(2) - B
        r1 = ((P * tau) @ v + P @ w).sum(2)
        r2 = ((P * (tau**2 - s)) @ v + 2 * ((P * tau) @ w)).sum(2)
        k3 = (P * tau**3).sum(-1, keepdim=True)
        r3 = ((P * (tau**3 - 3 * s * tau - k3)) @ v + 3 * ((P * (tau**2 - s)) @ w)).sum(2)
        rows = (3 * r1 * r2 + r * r3).sum(-1)
        total = total + (t.weight * rows.where(t.weight != 0, 0.0)).sum((1, 2))
    return total


def measured_lipschitz(
    tiles: Sequence[Tile],
    Y: Float[Tensor, "h d3 p"],
    delta: float = 0.0,
    starts: int = 8,
    steps: int = 40,
    seed: int = 0,
) -> float:
    """An estimate of M from below: the largest |T(d, d, d)| found over directions and the ball.

    Shifted power iteration on d, d <- normalise(grad T(d, d, d) / 3 + shift d), from random starts,
    with the point moved to the ball's edge along its own gradient.  Nothing is proved by it.
    """
    N = Y.numel() + Y.shape[0] * tiles[0].A1.shape[-1] * tiles[0].A2.shape[-1]
    generator = torch.Generator().manual_seed(seed)

    def unit(x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(x, dim=1)

    d = unit(torch.randn(starts, N, generator=generator, dtype=Y.dtype).to(Y.device))
    radius = torch.rand(starts, 1, generator=generator, dtype=Y.dtype).to(Y.device)
    x = delta * radius * unit(torch.randn(starts, N, generator=generator, dtype=Y.dtype))
    best, largest = 0.0, torch.zeros(starts, 1, dtype=Y.dtype, device=Y.device)
    for _ in range(steps):
        d.requires_grad_()
        x.requires_grad_()
        value = third_derivative(tiles, Y, x, d)
        best = max(best, float(value.detach().abs().nan_to_num(0.0, 0.0).max()))
        grad_d, grad_x = torch.autograd.grad(value.sum(), (d, x))
        with torch.no_grad():
            sign = value.sign()[:, None]
            grad_d = sign * grad_d / 3
            largest = torch.maximum(largest, grad_d.norm(dim=1, keepdim=True))
            d = unit(grad_d + SHIFT * largest * d)
            if delta > 0:
                x = x + delta * unit(sign * grad_x)
                x = x * (delta / x.norm(dim=1, keepdim=True)).clamp_max(1.0)
            d, x = d.detach(), x.detach()
    return best
