"""Radii of point sets: near-minimal enclosing balls, with rounding counted.

A ball about any centre bounds the distances from it, so the centre is found approximately (Badoiu
and Clarkson, Smaller core-sets for balls, SODA 2003: walk 1/(i+1) of the way to the farthest point)
and only the radius about it is proved.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from newtention.bounds.rounding import TINY, UNIT, gamma, upward

GRAM_ELEMENTS = 1 << 24
"""Largest Gram matrix of the points that `row_radii` forms to improve its centres (128 MiB)."""


def norms_upper(A: Float[Tensor, "*rows d"]) -> Float[Tensor, "*rows"]:
    """Upper bounds of the Euclidean norms of the rows.

    Scaled by the row's largest entry, so that no square overflows or is lost.
    """
    largest = A.abs().amax(-1, keepdim=True)
    scaled = A / torch.where(largest > 0.0, largest, 1.0)
    size = upward(scaled.square().sum(-1).sqrt() * largest[..., 0], A.shape[-1] + 6)
    # TINY of `upward` must not turn zero rows into others.
    size = torch.where(largest[..., 0] == 0.0, 0.0, size)
    return torch.where(torch.isnan(size), torch.inf, size)


def enclosing_ball(
    points: Float[Tensor, "s m d"], real: Bool[Tensor, "s m"], passes: int = 32
) -> tuple[Float[Tensor, "s d"], Float[Tensor, " s"]]:
    """A ball that contains all real points of each set: (centre, proved radius).

    The radius is at most (1 + 1/sqrt(passes)) times the least one, usually within a few per cent.
    """
    weight = real.to(points.dtype)[..., None]
    centre = (weight * points).sum(1) / weight.sum(1)
    best, best_radius = centre, distances_upper(points, centre).masked_fill(~real, 0.0).amax(1)
    sets = torch.arange(len(points), device=points.device)
    for i in range(1, passes + 1):
        distance = (points - centre[:, None]).square().sum(-1).masked_fill(~real, -1.0)
        farthest, at = distance.max(1)
        better = farthest.sqrt() < best_radius
        best = torch.where(better[:, None], centre, best)
        best_radius = torch.where(better, farthest.sqrt(), best_radius)
        centre = centre + (points[sets, at] - centre) / (i + 1)
    return best, distances_upper(points, best).masked_fill(~real, 0.0).amax(1)


def distances_upper(
    points: Float[Tensor, "s m d"], centre: Float[Tensor, "s d"]
) -> Float[Tensor, "s m"]:
    """Upper bounds of the distances of points from a centre; each difference is off by u of it."""
    return upward(norms_upper(points - centre[:, None]), 2)


def row_radii(
    points: Float[Tensor, "s m d"], allowed: Bool[Tensor, "#s n m"], passes: int = 6
) -> Float[Tensor, "s n"]:
    """For every row a proved radius of its allowed points about some centre of its own.

    O(n m) numbers per pass: inner products with the centres are updated from the points' Gram
    matrix.  The centres start at the means of the allowed points.

    Proof of the radius about c: |z - c|^2 = |c|^2 - 2 c.z + |z|^2, evaluated with an error of at
    most gamma_(d+3) (|c| + |z|)^2; z is a point minus their common mean, off by u |z|.
    """
    s, m, d = points.shape
    allowed = allowed.expand(s, -1, -1)
    used = allowed.any(1)
    middle = (used[..., None] * points).sum(1) / used.sum(1)[:, None]
    Z = torch.where(used[..., None], points - middle[:, None], 0.0)
    size = norms_upper(Z)
    squares = Z.square().sum(-1)
    share = allowed.to(Z.dtype)
    share /= share.sum(-1, keepdim=True)
    centre = share @ Z
    if m * m <= GRAM_ELEMENTS and passes > 0:
        centre = _improved(centre, Z, squares, allowed, passes)
    centre = torch.where(torch.isfinite(centre).all(-1, keepdim=True), centre, 0.0)
    c = norms_upper(centre)
    square = squares[:, None, :] - 2.0 * (centre @ Z.mT) + centre.square().sum(-1, keepdim=True)
    largest = torch.where(allowed, size[:, None, :], 0.0).amax(-1)
    square = square.masked_fill_(~allowed, 0.0).amax(-1).clamp(min=0.0)
    error = gamma(d + 4) * (c + largest) ** 2 + (d + 2) * TINY
    radius = upward((square + error).sqrt() + 2.0 * UNIT * largest, d + 12)
    radius = torch.where(torch.isnan(radius), torch.inf, radius)
    radius = torch.where(allowed.sum(-1) == 1, 0.0, radius)
    # About the common mean the distances are known without cancellation.
    return torch.minimum(radius, upward(largest, 4))


def _improved(
    centre: Float[Tensor, "s n d"],
    Z: Float[Tensor, "s m d"],
    squares: Float[Tensor, "s m"],
    allowed: Bool[Tensor, "s n m"],
    passes: int,
) -> Float[Tensor, "s n d"]:
    """Badoiu-Clarkson for every row; distance^2 = far + |c|^2, far = |z|^2 - 2 c.z."""
    # In float32: a search, at half the cost.
    exact, scale = Z, float(squares.amax().sqrt().clamp(min=TINY))
    Z, centre, squares = (Z / scale).float(), (centre / scale).float(), (squares / scale**2).float()
    table = squares[:, None, :] - 2.0 * (Z @ Z.mT)
    far = squares[:, None, :] - 2.0 * (centre @ Z.mT)
    far = far.masked_fill_(~allowed, -1e30)
    sets = torch.arange(len(Z), device=Z.device)[:, None]
    best, best_square = centre, torch.full_like(far[..., 0], torch.inf)
    for i in range(1, passes + 2):
        value, at = far.max(-1)
        square = value + centre.square().sum(-1)
        better = square < best_square
        best = torch.where(better[..., None], centre, best)
        best_square = torch.where(better, square, best_square)
        if i <= passes:
            step = 1.0 / (i + 1)
            far.lerp_(table[sets, at], step)
            centre = centre.lerp(Z[sets, at], step)
    return best.to(exact.dtype) * scale


def row_largest(
    values: Float[Tensor, "s m"], allowed: Bool[Tensor, "#s n m"]
) -> Float[Tensor, "s n"]:
    """The largest nonnegative value among each row's allowed keys."""
    return torch.where(allowed, values[:, None, :], 0.0).amax(-1)
