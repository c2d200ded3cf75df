"""The trust-region subproblem on Cholesky factors (More and Sorensen 1983), for a batch.

    minimise g.s + 1/2 s.H s   subject to ||s|| <= radius

s solves it iff (H + lam I) s = -g with H + lam I positive semidefinite, lam >= 0 and
lam (radius - ||s||) = 0.  lam is found by Newton's method on 1/radius - 1/||s(lam)||, safeguarded
by an interval; bounds as in Conn, Gould, Toint, "Trust-Region Methods", section 7.3.  In the hard
case (g has no component along the lowest eigenvector) no lam gives a long enough step, and a
multiple of that eigenvector, estimated by inverse iteration with the factor at hand, is added.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

EASY = 0.1
"""A boundary step may miss the radius by this fraction (Conn, Gould, Toint: 0.1 suffices)."""
HARD = 0.2
"""In the hard case the model decrease may miss the optimum by this fraction."""
MAX_FACTORISATIONS = 40


class TrustRegionStep(NamedTuple):
    """Minimiser of the model in the ball, per member of the batch.

    decrease: the model's decrease, -(g.s + 1/2 s.H s) >= 0.
    lam: the multiplier; `floor` when the step is a plain Newton step.
    interior: the step is the unconstrained minimiser, and H + floor I is positive definite.
    """

    step: Float[Tensor, "b N"]
    decrease: Float[Tensor, " b"]
    lam: Float[Tensor, " b"]
    interior: Bool[Tensor, " b"]
    factorisations: int

    def select(self, index: Tensor) -> TrustRegionStep:
        """The members at `index`."""
        return self._replace(
            step=self.step[index],
            decrease=self.decrease[index],
            lam=self.lam[index],
            interior=self.interior[index],
        )


def rounding_floor(n: int, dtype: torch.dtype) -> float:
    """Smallest shift lam for a matrix with unit diagonal.

    n eps lets a singular matrix factor reliably.  eps^(2/3) keeps rounding in the gradient along
    directions without curvature (eps, say) from contributing more than eps / sqrt(lam) = eps^(2/3)
    to the Newton decrement.
    """
    eps = torch.finfo(dtype).eps
    return max(n * eps, eps ** (2 / 3))


def trust_region_step(
    H: Float[Tensor, "b N N"],
    g: Float[Tensor, "b N"],
    radius: Float[Tensor, " b"],
    guess: Float[Tensor, " b"],
) -> TrustRegionStep:
    """Solve the subproblem for every member; `guess` starts lam (0: try the Newton step first).

    H should be scaled to a diagonal of about 1: `rounding_floor` is the smallest lam used.
    """
    b, n, _ = H.shape
    floor = rounding_floor(n, H.dtype)
    norm_g = torch.linalg.vector_norm(g, dim=-1)
    norm_H = torch.minimum(torch.linalg.matrix_norm(H), torch.linalg.matrix_norm(H, ord=torch.inf))
    low = torch.maximum(norm_g / radius - norm_H, -H.diagonal(dim1=-2, dim2=-1).amin(-1))
    low = low.clamp(min=floor)
    high = torch.maximum(norm_g / radius + norm_H, 2 * low)
    lam = torch.where(guess > low, torch.minimum(guess, high), low)

    step = torch.zeros_like(g)
    interior = torch.zeros(b, dtype=torch.bool, device=H.device)
    active = torch.arange(b, device=H.device)
    factorisations = 0
    for _ in range(MAX_FACTORISATIONS):
        everyone = len(active) == b
        H_a = H if everyone else H[active]
        shifted = H_a.clone()
        shifted.diagonal(dim1=-2, dim2=-1).add_(lam[active, None])
        L, info = torch.linalg.cholesky_ex(shifted)
        factorisations += 1
        failed = info != 0
        if bool(failed.any()):
            L = torch.where(failed[:, None, None], torch.eye(n, dtype=H.dtype, device=H.device), L)
        s = -torch.cholesky_solve(g[active, :, None], L)[..., 0]
        found, s, in_ball, low_a, high_a, lam_a = _update(
            L, g[active], s, radius[active], lam[active], low[active], high[active], failed, floor
        )
        step[active] = s
        interior[active] = in_ball
        settled = lam[active]
        low[active], high[active] = low_a, high_a
        lam[active] = torch.where(found, settled, lam_a)
        if bool(found.all()):
            break
        active = active[~found]
    return TrustRegionStep(step, _decrease(H, g, step), lam, interior, factorisations)


def _decrease(H: Tensor, g: Tensor, s: Tensor) -> Tensor:
    Hs = (H @ s[..., None])[..., 0]
    return -((g + 0.5 * Hs) * s).sum(-1)


def _update(
    L: Tensor,
    g: Tensor,
    s: Tensor,
    radius: Tensor,
    lam: Tensor,
    low: Tensor,
    high: Tensor,
    failed: Tensor,
    floor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One safeguarded step on lam; returns (found, step, interior, low, high, next lam)."""
    norm = torch.linalg.vector_norm(s, dim=-1)
    inside = ~failed & (norm <= radius)
    outside = ~failed & ~inside
    interior = inside & (lam <= floor)
    found = interior | (~failed & ((norm - radius).abs() <= EASY * radius))

    low = torch.where(failed | outside, torch.maximum(low, lam), low)
    high = torch.where(inside, torch.minimum(high, lam), high)

    w = torch.linalg.solve_triangular(L, s[..., None], upper=False)[..., 0]
    ratio = norm / torch.linalg.vector_norm(w, dim=-1).clamp(min=torch.finfo(s.dtype).tiny)
    proposal = lam + ratio.square() * (norm - radius) / radius

    check = inside & ~found
    if bool(check.any()):
        z, curvature = _lowest_direction(L)
        tau = _to_boundary(s, z, radius)
        # z.(H + lam)z = curvature bounds -lambda_min from below by lam - curvature.
        low = torch.where(check, torch.maximum(low, lam - curvature), low)
        target = HARD * ((s * -g).sum(-1) + lam * radius.square())
        hard = check & (tau.square() * curvature <= target)
        s = torch.where(hard[:, None], s + tau[:, None] * z, s)
        found = found | hard

    middle = torch.maximum((low * high).sqrt(), low + 0.01 * (high - low))
    usable = ~failed & (proposal > low) & (proposal < high)
    # A step inside the ball with the proposal below the interval means lam = low may be interior.
    # Without a gradient there is no proposal, and the floor is the only candidate.
    at_floor = inside & ((proposal <= low) | (norm == 0)) & (low <= floor)
    following = torch.where(usable, proposal, torch.where(at_floor, low, middle))
    return found, s, interior, low, high, following


def _lowest_direction(L: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vector z with small z.(L L^T) z, and that value, by a few inverse iterations."""
    b, n, _ = L.shape
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(1, n, 1, generator=generator, dtype=torch.float64).to(L).expand(b, n, 1)
    for _ in range(4):
        z = torch.cholesky_solve(z, L)
        z = z / torch.linalg.vector_norm(z, dim=1, keepdim=True)
    curvature = (L.mT @ z).square().sum((1, 2))
    return z[..., 0], curvature


def _to_boundary(s: Tensor, z: Tensor, radius: Tensor) -> Tensor:
    """tau of least magnitude with ||s + tau z|| = radius."""
    sz = (s * z).sum(-1)
    gap = (radius.square() - s.square().sum(-1)).clamp(min=0)
    root = (sz.square() + gap).sqrt()
    return gap / torch.where(sz >= 0, sz + root, sz - root).where(root > 0, torch.ones_like(root))
