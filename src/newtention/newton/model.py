"""The quadratic model of the projected loss at a point, in the metric of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from newtention.chunks import Chunk, reduce
from newtention.derivatives.hessian import second_order
from newtention.newton.globalise import loss_noise
from newtention.newton.varpro import eliminate_output
from newtention.problem import AttentionProblem

ROUNDED_AWAY = 1e-13
"""Curvature below this fraction of `curvature_unit` is rounding, and no length to measure by."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Tensors with the batch as first axis."""

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The inverse of `tensors`; other names are left out."""
        return cls(**{f.name: tensors[f.name] for f in fields(cls)})

    def select(self, index: Tensor) -> Self:
        """The members at `index`, which is increasing."""
        if len(index) == len(getattr(self, fields(self)[0].name)):
            return self
        return type(self)(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def merge(self, index: Tensor, part: Self) -> Self:
        """These members with those at `index` replaced."""
        merged = {}
        for f in fields(self):
            whole, new = getattr(self, f.name), getattr(part, f.name)
            merged[f.name] = new if len(index) == len(whole) else whole.index_copy(0, index, new)
        return type(self)(**merged)


@dataclass(frozen=True, eq=False)
class Model(Rows):
    """Quadratic model of the projected loss in the scaled metric, s = root o dX.

    length: of X in this metric.  noise: rounding error in the loss.
    """

    H: Float[Tensor, "b Nx Nx"]
    g: Float[Tensor, "b Nx"]
    root: Float[Tensor, "b Nx"]
    length: Float[Tensor, " b"]
    loss: Float[Tensor, " b"]
    gradient: Float[Tensor, " b"]
    noise: Float[Tensor, " b"]
    finite: Bool[Tensor, " b"]


def model_at(
    problem: AttentionProblem,
    X: Float[Tensor, "b h d1 d2"],
    Y: Float[Tensor, "b h d3 p"],
    full: Bool[Tensor, " b"],
    energy: Float[Tensor, " b"],
    unit: Float[Tensor, " b"],
    metric_floor: float,
) -> Model:
    """Derivatives at (X, Y), Y eliminated, in the scaled metric.

    full: whether a member uses the full Hessian rather than the Gauss-Newton matrix.
    energy, unit: `AttentionProblem.target_energy` and `curvature_unit`.
    metric_floor: see `Settings`.
    """
    share = None if bool(full.all()) else full.to(energy.dtype)
    loss, GX, GY, blocks = second_order(problem, X, Y, share)
    reduced = eliminate_output(blocks, GX, GY)
    H, g = reduced.hessian, reduced.gradient
    data = (loss - problem.quadratic.value(X, Y)).clamp(min=0)
    noise = loss_noise(loss, data, energy)
    finite = torch.isfinite(H).flatten(1).all(1) & torch.isfinite(g).all(1)
    finite &= torch.isfinite(loss) & torch.isfinite(noise) & torch.isfinite(unit)
    if not bool(finite.all()):
        H = torch.where(finite[:, None, None], H, torch.eye(H.shape[-1]).to(H))
        g = torch.where(finite[:, None], g, 0.0)
    diagonal = H.diagonal(dim1=1, dim2=2).abs()
    floor = torch.maximum(metric_floor * diagonal.mean(1), ROUNDED_AWAY * unit)
    metric = torch.maximum(diagonal, floor[:, None])
    root = torch.where(metric > 0, metric, torch.ones_like(metric)).sqrt()
    length = torch.linalg.vector_norm(X.flatten(1) * root, dim=-1)
    # X = 0 has no length: take that of weights whose logits have a mean square of 1.
    logits = energy / torch.where(unit > 0, unit, torch.ones_like(unit))
    typical = (logits * root.square().mean(1)).sqrt()
    length = torch.where(length > 0, length, torch.where(typical > 0, typical, 1.0))
    return Model(
        H=H / (root[:, :, None] * root[:, None, :]),
        g=g / root,
        root=root,
        length=length,
        loss=loss,
        gradient=torch.linalg.vector_norm(g, dim=-1),
        noise=noise,
        finite=finite,
    )


def curvature_unit(problem: AttentionProblem, energy: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Size of curvature in one entry of X: 1/2 ||B||^2 per mean square change of the logits.

    NaN if it underflows.
    """

    def tile_sums(tile: Chunk) -> tuple[Tensor, ...]:
        a1, a2 = tile.queries.square().sum((1, 2, 3)), tile.A2.square().sum((1, 2, 3))
        return a1, a2, tile.query_count(), tile.key_count()

    a1, a2, n, m = reduce(problem.chunks, problem.batch, tile_sums)
    d1, d2, _, _ = problem.widths
    mean1, mean2 = a1 / (n * d1), a2 / (m * d2)
    unit = energy * mean1 * mean2
    lost = (unit == 0) & (energy > 0) & (mean1 > 0) & (mean2 > 0)
    return torch.where(lost, torch.nan, unit)
