"""The regulariser on the flat vector of a parametrisation."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.layers import Bilinear, Factored, Parametrisation
from newtention.problem import AttentionProblem
from newtention.regularizers import FlatQuadratic, Ridge


def penalty(problem: AttentionProblem, layer: Parametrisation) -> FlatQuadratic:
    """The problem's regulariser as a quadratic in theta.

    On a factored layer a ridge acts on the factors: x on W_Q and W_K, y on W_V and W_O; biases are
    free.

    Raises:
        ValueError: a regulariser that the parametrisation does not have.
    """
    if isinstance(layer, Bilinear):
        quadratic = problem.quadratic
        centre = None
        if quadratic.centre_x is not None and quadratic.centre_y is not None:
            centre = layer.pack(quadratic.centre_x, quadratic.centre_y)
        return FlatQuadratic(
            lambda direction: layer.pack(*quadratic.apply(*layer.unpack(direction))), centre
        )
    assert isinstance(layer, Factored)
    strength = _factored_ridge(problem, layer)
    return FlatQuadratic(lambda direction: strength * direction)


def _factored_ridge(problem: AttentionProblem, layer: Factored) -> Float[Tensor, "b N"]:
    """Strength of the ridge on every entry of the flat vector."""
    rows = []
    for part in problem.parts or (problem,):
        ridge = part.regularizer or Ridge()
        if not isinstance(ridge, Ridge):
            raise ValueError(
                f"A factored layer takes Ridge or no regularizer; found {type(ridge).__name__}."
            )
        on = {"W_Q": ridge.x, "W_K": ridge.x, "W_V": ridge.y, "W_O": ridge.y}
        row = problem.like.new_zeros(layer.size)
        for block in layer.blocks:
            row[block.start : block.stop] = on.get(block.name, 0.0)
        rows.append(row)
    return torch.stack(rows)
