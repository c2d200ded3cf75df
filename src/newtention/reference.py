"""The whole method, naively: autograd only, one file, one sequence, one head at a time.

This is the oracle of the tests and the shortest definition of what Newtention computes.  The
library never imports it.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def forward(A1, A2, A3, X, Y, scale=1.0, bias=None, allowed=None):  # noqa: ANN001, ANN201
    """softmax(scale A1 X A2^T + bias) A3 Y: (n, d1), (m, d2), (m, d3) -> (n, p); sums heads."""
    heads_X, heads_Y = (W if W.ndim == 3 else W[None] for W in (X, Y))  # (h, d1, d2), (h, d3, p)
    out = 0.0
    for h in range(heads_X.shape[0]):
        S = scale * A1 @ heads_X[h] @ A2.T  # (n, m)
        if bias is not None:
            S = S + (bias if bias.ndim == 2 else bias[h if bias.shape[0] > 1 else 0])
        if allowed is not None:
            S = S.masked_fill(~allowed, -torch.inf)
        S = S - S.max(1, keepdim=True).values.detach()
        P = torch.exp(S) / torch.exp(S).sum(1, keepdim=True)  # D(X)^-1 exp(...)
        out = out + P @ A3 @ heads_Y[h]
    return out


def data_loss(sequences, X, Y, scale=1.0):  # noqa: ANN001, ANN201
    """1/2 sum q_j ||F_j - B_j||^2 over sequences: dicts with A1, A2, A3, B and optional entries."""
    total = 0.0
    for s in sequences:
        F = forward(s["A1"], s["A2"], s["A3"], X, Y, scale, s.get("bias"), s.get("allowed"))
        q = s.get("weight", torch.ones_like(s["B"][:, 0]))
        total = total + 0.5 * (q * (F - s["B"]).square().sum(1)).sum()
    return total


def ridge(X, Y, x, y):  # noqa: ANN001, ANN201
    """x/2 ||X||^2 + y/2 ||Y||^2."""
    return 0.5 * x * X.square().sum() + 0.5 * y * Y.square().sum()


def token_weights(sequences, X, Y):  # noqa: ANN001, ANN201
    """1/2 ||A1 X A2^T W||^2 + 1/2 ||W A3 Y||^2, summed over sequences (entry "w") and heads."""
    total = 0.0
    for s in sequences:
        w = s["w"]
        total = total + 0.5 * (s["A1"] @ X @ s["A2"].T * w).square().sum()
        total = total + 0.5 * (w[:, None] * (s["A3"] @ Y)).square().sum()
    return total


def proximity(sequences, X, Y, X0, Y0, strength):  # noqa: ANN001, ANN201
    """Strength n/2 (mean over pairs of (a1^T dX a2)^2 + mean over values of ||a3^T dY||^2)."""
    A1, A2, A3 = (torch.cat([s[k] for s in sequences]) for k in ("A1", "A2", "A3"))
    n, m = len(A1), len(A2)
    logits = A1 @ (X - X0) @ A2.T  # over all pairs of tokens, across sequences
    values = A3 @ (Y - Y0)
    return 0.5 * strength * n * (logits.square().sum() / (n * m) + values.square().sum() / m)


def flat(X: Tensor, Y: Tensor) -> Float[Tensor, " N"]:
    """vec: all X head by head, then all Y, row-major."""
    return torch.cat([X.reshape(-1), Y.reshape(-1)])


def derivatives(loss, X: Tensor, Y: Tensor):  # noqa: ANN001, ANN201
    """(value, gradient (N,), Hessian (N, N)) of loss(X, Y) by torch.func in the flat vector."""
    nx = X.numel()

    def of_flat(theta: Tensor) -> Tensor:
        return loss(theta[:nx].reshape(X.shape), theta[nx:].reshape(Y.shape))

    theta = flat(X, Y)
    gradient = torch.func.grad(of_flat)
    return of_flat(theta), gradient(theta), torch.func.jacfwd(gradient)(theta)
