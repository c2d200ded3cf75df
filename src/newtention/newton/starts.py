"""Starting points.

X0 = c R R^T / d with R Gaussian where queries and keys have the same width, so that a token starts
by attending to tokens like itself; Gaussian where the widths differ.  c makes the root mean square
of the logits, centred over each query's allowed keys, equal to `scale`: the start is the same
whatever the units of the tokens.  docs/choices.md holds the measurements behind this.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from newtention.chunks import Chunk, reduce
from newtention.derivatives.linearised import forward_elements
from newtention.layers import Bilinear
from newtention.problem import AttentionProblem

START_SCALE = 2.0
"""Default root mean square of the centred logits; see the module's measurement."""


def random_start(
    problem: AttentionProblem, heads: int, seed: int, draw: int = 0, scale: float = START_SCALE
) -> Float[Tensor, "b h d1 d2"]:
    """Draw number `draw` of this seed: one X for all independent problems, but for its scale."""
    d1, d2, _, _ = problem.widths
    # Independent streams: the second start of seed 0 is not the first of seed 1.
    (state,) = np.random.SeedSequence([seed, draw]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(state >> 1))
    R = torch.randn(heads, d1, d2, generator=generator, dtype=torch.float64)
    X = R @ R.mT / d1 if d1 == d2 else R
    X = X.to(problem.like).expand(problem.batch, heads, d1, d2)
    spread = logit_spread(problem, X)
    factor = torch.where(spread > 0, scale / spread.where(spread > 0, torch.ones_like(spread)), 1.0)
    return X * factor[:, :, None, None]


def logit_spread(problem: AttentionProblem, X: Float[Tensor, "b h d1 d2"]) -> Float[Tensor, "b h"]:
    """Root mean square of scale A1 X A2^T, centred over each query's allowed keys."""

    def tile_sums(tile: Chunk) -> tuple[Tensor, Tensor]:
        S = tile.queries[:, :, None] @ tile.of(X)[:, None] @ tile.A2[:, :, None].mT
        rows = tile.weight > 0
        allowed = tile.allowed
        pairs = rows[..., None].expand(*rows.shape, S.shape[-1])
        pairs = pairs if allowed is None else pairs & allowed
        keep = pairs[:, :, None].to(S.dtype)
        mean = (S * keep).sum(-1, keepdim=True) / keep.sum(-1, keepdim=True).clamp(min=1)
        square = ((S - mean).square() * keep).sum((1, 3, 4))
        return square, keep.sum((1, 3, 4)).expand_as(square)

    square, count = reduce(
        problem.chunks,
        problem.batch,
        tile_sums,
        forward_elements(problem, Bilinear(X.shape[1], *problem.widths)),
    )
    return (square / count.clamp(min=1)).sqrt()
