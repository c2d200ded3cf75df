"""Staying near a factored layer: a Kronecker quadratic around each of its maps.

With means over all tokens (a constant 1 beside the tokens of a map with a bias), E1, E2, E3 the
second moments of the inputs, K, Q, V those of the reference's keys, queries and values per head, s
the logit scale and g_h = tr(W_O,h^T V_h W_O,h) the mean square of what head h puts out at most, the
penalty is strength n/2 times the sum over heads of

    s^2 g_h <dW_Q, E1 dW_Q K_h> + s^2 g_h <dW_K, E2 dW_K Q_h>     of a logit, times the output
    + <dW_V, E3 dW_V W_O,h W_O,h^T> + <dW_O, V_h dW_O>            of the output

Each term is the mean square change of the output that moving one map alone would cause at most, to
first order and over independent pairs of tokens; n is the number of query tokens, so that a
strength of 1 weighs it like the data loss.  Rotary positions enter K and Q by their mean over all
turns: the two features of a pair share their power.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.inputs import as_like
from newtention.layers import Factored, Rotary
from newtention.problem import AttentionProblem
from newtention.regularizers import FlatQuadratic, Proximity, token_moments


def proximity(problem: AttentionProblem, layer: Factored, around: Proximity) -> FlatQuadratic:
    """The quadratic for layers of the reference's shape; one pass over the tokens.

    Raises:
        ValueError: the reference has another shape.
    """
    reference = around.reference
    if reference.parametrisation != layer:
        raise ValueError(
            "Proximity(reference=) must be a layer of the shape, scale and positions of the fitted "
            f"one; found {reference!r}."
        )
    centre = as_like("Proximity(reference=)", reference.theta, problem.like)[None]
    terms = _terms(problem, layer, centre, around.isotropic)
    blocks = {block.name: block for block in layer.blocks}
    strength, count = around.strength, _count(problem)

    def curvature(direction: Float[Tensor, "b N"]) -> Float[Tensor, "b N"]:
        parts = {}
        w = layer.unpack(direction)
        for name, left, right in terms:
            bias = "b_" + name[2:] if name != "W_O" else None
            W = w[name]
            if bias in blocks:
                W = torch.cat([W, w[bias][:, :, None]], 2)
            W = strength * (left @ W if right is None else left @ W @ right)
            if bias in blocks:
                W, parts[bias] = W[:, :, :-1], W[:, :, -1]
            parts[name] = W
        if layer.out_bias:
            # b_O is the bias of all heads together; its own term is the mean square of its change.
            parts["b_O"] = strength * count * w["b_O"]
        return layer.pack(parts, direction)

    V = next(left for name, left, _ in terms if name == "W_O")
    gram = torch.block_diag(*V, *([V.new_full((1, 1), count)] * layer.out_bias))
    return FlatQuadratic(curvature, strength * gram[None], centre)


def _count(problem: AttentionProblem) -> float:
    return float(sum(chunk.query_lengths.sum() for chunk in problem.chunks))


def _terms(
    problem: AttentionProblem, layer: Factored, centre: Float[Tensor, "1 N"], isotropic: bool
) -> list[tuple[str, Float[Tensor, "#h d d"], Float[Tensor, "#h e e"] | None]]:
    """(name, left, right) of every map; left carries the number of query tokens.

    right is None where it is the identity.
    """
    w = {name: t[0] for name, t in layer.unpack(centre).items()}
    group = layer.heads // layer.kv_heads
    S1, S2, S3, n, m = token_moments(problem.chunks)
    means = token_means(problem, n, m)
    E = {
        name: _with_constant(S[0] / count, mean, "b_" + name in w)
        for name, S, count, mean in zip("QKV", (S1, S2, S3), (n, m, m), means, strict=True)
    }

    def moment(name: str) -> Float[Tensor, "h e e"]:
        W = w["W_" + name]
        if "b_" + name in w:
            W = torch.cat([W, w["b_" + name][:, None]], 1)
        result = W.mT @ E[name] @ W
        return result if name == "V" else _turned(result, layer.rotary)

    def repeat(t: Tensor) -> Tensor:
        return t.repeat_interleave(group, 0)

    def summed(t: Tensor) -> Tensor:
        return t.unflatten(0, (layer.kv_heads, group)).sum(1)

    Q, K, V = moment("Q"), repeat(moment("K")), repeat(moment("V"))
    W_O = w["W_O"]
    size = (V @ W_O * W_O).sum((1, 2))  # g_h
    factor = (problem.scale * layer.scale) ** 2 * size[:, None, None]
    terms = [
        ("W_Q", n * E["Q"][None], factor * K),
        ("W_K", n * E["K"][None], summed(factor * Q)),
        ("W_V", n * E["V"][None], summed(W_O @ W_O.mT)),
    ]
    if isotropic:
        terms = [(name, _isotropic(a, "b_" + name[2:] in w), _isotropic(b)) for name, a, b in terms]
        V = _isotropic(V)
    return [*terms, ("W_O", n * V, None)]


def token_means(
    problem: AttentionProblem, n: float, m: float
) -> tuple[Float[Tensor, " d1"], Float[Tensor, " d2"], Float[Tensor, " d3"]]:
    """Mean query, key and value token of one problem."""
    sums = [[c.A1.sum((0, 1, 2)), c.A2.sum((0, 1, 2)), c.A3.sum((0, 1, 2))] for c in problem.chunks]
    first, second, third = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))
    return first / n, second / m, third / m


def _with_constant(
    E: Float[Tensor, "d d"], mean: Float[Tensor, " d"], bias: bool
) -> Float[Tensor, "k k"]:
    """The second moment of the tokens, or of the tokens and a constant 1."""
    if not bias:
        return E
    top = torch.cat([E, mean[:, None]], 1)
    return torch.cat([top, torch.cat([mean, mean.new_ones(1)])[None]])


def _turned(t: Float[Tensor, "h e e"], rotary: Rotary | None) -> Float[Tensor, "h e e"]:
    """The mean over all turns of the pairs: their power shared, no products between them."""
    if rotary is None:
        return t
    first, second = rotary.split(t.diagonal(dim1=1, dim2=2))
    power = 0.5 * (first + second)
    return torch.diag_embed(rotary.join(power, power))


def _isotropic(t: Float[Tensor, "#h d d"], constant: bool = False) -> Float[Tensor, "#h d d"]:
    """The identity of equal trace; the constant's own entry stays."""
    d = t.diagonal(dim1=1, dim2=2)
    mean = (d[:, :-1] if constant else d).mean(1, keepdim=True).expand_as(d).clone()
    if constant:
        mean[:, -1] = d[:, -1]
    return torch.diag_embed(mean)
