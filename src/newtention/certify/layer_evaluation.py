"""The data part of a layer's loss at a point in float64, with proved bounds on the errors."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.bounds.balls import norms_upper, row_largest
from newtention.bounds.rounding import UNIT, norm_upper, spectral_norm_upper, upward
from newtention.certify.data_evaluation import (
    DataEvaluation,
    RowQuantities,
    defined,
    own_keys,
    query_norm,
    root_of_largest,
    shared_keys,
    token_radii,
    total,
)
from newtention.certify.row_errors import RowMoments, data_errors, real_rows, tile_moments
from newtention.chunks import Chunk
from newtention.derivatives.hessian import second_order_parts
from newtention.layers import Bilinear, evaluate
from newtention.problem import AttentionProblem


def evaluate_layer(
    data: AttentionProblem, layer: Bilinear, theta: Float[Tensor, "1 N"]
) -> DataEvaluation:
    """The data part of the bilinear form."""
    X, Y = layer.unpack(theta)
    moments, radii = _rows(data, layer, theta)
    keys = max(chunk.A2.shape[2] for chunk in data.chunks)
    errors = data_errors(moments, radii[:, 0], query_norm(data), keys, layer.p)

    loss, GX, GY, blocks, gauss_newton = second_order_parts(data, X, Y)
    jacobian_norm = root_of_largest(gauss_newton.to_dense()[0], errors.gauss_newton())
    del gauss_newton
    computed = blocks.to_dense()[0]
    hessian = 0.5 * (computed + computed.mT)
    del blocks, computed
    rounding = UNIT * norm_upper(hessian)
    return DataEvaluation(
        rows=RowQuantities(
            rho=defined(upward(moments.query * radii[:, 0], 2)),
            rho3=radii[:, 1],
            m3=radii[:, 2],
            weight=moments.weight,
            residual=defined(upward(moments.residual + errors.residual, 2)),
            residual_error=errors.residual,
            query_norms=moments.query,
            weight_error=defined(upward(torch.expm1(moments.kappa.amax(1)), 2)),
        ),
        Y_norms=theta.new_tensor([spectral_norm_upper(y) for y in Y[0]]),
        loss=float(loss[0]),
        loss_error=errors.loss,
        gradient=layer.pack(GX, GY)[0],
        gradient_error=errors.gradient,
        hessian=hessian,
        hessian_error=total(errors.gauss_newton(jacobian_norm), errors.curvature, rounding),
        jacobian_norm=jacobian_norm,
    )


def _rows(
    data: AttentionProblem, layer: Bilinear, theta: Float[Tensor, "1 N"]
) -> tuple[RowMoments, Float[Tensor, "n 3"]]:
    """Moments of all real rows, and the radii of their keys and values and their largest value."""
    X, Y = (t[0] for t in layer.unpack(theta))
    moments, radii = [], []
    for chunk in data.chunks:
        m = chunk.A2.shape[2]
        for tile in chunk.tiles(layer.heads * (m + layer.d2 + layer.d3) + 2 * m):
            moments.append(tile_moments(evaluate(tile, layer, theta), X, Y))
            radii.append(_radii(tile)[real_rows(tile)[0]])
    return RowMoments(*(torch.cat(parts) for parts in zip(*moments, strict=True))), torch.cat(radii)


def _radii(tile: Chunk) -> Float[Tensor, "s n 3"]:
    """rho_2, rho_3 and m_3 of every row."""
    A2, A3 = tile.A2[0], tile.A3[0]
    keys = token_radii(A2, tile)
    values = keys if tile.A3 is tile.A2 else token_radii(A3, tile)
    sizes, own = norms_upper(A3), own_keys(tile)
    if own is None:
        largest = sizes.masked_fill(~shared_keys(tile), 0.0).amax(1)[:, None].expand_as(keys)
    else:
        largest = row_largest(sizes, own)
    return torch.stack((keys, values, largest), -1)
