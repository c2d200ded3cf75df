"""The user's weights for a problem, (X, Y) or a layer, and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from newtention.derivatives.gradient import data_loss
from newtention.inputs import as_like, require_shape
from newtention.layers import (
    AttentionLayer,
    AttentionMap,
    Bilinear,
    BilinearAttention,
    Factored,
    FactoredAttention,
    MapAttention,
    Parametrisation,
)
from newtention.notation import Array, ArrayLike
from newtention.problem import AttentionProblem
from newtention.solution import Solution

Point = ArrayLike | AttentionLayer | Solution
"""What functions take as weights: X (with Y beside it), a layer or a Solution."""


@dataclass(frozen=True, eq=False)
class Weights:
    """A point in the flat space of a parametrisation, and how the user shaped it.

    one_head: the user gave X (d1, d2) rather than (h, d1, d2).
    """

    layer: Parametrisation
    theta: Float[Tensor, "b N"]
    one_head: bool
    problem: AttentionProblem

    @property
    def bilinear(self) -> tuple[Bilinear, Float[Tensor, "b h d1 d2"], Float[Tensor, "b h d3 p"]]:
        """The bilinear form and its X and Y.

        Raises:
            ValueError: the weights are of another form.
        """
        if not isinstance(self.layer, Bilinear):
            raise ValueError(
                "The closed blocks of the Hessian are of weights (X, Y); for a factored layer use "
                "hessian_operator(problem, layer), whose to_dense() gives the whole matrix."
            )
        return self.layer, *self.layer.unpack(self.theta)

    def present(self, flat: Float[Tensor, "b N"]) -> tuple[Array, Array] | Array | dict[str, Array]:
        """A flat vector as (X, Y) in the user's shapes, X for a map, block by block for a layer."""
        if isinstance(self.layer, AttentionMap):
            return self.present_batch(self.layer.unpack(flat)[:, 0])
        if isinstance(self.layer, Bilinear):
            parts = (t[:, 0] if self.one_head else t for t in self.layer.unpack(flat))
            X, Y = (self.present_batch(t) for t in parts)
            return X, Y
        return {
            block.name: self.problem.present(flat[0, block.start : block.stop].view(block.shape))
            for block in self.layer.blocks
        }

    def present_batch(self, t: Float[Tensor, "b ..."]) -> Array:
        """A result with a batch axis."""
        return self.problem.present(t if self.problem.parts else t[0])


def as_weights(
    problem: AttentionProblem, X: Point, Y: ArrayLike | None = None, needs_Y: bool = True
) -> Weights:
    """Check X and Y, a layer or a Solution against the problem.

    needs_Y: whether X alone is an error; otherwise Y is zero there.

    Shapes: X (d1, d2) and Y (d3, p) for one head, (h, d1, d2) and (h, d3, p) for several; a stack
    of problems adds a leading axis.  Attention maps have X (d1, d2) alone.

    Raises:
        ValueError: shapes that do not fit, NaN or infinity, no Y.
    """
    if isinstance(X, Solution):
        X = X.layer
    if isinstance(X, AttentionLayer):
        weights = _layer_weights(problem, X, Y)
    elif problem.of_maps:
        weights = _map_weights(problem, X, Y)
    else:
        if Y is None and needs_Y:
            raise ValueError("Y is missing: X needs its value map beside it; or give a layer.")
        weights = _bilinear_weights(problem, X, Y)
    heads = problem.fixed_heads
    if heads is not None and heads != weights.layer.heads:
        raise ValueError(
            f"The problem's bias or Proximity reference is for {heads} head(s); the weights have "
            f"{weights.layer.heads}."
        )
    return weights


