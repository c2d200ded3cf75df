"""Sampling query rows: a smaller problem whose loss and derivatives are right on average.

All sums over the data are sums over query rows, so k rows drawn with probabilities p_j and weighted
by 1 / (k p_j) give the loss, gradient, Hessian and Gauss-Newton matrix without bias.  Draws are
stratified: one row from each of k parts of equal probability, which varies no more than k
independent draws.

Row j adds a1_j a1_j^T (x) Rho_j Rho_j^T to the Gauss-Newton matrix.  Its leverage scores are
modelled by those of sqrt(q_j e_j) a1_j with e_j = sum_h tr Cov_{P_j}(k_h) tr Cov_{P_j}(v_h), an
upper bound of ||Rho_j||_F^2 (Cauchy-Schwarz) that a pass over the data gives: a row whose attention
is saturated counts for little, however long it is, and a direction that few rows show is not
missed.  Half of the probability is uniform, which bounds the weights by twice the uniform ones.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from newtention.chunks import Chunk
from newtention.derivatives.linearised import Linearised
from newtention.layers import Evaluation
from newtention.layout import Layout
from newtention.linsolve.pseudo_inverse import gram_inverse
from newtention.problem import AttentionProblem

Scores = Literal["leverage", "uniform"]

WHOLE = 0.7
"""Share of the rows from which all of them are taken."""
LEAST_ROWS = 64
"""Rows of a sequence that are taken together at least: its keys and values are processed anew for
each sequence, which fewer rows would not repay."""


def sampled(point: Linearised, rows: int, scores: Scores, seed: int) -> AttentionProblem:
    """About `rows` query rows of one problem, weighted so that sums over rows keep their means.

    Whole sequences are chosen first (evenly over the lengths) where they are short, then rows of
    each.  The regulariser stays as it is; rows have an order of their own, by sequence.
    """
    problem = point.problem
    total, count = sum(problem.layout.queries), len(problem.layout.queries)
    if rows >= WHOLE * total:
        return problem
    part = problem.sample(max(rows / total, min(1.0, rows / (LEAST_ROWS * count))))
    share = rows / sum(float(chunk.query_count()) for chunk in part.chunks)
    if share >= 1:
        return part
    if scores == "leverage":
        energies = row_energies(Linearised(part, point.layer, point.theta))
        masses = _leverage(part, energies)
    else:
        masses = [torch.ones_like(chunk.weight) for chunk in part.chunks]
    generator = torch.Generator().manual_seed(seed)
    chunks = tuple(
        _rows_of(chunk, share, mass, generator)
        for chunk, mass in zip(part.chunks, masses, strict=True)
    )
    return part.with_chunks(chunks, _layout(chunks, problem.layout))


def row_energies(point: Linearised) -> list[Tensor]:
    """q_j e_j of every row of every chunk of one problem."""
    rows = torch.cat([_energy(at).flatten() for at in point.evaluations()])
    parts = rows.split([chunk.weight.numel() for chunk in point.problem.chunks])
    return [
        part.view_as(chunk.weight) for part, chunk in zip(parts, point.problem.chunks, strict=True)
    ]


def _energy(at: Evaluation) -> Float[Tensor, "1 s n"]:
    k, v = at.heads.k, at.heads.v
    assert k is not None
    assert v is not None
    spread = _spread(at.P, k, at.P @ k) * _spread(at.P, v, at.O)
    return spread.sum(2) * at.tile.weight


def _spread(
    P: Float[Tensor, "o s h n m"],
    t: Float[Tensor, "o s #h m e"] | None,
    mean: Float[Tensor, "o s h n e"],
) -> Float[Tensor, "o s h n"]:
    """Trace of the covariance of t under each row's attention weights; None is the identity."""
    second = P.sum(-1) if t is None else (P @ t.square().sum(-1, keepdim=True))[..., 0]
    return (second - mean.square().sum(-1)).clamp(min=0)


def _leverage(problem: AttentionProblem, energies: list[Tensor]) -> list[Tensor]:
    """Leverage scores of the rows sqrt(energy_j) a1_j."""
    scaled = [
        chunk.A1.double() * energy.double().sqrt()[..., None]
        for chunk, energy in zip(problem.chunks, energies, strict=True)
    ]
    gram = torch.stack([(rows.mT @ rows).sum((0, 1)) for rows in scaled]).sum(0)
    root = gram_inverse(gram[None]).root[0]
    return [(rows @ root).square().sum(-1) for rows in scaled]


def _rows_of(
    chunk: Chunk, share: float, mass: Float[Tensor, "1 s n"], generator: torch.Generator
) -> Chunk:
    """A share of the rows of every sequence of a chunk, half by their mass, half evenly."""
    n = chunk.weight.shape[2]
    k = max(1, round(share * n))
    if k >= n:
        return chunk
    real = (torch.arange(n) < chunk.query_lengths.cpu()[..., None]).double()
    even = real / real.sum(-1, keepdim=True)
    mass = mass.cpu().double() * real
    total = mass.sum(-1, keepdim=True)
    own = torch.where(total > 0, mass / total.where(total > 0, torch.ones_like(total)), even)
    p = 0.5 * (even + own)
    index = stratified(p, k, generator)
    weight = 1 / (k * p.gather(-1, index))
    index, weight = index.to(chunk.owner.device), weight.to(chunk.weight)
    return chunk.pick(index, chunk.weight.gather(-1, index) * weight)


def stratified(
    p: Float[Tensor, "*rows n"], k: int, generator: torch.Generator
) -> Int[Tensor, "*rows k"]:
    """k draws from each distribution, one from every k-th part of its mass; float64 on the CPU.

    Entry j is drawn k p_j times on average, never if p_j = 0.
    """
    u = torch.rand(*p.shape[:-1], k, generator=generator, dtype=torch.float64)
    sums = p.cumsum(-1)
    at = (torch.arange(k) + u) / k * sums[..., -1:]
    return torch.searchsorted(sums, at, right=True).clamp(max=p.shape[-1] - 1)


def _layout(chunks: tuple[Chunk, ...], whole: Layout) -> Layout:
    """Sequences in the order of the chunks."""
    order, queries, keys = [], [], []
    for chunk in chunks:
        s, m = chunk.A2.shape[1:3]
        order.append(tuple(range(len(queries), len(queries) + s)))
        queries += chunk.query_lengths[0].tolist()
        lengths = chunk.mask.key_lengths
        keys += [m] * s if lengths is None else lengths[0].tolist()
    return whole._replace(
        kind="ragged", order=tuple(order), queries=tuple(queries), keys=tuple(keys), padded=0
    )
