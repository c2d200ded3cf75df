"""The quadratic model of an objective at a point, in the metric of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from newtention.newton.objective import Objective

ROUNDED_AWAY = 1e-13
"""Curvature below this fraction of `Objective.unit` is rounding, and no length to measure by."""


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
    """Quadratic model of the loss in the scaled metric, s = root o step.

    length: of the entries that move, in this metric.  noise: rounding error in the loss.
    """

    H: Float[Tensor, "b k k"]
    g: Float[Tensor, "b k"]
    root: Float[Tensor, "b k"]
    length: Float[Tensor, " b"]
    loss: Float[Tensor, " b"]
    gradient: Float[Tensor, " b"]
    noise: Float[Tensor, " b"]
    finite: Bool[Tensor, " b"]


def model_at(
    objective: Objective,
    theta: Float[Tensor, "b N"],
    full: Bool[Tensor, " b"],
    metric_floor: float,
) -> Model:
    """The derivatives at theta in the scaled metric.

    full: whether a member uses the full Hessian rather than the Gauss-Newton matrix.
    metric_floor: see `Settings`.
    """
    energy, unit = objective.energy, objective.unit
    loss, noise, g, H = objective.derivatives(theta, full)
    finite = torch.isfinite(H).flatten(1).all(1) & torch.isfinite(g).all(1)
    finite &= torch.isfinite(loss) & torch.isfinite(noise) & torch.isfinite(unit)
    if not bool(finite.all()):
        H = torch.where(finite[:, None, None], H, torch.eye(H.shape[-1]).to(H))
        g = torch.where(finite[:, None], g, 0.0)
    diagonal = H.diagonal(dim1=1, dim2=2).abs()
    floor = torch.maximum(metric_floor * diagonal.mean(1), ROUNDED_AWAY * unit)
    metric = torch.maximum(diagonal, floor[:, None])
    root = torch.where(metric > 0, metric, torch.ones_like(metric)).sqrt()
    length = torch.linalg.vector_norm(theta[:, : g.shape[-1]] * root, dim=-1)
    # Zero has no length: take that of weights whose logits have a mean square of 1.
    logits = energy / torch.where(unit > 0, unit, torch.ones_like(unit))
    typical = (logits * root.square().mean(1)).sqrt()
    length = torch.where(length > 0, length, torch.where(typical > 0, typical, 1.0))
    return Model(
        H=H.div_(root[:, :, None] * root[:, None, :]),
        g=g / root,
        root=root,
        length=length,
        loss=loss,
        gradient=torch.linalg.vector_norm(g, dim=-1),
        noise=noise,
        finite=finite,
    )