def _layer_weights(problem: AttentionProblem, layer: AttentionLayer, Y: object) -> Weights:
    if Y is not None:
        raise ValueError("Y must be left out beside a layer.")
    if problem.parts:
        raise ValueError("A layer goes with one problem, not with a stack.")
    shape = layer.parametrisation
    if problem.of_maps != isinstance(layer, MapAttention):
        raise ValueError(
            "A fit of attention maps takes a MapAttention, and any other problem another layer; "
            f"found {layer!r}."
        )
    found = (shape.d1, shape.d2, shape.d3, shape.p)
    if found != problem.widths:
        raise ValueError(
            f"The layer's widths (d1, d2, d3, p) must be the problem's, {problem.widths}; "
            f"found {found}."
        )
    one_head = isinstance(layer, BilinearAttention | MapAttention) and layer.X.ndim == 2
    return Weights(shape, as_like("layer", layer.theta, problem.like)[None], one_head, problem)


def _bilinear_weights(problem: AttentionProblem, X: ArrayLike, Y: ArrayLike | None) -> Weights:
    d1, d2, d3, p = problem.widths
    x, one_head = _with_axes("X", as_like("X", X, problem.like), (d1, d2), problem)
    if Y is None:
        y = x.new_zeros(*x.shape[:2], d3, p)
    else:
        y, _ = _with_axes("Y", as_like("Y", Y, problem.like), (d3, p), problem)
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"X has {x.shape[1]} head(s) but Y has {y.shape[1]}.")
    layer = Bilinear(x.shape[1], d1, d2, d3, p)
    return Weights(layer, layer.pack(x, y), one_head, problem)


def _map_weights(problem: AttentionProblem, X: ArrayLike, Y: object) -> Weights:
    if Y is not None:
        raise ValueError("Y must be left out: a fit of attention maps has X alone.")
    d1, d2, _, _ = problem.widths
    x = as_like("X", X, problem.like)
    lead = (problem.batch,) if problem.parts else ()
    require_shape("X", x, (*lead, d1, d2), "the widths of queries and keys; a map has one head")
    layer = AttentionMap(d1, d2)
    return Weights(layer, layer.pack(x.reshape(problem.batch, 1, d1, d2)), True, problem)


def as_layer(
    shape: Parametrisation, theta: Float[Tensor, " N"], one_head: bool, problem: AttentionProblem
) -> AttentionLayer:
    """Weights as a layer, its arrays of the kind of the problem's data."""
    parts: dict[str, Array] = {}
    for block in shape.blocks:
        t = theta[block.start : block.stop].view(block.shape)
        parts[block.name] = problem.present(t[0] if one_head else t)
    if isinstance(shape, Bilinear):
        return BilinearAttention(**parts)
    if isinstance(shape, AttentionMap):
        return MapAttention(**parts)
    assert isinstance(shape, Factored)
    return FactoredAttention(**parts, scale=shape.scale, rotary=shape.rotary)


def start_weights(problem: AttentionProblem, start: object) -> Weights:
    """(X, Y), X alone, a layer or a Solution as a point with a finite loss.

    Raises:
        ValueError: a wrong number of parts, shapes that do not fit, or a loss that overflows.
    """
    if isinstance(start, str):
        raise ValueError(
            f"start must be (X, Y), X, a layer or a Solution; found {start!r}.  For a truncated "
            "layer, give the layer and Options(ranks=)."
        )
    if isinstance(start, list) and all(isinstance(t, Tensor | np.ndarray) for t in start):
        start = tuple(start)
    if isinstance(start, tuple) and len(start) != 2:
        raise ValueError(f"start must be (X, Y), X or a layer; found {len(start)} parts.")
    parts = start if isinstance(start, tuple) else (start,)
    w = as_weights(problem, *parts, needs_Y=False)
    if not bool(torch.isfinite(data_loss(problem, w.layer, w.theta)).all()):
        raise ValueError("start must have a finite loss; its logits or outputs overflow.")
    return w


def _with_axes(
    name: str, t: Tensor, widths: tuple[int, int], problem: AttentionProblem
) -> tuple[Tensor, bool]:
    """t with batch and head axes, and whether the user left the head axis out."""
    lead = (problem.batch,) if problem.parts else ()
    one_head = t.ndim == len(lead) + 2
    heads = () if one_head else (None,)
    require_shape(name, t, (*lead, *heads, *widths), "one head, or several along an axis before")
    t = t if not one_head else t.unsqueeze(-3)
    return (t if problem.parts else t[None]).contiguous(), one_head
