"""Problems with known properties, for tests and benchmarks.

Every generator draws from a `torch.Generator` on the CPU seeded with its `seed`, so that a problem
is the same on every machine and device.  Unless said otherwise a problem is self-attention of one
sequence of n tokens of width d, A1 = A2 = A3, with targets of width d.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

import torch
from jaxtyping import Float
from safetensors.torch import load
from torch import Tensor

from newtention.functions import loss, predict
from newtention.newton.starts import logit_spread
from newtention.problem import AttentionProblem

Tokens = Literal["gaussian", "clustered", "real"]

CLUSTERS = 8
CLUSTER_SPREAD = 0.3
"""Standard deviation of clustered tokens around their centre, relative to that of the centres."""
SATURATION = 500.0
"""Largest logit of `saturated`: exp(500) is finite in float64 and overflows in float32."""


@dataclass(frozen=True, eq=False)
class Specimen:
    """A problem and the weights at which its property holds.

    X: (d1, d2), or (h, d1, d2) for several heads; None when nothing is known.
    Y: (d3, p), or (h, d3, p).
    loss: total loss at (X, Y).
    """

    problem: AttentionProblem
    X: Tensor | None
    Y: Tensor | None
    loss: float | None


def planted(
    d: int,
    n: int,
    noise: float = 0.0,
    tokens: Tokens = "gaussian",
    scale: float = 1.0,
    seed: int = 0,
    heads: int = 1,
    dtype: torch.dtype = torch.float64,
) -> Specimen:
    """Targets made by Gaussian weights: a minimum of loss 0, or near one with noise.

    Args:
        d: width of tokens and targets.
        n: tokens.
        noise: standard deviation of the noise on the targets, relative to their root mean square.
        tokens: "gaussian"; "clustered", around 8 centres; "real", the leading d <= 32 directions of
            the packaged MiniLM head's first n <= 1204 tokens.
        scale: root mean square of the planted logits, centred over keys.
        seed: of all draws.
        heads: 1 gives 2-D weights.
        dtype: of the data.

    Returns:
        The problem with its plant: X (h, d, d) and Y (h, d, d), without h for one head.

    Gaussian tokens make the layer nearly linear in X Y, so the plant is rarely recovered from them;
    real and clustered tokens are better behaved.
    """
    generator = torch.Generator().manual_seed(seed)
    A = _tokens(tokens, n, d, generator)
    return _planted(A, A, d, noise, scale, heads, dtype, generator)


def rank_deficient(
    d: int, n: int, rank: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Specimen:
    """A zero-residual plant on tokens (n, d) of the given rank: X and Y have null directions."""
    generator = torch.Generator().manual_seed(seed)
    A = _gaussian(generator, n, rank) @ _gaussian(generator, rank, d) / rank**0.5
    return _planted(A, A, d, 0.0, 1.0, 1, dtype, generator)


def saturated(d: int, n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Specimen:
    """A zero-residual plant whose largest logit is 500: most rows attend to one key only."""
    generator = torch.Generator().manual_seed(seed)
    A = _gaussian(generator, n, d)
    X = _gaussian(generator, d, d)
    X = X * (SATURATION / (A @ X @ A.T).abs().max())
    return _specimen(A, A, X, _gaussian(generator, d, d), 0.0, dtype, generator)


def saddle(d: int, n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Specimen:
    """X = 0 with its best Y has a zero gradient and an indefinite Hessian.

    Keys (n, d) come in pairs a, -a and values (n, 1) are even in them, so at uniform attention
    Cov(a2, a3) = 0: the gradient in X vanishes, and so do the mixed block and the Gauss-Newton
    matrix.  What is left is H_xx = sum_j C_j a1_j a1_j^T (x) Y Cov(a2 a2^T, a3).  Values grow with
    the square of the keys' first coordinate and targets (n, 1) with the difference of squares of
    the queries' first two, which gives both signs.  n is even, d at least 2.
    """
    if n % 2 or d < 2:
        raise ValueError(f"saddle needs an even n and d of at least 2; found n {n}, d {d}.")
    generator = torch.Generator().manual_seed(seed)
    A1, half = _gaussian(generator, n, d), _gaussian(generator, n // 2, d)
    A2 = torch.cat([half, -half])
    A3 = 1.0 + A2[:, :1].square()
    B = 1.0 + A1[:, :1].square() - A1[:, 1:2].square()
    X = torch.zeros(d, d, dtype=torch.float64)
    Y = (B.mean() / A3.mean()).reshape(1, 1)
    A1, A2, A3, B, X, Y = (t.to(dtype) for t in (A1, A2, A3, B, X, Y))
    problem = AttentionProblem(A1, A2, A3, B)
    return Specimen(problem, X, Y, float(loss(problem, X, Y)))


def one_key(d: int, n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Specimen:
    """n queries and a single key: P = 1, so every X is a solution and the loss is quadratic in Y.

    Targets (n, d) are noise around one planted value; the returned Y attains their mean, hence the
    minimum.
    """
    generator = torch.Generator().manual_seed(seed)
    A1, A2 = _gaussian(generator, n, d), _gaussian(generator, 1, d)
    B = _gaussian(generator, 1, d) + 0.1 * _gaussian(generator, n, d)
    X = _gaussian(generator, d, d)
    Y = A2.T @ B.mean(0, keepdim=True) / A2.square().sum()
    A1, A2, B, X, Y = (t.to(dtype) for t in (A1, A2, B, X, Y))
    problem = AttentionProblem(A1, A2, A2, B)
    return Specimen(problem, X, Y, float(loss(problem, X, Y)))


def duplicate_tokens(d: int, n: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Specimen:
    """A zero-residual plant on n tokens of which every one occurs twice (n even)."""
    if n % 2:
        raise ValueError(f"duplicate_tokens needs an even n; found {n}.")
    generator = torch.Generator().manual_seed(seed)
    A = _gaussian(generator, n // 2, d).repeat(2, 1)
    return _planted(A, A, d, 0.0, 1.0, 1, dtype, generator)


@cache
def packaged_head() -> tuple[Float[Tensor, "N 32"], Float[Tensor, "N 32"], tuple[int, ...]]:
    """Tokens, head outputs and sequence offsets of the packaged MiniLM head, in float64.

    Source: all-MiniLM-L6-v2 (Apache-2.0), layer 3, head 4, on 40 sentences; see NOTICE.
    """
    file = resources.files("newtention") / "examples" / "minilm_head.safetensors"
    data = load(file.read_bytes())
    return data["tokens"].double(), data["head_output"].double(), tuple(data["offsets"].tolist())


def _tokens(kind: Tokens, n: int, d: int, generator: torch.Generator) -> Float[Tensor, "n d"]:
    if kind == "gaussian":
        return _gaussian(generator, n, d)
    if kind == "clustered":
        centres = _gaussian(generator, CLUSTERS, d)
        which = torch.randint(CLUSTERS, (n,), generator=generator)
        return centres[which] + CLUSTER_SPREAD * _gaussian(generator, n, d)
    if kind == "real":
        tokens, _, _ = packaged_head()
        if n > len(tokens) or d > tokens.shape[1]:
            raise ValueError(
                f"Real tokens come in {len(tokens)} rows of width {tokens.shape[1]}; "
                f"found n {n}, d {d}."
            )
        directions = torch.linalg.svd(tokens, full_matrices=False).Vh[:d]
        A = tokens[:n] @ directions.T
        return A / A.square().mean().sqrt()
    raise ValueError(f'tokens must be "gaussian", "clustered" or "real"; found {kind!r}.')


def _planted(
    A1: Float[Tensor, "n d1"],
    A2: Float[Tensor, "m d2"],
    p: int,
    noise: float,
    scale: float,
    heads: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Specimen:
    d1, d2 = A1.shape[1], A2.shape[1]
    X = _gaussian(generator, heads, d1, d2)
    zero = A1.new_zeros(len(A1), p)
    spread = logit_spread(AttentionProblem(A1, A2, A2, zero), X[None])[0]
    X = X * (scale / spread)[:, None, None]
    Y = _gaussian(generator, heads, d2, p) / (heads * d2) ** 0.5
    if heads == 1:
        X, Y = X[0], Y[0]
    return _specimen(A1, A2, X, Y, noise, dtype, generator)


def _specimen(
    A1: Float[Tensor, "n d1"],
    A2: Float[Tensor, "m d2"],
    X: Tensor,
    Y: Tensor,
    noise: float,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Specimen:
    """Round to dtype first, so that the plant is exact in the arithmetic of the problem."""
    shared = A1 is A2
    A1, X, Y = A1.to(dtype), X.to(dtype), Y.to(dtype)
    A2 = A1 if shared else A2.to(dtype)
    F = predict(AttentionProblem(A1, A2, A2, A1.new_zeros(len(A1), Y.shape[-1])), X, Y)
    assert isinstance(F, Tensor)  # tensors in, tensors out
    drawn = _gaussian(generator, *F.shape).to(dtype)
    B = F + noise * F.square().mean().sqrt() * drawn if noise else F
    problem = AttentionProblem(A1, A2, A2, B)
    return Specimen(problem, X, Y, float(loss(problem, X, Y)))


def _gaussian(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
