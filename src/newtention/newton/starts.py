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
from newtention.layers import Bilinear, Factored
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
        return _centred_squares(tile, S)

    square, count = reduce(
        problem.chunks,
        problem.batch,
        tile_sums,
        forward_elements(problem, Bilinear(X.shape[1], *problem.widths)),
    )
    return (square / count.clamp(min=1)).sqrt()


def _centred_squares(
    tile: Chunk, S: Float[Tensor, "o s h n m"]
) -> tuple[Float[Tensor, "o h"], Float[Tensor, "o h"]]:
    """Sum of squares of logits about their row's mean over allowed keys, and their number."""
    rows = tile.weight > 0
    allowed = tile.allowed
    pairs = rows[..., None].expand(*rows.shape, S.shape[-1])
    pairs = pairs if allowed is None else pairs & allowed
    keep = pairs[:, :, None].to(S.dtype)
    mean = (S * keep).sum(-1, keepdim=True) / keep.sum(-1, keepdim=True).clamp(min=1)
    square = ((S - mean).square() * keep).sum((1, 3, 4))
    return square, keep.sum((1, 3, 4)).expand_as(square)


def random_layer(
    problem: AttentionProblem, shape: Factored, seed: int, draw: int = 0, scale: float = START_SCALE
) -> Float[Tensor, "1 N"]:
    """Draw number `draw` of this seed: Gaussian weights, biases 0.

    Queries and keys share their weights where their tokens have the same width, so that a token
    starts by attending to tokens like itself; their common size makes the root mean square of the
    centred logits of all heads equal to `scale`.  Outputs are left to the solver.
    """
    (state,) = np.random.SeedSequence([seed, draw]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(state >> 1))
    parts = {}
    for block in shape.blocks:
        if block.name.startswith("W"):
            t = torch.randn(block.shape, generator=generator, dtype=torch.float64)
            parts[block.name] = (t / block.shape[1] ** 0.5).to(problem.like)[None]
    if shape.d1 == shape.d2:
        parts["W_Q"] = parts["W_K"].repeat_interleave(shape.heads // shape.kv_heads, 1)
    theta = shape.pack(parts, problem.like[0, 0, :1])
    spread = _head_spread(problem, shape, theta)
    if spread > 0:
        size = (scale / spread) ** 0.5
        for name in ("W_Q", "W_K"):
            parts[name] = parts[name] * size
    return shape.pack(parts, problem.like[0, 0, :1])


def _head_spread(problem: AttentionProblem, shape: Factored, theta: Float[Tensor, "1 N"]) -> float:
    """Root mean square of the logits of all heads, centred over each query's allowed keys."""

    def tile_sums(tile: Chunk) -> tuple[Tensor, Tensor]:
        q, k, _ = shape.qkv(tile, theta)
        assert k is not None
        return _centred_squares(tile, q @ k.mT)

    square, count = reduce(problem.chunks, 1, tile_sums, forward_elements(problem, shape))
    return float((square / count.clamp(min=1)).mean().sqrt())
