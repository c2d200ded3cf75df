"""Truncated conjugate gradients for one step of a matrix-free Newton method.

Minimises q(x) = g^T x + 1/2 x^T H x over ||x|| <= radius, the length measured by the inverse of the
preconditioner (Steihaug 1983; Conn, Gould, Toint 2000, section 7.5.1).  In that norm the iterates
grow monotonically, so that the path can be cut at any smaller radius afterwards without a further
product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor

Apply = Callable[[Float[Tensor, " N"]], Float[Tensor, " N"]]

WINDOW = 2
"""Products over which the gain of further ones is averaged."""
SPACING = 1.3
"""Ratio of the indices of iterates that a path keeps (Martens 2010, section 4.6)."""


class Ending(StrEnum):
    """Why the iteration ended."""

    ACCURATE = "accurate"
    """The residual is small enough."""
    POOR_GAIN = "poor gain"
    """Another product lowers the model by less than an average one of a fresh step."""
    BOUNDARY = "boundary"
    """At the radius."""
    NEGATIVE = "negative curvature"
    """At the radius, along a direction of negative curvature."""
    LIMIT = "limit"
    DEADLINE = "deadline"


@dataclass(frozen=True)
class Rule:
    """When to end.

    accuracy: bound on the residual relative to the gradient, in the norm of the preconditioner (the
        forcing term of Dembo, Eisenstat and Steihaug 1982).
    overhead: cost of starting a new step, in products.  The iteration ends when the gain per
        product, over the last WINDOW of them, falls below the mean over the whole step with its
        overhead: the marginal value theorem of Charnov 1976.  Not while the residual is above the
        gradient, where small gains say little.  Infinite: never for that reason.
    limit: products at most.
    worth: share of that mean that is still worth a product: below 1 where an accurate step is worth
        more than its decrease, because the next one starts closer.
    """

    accuracy: float
    overhead: float
    limit: int
    worth: float = 1.0


@dataclass
class Path:
    """Selected iterates with their lengths and predicted decreases -q, in order.

    slope: -g^T x of the first of them.
    """

    points: list[Float[Tensor, " N"]] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    decreases: list[float] = field(default_factory=list)
    slope: float = 0.0
    products: int = 0
    ending: Ending = Ending.LIMIT

    def add(self, x: Float[Tensor, " N"], length: float, decrease: float) -> None:
        """Append an iterate."""
        self.points.append(x)
        self.lengths.append(length)
        self.decreases.append(decrease)

    def within(self, radius: float) -> tuple[Float[Tensor, " N"], float, float]:
        """The last iterate inside a radius, its length and predicted decrease.

        Before the first one the path is the straight line to it.
        """
        inside = [i for i, length in enumerate(self.lengths) if length <= radius]
        if inside:
            i = inside[-1]
            return self.points[i], self.lengths[i], self.decreases[i]
        t = radius / self.lengths[0]
        bend = self.slope - self.decreases[0]
        return t * self.points[0], radius, t * self.slope - t * t * bend


def truncated_cg(
    product: Apply,
    g: Float[Tensor, " N"],
    precondition: Apply,
    radius: float,
    rule: Rule,
    expired: Callable[[], bool] = lambda: False,
) -> Path:
    """The path of conjugate gradients from 0, its last point the step.

    product: H v, symmetric.  precondition: an approximate inverse of H, positive definite.
    expired: asked after every product; True ends the iteration.

    An empty path means that g vanishes or nothing is finite.
    """
    path = Path()
    x = torch.zeros_like(g)
    r = -g
    z = precondition(r)
    p = z.clone()
    rz = first = float(r @ z)
    if not (math.isfinite(rz) and rz > 0):
        path.ending = Ending.ACCURATE
        return path
    xx, xp, pp = 0.0, 0.0, rz  # inner products of x and p in the preconditioner's norm
    decreases = [0.0]
    saved = 0
    for i in range(1, rule.limit + 1):
        Hp = product(p)
        path.products = i
        curvature = float(p @ Hp)
        if not math.isfinite(curvature):
            break
        step = rz / curvature if curvature > 0 else math.inf
        if curvature <= 0 or xx + 2 * step * xp + step * step * pp >= radius * radius:
            path.ending = Ending.BOUNDARY if curvature > 0 else Ending.NEGATIVE
            if math.isfinite(radius):
                # No products of squares: they overflow first.
                back = xp / pp
                t = math.sqrt(back * back + max(0.0, radius * radius - xx) / pp) - back
                length = radius
            else:  # nothing says how far: as far again as the path has come
                t = math.sqrt(xx / pp) if xx > 0 else 1.0
                length = math.sqrt(xx + 2 * t * xp + t * t * pp)
            decreases.append(decreases[-1] + t * rz - 0.5 * t * t * curvature)
            x = x + t * p
            path.add(x, length, decreases[-1])
            break
        x = x + step * p
        r = r - step * Hp
        xx += 2 * step * xp + step * step * pp
        decreases.append(decreases[-1] + 0.5 * step * rz)
        z = precondition(r)
        after = float(r @ z)
        if expired():
            path.ending = Ending.DEADLINE
        elif after <= rule.accuracy**2 * first:
            path.ending = Ending.ACCURATE
        elif _poor(decreases, rule) and after <= first:
            path.ending = Ending.POOR_GAIN
        if path.ending is not Ending.LIMIT or _keeps(i, saved, rule.limit):
            path.add(x, math.sqrt(xx), decreases[-1])
            saved = i
        if path.ending is not Ending.LIMIT:
            break
        beta = after / rz
        rz = after
        xp = beta * (xp + step * pp)
        pp = rz + beta * beta * pp
        p = z + beta * p
    if path.points:
        path.slope = -float(g @ path.points[0])
    return path


def points_kept(limit: int) -> int:
    """Iterates that a path of so many products holds, if nothing else ends it."""
    count = saved = 0
    for i in range(1, limit + 1):
        if _keeps(i, saved, limit):
            count, saved = count + 1, i
    return count


def _keeps(i: int, saved: int, limit: int) -> bool:
    """Whether a path keeps iterate i, the last one kept being `saved`."""
    return i == limit or i >= SPACING * saved


def _poor(decreases: list[float], rule: Rule) -> bool:
    """Whether recent products gained less than the mean with the overhead."""
    i = len(decreases) - 1
    if i < WINDOW or not math.isfinite(rule.overhead):
        return False
    recent = (decreases[-1] - decreases[-1 - WINDOW]) / WINDOW
    return recent < rule.worth * decreases[-1] / (i + rule.overhead)
