"""Hessian-vector products without a Hessian (Pearlmutter 1994), by one second-order pass.

Tangents along the direction end in _t.  With R = q C, dO = mix^T R and D = dO v^T - rowsum(dO o O):

    q_t, k_t, v_t from the layer's linear map;  S_t = q_t k^T + q k_t^T
    P_t = P o S_t - P rowsum(P o S_t);  O_t = P_t v + P v_t;  R_t = q (mix's tangent)
    dO_t = mix^T R_t + (mix's cross term) R;  dS = P o D;  dS_t = P_t o D + P o D_t
    dq_t = dS_t k + dS k_t;  dk_t = dS_t^T q + dS^T q_t;  dv_t = P_t^T dO + P^T dO_t
    H direction = L^T (dq_t, dk_t, dv_t) + mix's own gradient along both tangents

The Gauss-Newton product is J^T applied to R_t: the backward pass with the residual replaced.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.attention import (
    fixed_weights_tangent,
    score_gradient_tangent,
    weights_tangent,
)
from newtention.derivatives.gradient import backward
from newtention.derivatives.linearised import Linearised
from newtention.derivatives.penalty import penalty
from newtention.layers import Bilinear, Evaluation, Heads, Parametrisation
from newtention.problem import AttentionProblem

Kind = Literal["full", "gauss-newton"]


def hessian_product(
    problem: AttentionProblem,
    layer: Parametrisation,
    theta: Float[Tensor, "b N"],
    directions: Float[Tensor, "b k N"],
    kind: Kind = "full",
) -> Float[Tensor, "b k N"]:
    """Hessian (or Gauss-Newton matrix) of the total loss at theta times k directions.

    The softmax is evaluated once per tile for all directions.
    """
    product = data_product(Linearised(problem, layer, theta), directions, kind)
    curvature = penalty(problem, layer).curvature
    return product + torch.stack([curvature(d) for d in directions.unbind(1)], 1)


def data_product(
    point: Linearised, directions: Float[Tensor, "b k N"], kind: Kind
) -> Float[Tensor, "b k N"]:
    """The same for the data loss, without the regulariser."""
    tile_product = _hessian_tile if kind == "full" else _gauss_newton_tile

    def tile_sums(at: Evaluation) -> tuple[Tensor]:
        parts = [tile_product(at, point.layer, point.theta, d) for d in directions.unbind(1)]
        return (torch.stack(parts, 1),)

    return point.reduce(tile_sums)[0]


def output_product(point: Linearised, direction: Float[Tensor, "b N"]) -> Float[Tensor, "b N"]:
    """The data's Hessian times a direction of the output map alone, without the map's own block.

    The attention weights stand still, which takes a third of a whole product.
    """
    return point.reduce(lambda at: (_output_tile(at, point.layer, point.theta, direction),))[0]


def output_tangent(
    at: Evaluation,
    layer: Parametrisation,
    theta: Float[Tensor, "b N"],
    direction: Float[Tensor, "b N"],
) -> Float[Tensor, "o s n p"]:
    """q J direction on a tile: the weighted tangent of the layer's output."""
    return _tangent(at, layer, theta, direction)[3]


def _tangent(
    at: Evaluation, layer: Parametrisation, theta: Tensor, direction: Tensor
) -> tuple[Heads, Tensor, Tensor, Tensor]:
    """Tangents of q, k, v, of P, of O, and of the output's gradient R."""
    q, k, v = at.heads
    assert k is not None
    heads_t = layer.qkv_tangent(at.tile, direction)
    if heads_t.k is None:
        S_t = heads_t.q @ k.mT
    else:
        S_t = torch.cat([heads_t.q, q], -1) @ torch.cat([k, heads_t.k], -1).mT
    P_t = weights_tangent(at.P, S_t)
    O_t = P_t if v is None or heads_t.v is None else P_t @ v + at.P @ heads_t.v
    F_t = layer.mix_tangent(at.tile, theta, direction, at.O, O_t)
    return heads_t, P_t, O_t, F_t * at.tile.weight[..., None]


def _gauss_newton_tile(
    at: Evaluation, layer: Parametrisation, theta: Tensor, direction: Tensor
) -> Float[Tensor, "o N"]:
    """J^T q J direction."""
    return backward(at, layer, theta, output_tangent(at, layer, theta, direction))


def _hessian_tile(
    at: Evaluation, layer: Parametrisation, theta: Tensor, direction: Tensor
) -> Float[Tensor, "o N"]:
    """Hessian of the tile's data loss times a direction."""
    q, k, v = at.heads
    assert k is not None
    (q_t, k_t, v_t), P_t, O_t, R_t = _tangent(at, layer, theta, direction)
    R = at.qC
    dO = layer.mix_transposed(at.tile, theta, R)
    dO_t = layer.mix_transposed(at.tile, theta, R_t)
    cross = layer.mix_cross(at.tile, direction, R)
    if cross is not None:
        dO_t = dO_t + cross
    dS, dS_t = score_gradient_tangent(at.P, P_t, v, v_t, at.O, O_t, dO, dO_t)
    dq_t, dk_t = dS_t @ k, None
    if k_t is not None:
        dq_t = dq_t + dS @ k_t
        dk_t = dS_t.mT @ q + dS.mT @ q_t
    dv_t = None if v is None else P_t.mT @ dO + at.P.mT @ dO_t
    product = layer.qkv_transposed(at.tile, Heads(dq_t, dk_t, dv_t))
    own = layer.mix_gradient_tangent(at.tile, at.O, O_t, R, R_t)
    return product if own is None else product + own


def _output_tile(
    at: Evaluation, layer: Parametrisation, theta: Tensor, direction: Tensor
) -> Float[Tensor, "o N"]:
    """`output_product` on a tile."""
    q, k, v = at.heads
    assert k is not None
    assert v is not None
    v_t = O_t = None
    if isinstance(layer, Bilinear):  # its output map makes the values
        v_t = layer.qkv_tangent(at.tile, direction).v
        assert v_t is not None
        O_t = at.P @ v_t
    still = torch.zeros_like(at.O) if O_t is None else O_t
    R_t = layer.mix_tangent(at.tile, theta, direction, at.O, still) * at.tile.weight[..., None]
    dO = layer.mix_transposed(at.tile, theta, at.qC)
    dO_t = layer.mix_transposed(at.tile, theta, R_t)
    cross = layer.mix_cross(at.tile, direction, at.qC)
    if cross is not None:
        dO_t = dO_t + cross
    dS_t = fixed_weights_tangent(at.P, v, v_t, at.O, O_t, dO, dO_t)
    dk_t = None if layer.fixed_keys else dS_t.mT @ q
    dv_t = torch.zeros_like(v) if O_t is not None else at.P.mT @ dO_t
    product = layer.qkv_transposed(at.tile, Heads(dS_t @ k, dk_t, dv_t))
    product[:, layer.output_start :] = 0
    return product
