"""The fits of a path: one problem in float64 under a ridge on X, and what its attention is like."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from newtention.api import Options, solve
from newtention.attention import attention_logits
from newtention.chunks import Chunk, map_rows
from newtention.derivatives.linearised import forward_elements
from newtention.functions import loss
from newtention.inputs import as_like, require_count, require_shape
from newtention.newton.stopping import default_tol
from newtention.notation import ArrayLike
from newtention.problem import AttentionProblem
from newtention.regularizers import Ridge
from newtention.solution import Solution
from newtention.weights import Weights, as_weights

RESOLUTION = 1e-6
"""Error of X relative to ||X|| that the default tolerance allows, by the ridge's own curvature."""


class Fits(NamedTuple):
    """The problem in float64, the fixed Y if it has values, and the settings of every fit."""

    problem: AttentionProblem
    Y: Float[Tensor, "d3 p"] | None
    tol: float | None
    max_iter: int

    @classmethod
    def of(
        cls, problem: AttentionProblem, Y: ArrayLike | None, tol: float | None, max_iter: int
    ) -> Fits:
        """Check what the fits need."""
        require_count("max_iter", max_iter, 0)
        weights = problem.rows_from_chunks([c.weight[..., None] for c in problem.chunks])
        if any(bool((row == 0).any()) for row in problem.layout.split(weights)):
            raise ValueError("query_weights must be positive: a query of weight 0 selects nothing.")
        precise = problem.with_regularizer(None).cast(torch.float64)
        if problem.of_maps:
            if Y is not None:
                raise ValueError("Y must be left out: a fit of attention maps has X alone.")
            return cls(precise, None, tol, max_iter)
        if Y is None:
            raise ValueError("Y must be given for a problem with values: it is kept fixed.")
        y = as_like("Y", Y, precise.like)
        require_shape("Y", y, precise.widths[2:], "the value map of one head")
        return cls(precise, y, tol, max_iter)

    def as_X(self, X: ArrayLike) -> Float[Tensor, "d1 d2"]:
        """An X of the user or of a fit."""
        x = as_like("start", X, self.problem.like)
        require_shape("start", x, self.problem.widths[:2], "the shape of X")
        return x

    def weights(self, X: Float[Tensor, "d1 d2"]) -> Weights:
        """A point."""
        return as_weights(self.problem, X, self.Y)

    def solve(self, ridge: float, guesses: list[Tensor]) -> Solution:
        """The fit from the best of the guesses, or from X = 0."""
        problem = self.problem.with_regularizer(Ridge(x=ridge))
        zero = problem.like.new_zeros(problem.widths[:2])
        start = min(guesses, key=lambda X: loss(problem, X, self.Y)) if guesses else zero
        tol = self._resolving(ridge, float(start.norm())) if self.tol is None else self.tol
        weights = start if self.Y is None else (start, self.Y)
        # Along the path curvature falls with the ridge: Gauss-Newton would creep where it is small.
        options = Options(freeze=() if self.Y is None else ("Y",), curvature="full")
        return solve(problem, weights, tol=tol, max_iter=self.max_iter, options=options)

    def _resolving(self, ridge: float, size: float) -> float:
        """A tolerance on the decrement at which the ridge alone would show an error in X."""
        energy = float(self.problem.target_energy())
        tol = default_tol(torch.float64)
        if energy == 0 or size == 0:
            return tol
        return min(tol, RESOLUTION * size * math.sqrt(0.5 * ridge / energy))


class Look(NamedTuple):
    """What a fit's attention is like: the wanted keys' smallest lead, share, mean entropy."""

    lead: float
    share: float
    entropy: float


def look_at(fits: Fits, X: Tensor, wanted: Int[Tensor, " n"]) -> Look:
    """The logits of all queries, in tiles.

    wanted: their keys, in the layout of the problem's rows.
    """
    w = fits.weights(X)

    def rows(tile: Chunk) -> Float[Tensor, "1 s n 2"]:
        heads = w.layer.qkv(tile, w.theta)
        assert heads.k is not None
        logits = attention_logits(heads.q, heads.k, tile.bias, tile.allowed)[:, :, 0]
        key = tile.B.to(torch.int64)
        own = logits.gather(-1, key)[..., 0]
        rival = logits.scatter(-1, key, -torch.inf).amax(-1)
        lead = torch.where(rival == -torch.inf, torch.inf, own - rival)
        logs = logits.log_softmax(-1)
        entropy = -torch.where(logs == -torch.inf, 0.0, logs.exp() * logs).sum(-1)
        return torch.stack([lead, entropy], -1)

    elements = forward_elements(fits.problem, w.layer)
    chunks = with_keys(fits.problem, wanted)
    found = [map_rows(chunk, rows, elements) for chunk in chunks]
    table = torch.cat(fits.problem.layout.split(fits.problem.rows_from_chunks(found)))
    leads, entropies = table.unbind(-1)
    return Look(float(leads.min()), float((leads > 0).double().mean()), float(entropies.mean()))


def with_keys(problem: AttentionProblem, wanted: Int[Tensor, "*rows"]) -> list[Chunk]:
    """The chunks with every query's wanted key in place of its target, 0 in padded rows."""
    rows, chunks = problem.layout.split(wanted), []
    for places, chunk in zip(problem.layout.order, problem.chunks, strict=True):
        keys = chunk.weight.new_zeros(*chunk.weight.shape, 1)
        for place, i in enumerate(places):
            keys[0, place, : len(rows[i]), 0] = rows[i].to(keys)
        chunks.append(replace(chunk, B=keys))
    return chunks
