"""The regulariser on the flat vector of a parametrisation."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.derivatives.proximity import proximity
from newtention.layers import AttentionMap, Bilinear, Factored, Parametrisation
from newtention.problem import AttentionProblem
from newtention.regularizers import FlatQuadratic, Proximity, Ridge


def penalty(problem: AttentionProblem, layer: Parametrisation) -> FlatQuadratic:
    """The problem's regulariser as a quadratic in theta.

    On a factored layer a ridge acts on the factors: x on W_Q and W_K, y on W_V and W_O; biases are
    free.

    Raises:
        ValueError: a regulariser that the parametrisation does not have.
    """
    regularizer = problem.regularizer
    around = isinstance(regularizer, Proximity) and regularizer.around_layer
    if isinstance(layer, Bilinear | AttentionMap):
        if around:
            raise ValueError("Proximity around a factored layer goes with factored layers only.")
        return _bilinear(problem, layer) if isinstance(layer, Bilinear) else _map(problem, layer)
    assert isinstance(layer, Factored)
    if isinstance(regularizer, Proximity) and regularizer.around_layer:
        return proximity(problem, layer, regularizer)
    if not isinstance(regularizer, Ridge | None):
        raise ValueError(
            "A factored layer takes Ridge, Proximity around a layer or no regularizer; found "
            f"{type(regularizer).__name__}."
        )
    strength = _ridge_strengths(layer, regularizer or Ridge(), problem.like)
    rows = strength[:, layer.output_start :].view(1, -1, layer.p)[..., 0]
    return FlatQuadratic(lambda direction: strength * direction, torch.diag_embed(rows))


def _bilinear(problem: AttentionProblem, layer: Bilinear) -> FlatQuadratic:
    quadratic = problem.quadratic
    centre = None
    if quadratic.centre_x is not None and quadratic.centre_y is not None:
        centre = layer.pack(quadratic.centre_x, quadratic.centre_y)
    gram = quadratic.gram
    b, d3, _ = gram.shape
    blocks = gram.new_zeros(b, layer.heads, d3, layer.heads, d3)
    for i in range(layer.heads):
        blocks[:, i, :, i] = gram
    return FlatQuadratic(
        lambda direction: layer.pack(*quadratic.apply(*layer.unpack(direction))),
        blocks.view(b, layer.heads * d3, layer.heads * d3),
        centre,
    )


def _map(problem: AttentionProblem, layer: AttentionMap) -> FlatQuadratic:
    quadratic = problem.quadratic
    centre = quadratic.centre_x
    return FlatQuadratic(
        lambda direction: layer.pack(quadratic.apply_x(layer.unpack(direction))),
        quadratic.gram,
        None if centre is None else layer.pack(centre),
    )


def _ridge_strengths(layer: Factored, ridge: Ridge, like: Tensor) -> Float[Tensor, "1 N"]:
    """Strength of the ridge on every entry of the flat vector."""
    on = {"W_Q": ridge.x, "W_K": ridge.x, "W_V": ridge.y, "W_O": ridge.y}
    parts = [like.new_full((b.stop - b.start,), on.get(b.name, 0.0)) for b in layer.blocks]
    return torch.cat(parts)[None]
