"""The dense Hessian in closed form against automatic differentiation."""

from __future__ import annotations

import torch
from torch import Tensor

import newtention as nt
from benchmarks.harness import Size, alternate, ratios, show, spread, table
from newtention import reference, zoo

AIM = {"n": 256, "d": 24, "ratio": 300.0}
OURS = "newtention"
NAIVE = "torch.func.hessian"
FAIR = "jacfwd of our gradient"
CHUNKED = "the same in chunks of 32"

CASES = {
    "toy": [(16, 2, True), (16, 3, False)],
    "quick": [(256, 8, True), (256, 16, True), (1024, 32, False)],
    "full": [(256, 8, True), (256, 16, True), (256, 24, True), (1024, 64, False)],
}
REPEATS = {"toy": 1, "quick": 5, "full": 15}


def run(size: Size) -> dict:
    """Seconds per Hessian, and how far the matrices differ."""
    cases = []
    for n, d, rivals in CASES[size]:
        problem = zoo.planted(d, n, noise=0.1, seed=0).problem
        generator = torch.Generator().manual_seed(1)
        X, Y = (torch.randn(d, d, generator=generator, dtype=torch.float64) / d for _ in range(2))
        methods = {OURS: lambda p=problem, X=X, Y=Y: nt.hessian(p, X, Y).to_dense()}
        if rivals:
            methods |= autograd(problem, X, Y)
        H = methods[OURS]()
        errors = {
            name: float((make() - H).abs().max() / H.abs().max())
            for name, make in methods.items()
            if name != OURS
        }
        assert all(e < 1e-12 for e in errors.values()), f"the Hessians differ: {errors}"
        samples = alternate(methods, REPEATS[size], patience=2.0)
        cases.append(
            {
                "n": n,
                "d": d,
                "unknowns": 2 * d * d,
                "seconds": {name: spread(times) for name, times in samples.items()},
                "ratios": ratios(samples, OURS),
                "errors": errors,
            }
        )
    return {"cases": cases, "aim": AIM}


def autograd(problem: nt.AttentionProblem, X: Tensor, Y: Tensor) -> dict:
    """The same matrix by torch.func: from the naive loss, and from our closed-form gradient."""
    (chunk,) = problem.chunks
    A1, A2, A3, B = (t[0, 0] for t in (chunk.A1, chunk.A2, chunk.A3, chunk.B))
    theta = reference.flat(X, Y)
    k = X.numel()

    def loss(t: Tensor) -> Tensor:
        sequences = [{"A1": A1, "A2": A2, "A3": A3, "B": B}]
        return reference.data_loss(sequences, t[:k].view_as(X), t[k:].view_as(Y))

    def gradient(t: Tensor) -> Tensor:
        X_, Y_ = t[:k].view_as(X), t[k:].view_as(Y)
        P = torch.softmax(A1 @ X_ @ A2.T, 1)
        V = A3 @ Y_
        F = P @ V
        C = F - B
        T = P * (C @ V.T - (F * C).sum(1, keepdim=True))
        return reference.flat(A1.T @ (T @ A2), (P @ A3).T @ C)

    def column(v: Tensor) -> Tensor:
        return torch.func.jvp(gradient, (theta,), (v,))[1]

    basis = torch.eye(len(theta), dtype=theta.dtype)
    return {
        NAIVE: lambda: torch.func.hessian(loss)(theta),
        FAIR: lambda: torch.func.jacfwd(gradient)(theta),
        # Few tangents at a time stay in the caches.
        CHUNKED: lambda: torch.func.vmap(column, chunk_size=32)(basis),
    }


def report(data: dict) -> str:
    """The table."""
    rows = []
    for case in data["cases"]:
        for name, s in case["seconds"].items():
            ratio = case["ratios"].get(name, {})
            rows.append(
                [case["n"], case["d"], name, show(s["median"]), show(s["lower"]), show(s["upper"])]
                + [show(ratio.get(k)) for k in ("median", "lower", "upper")]
                + [show(case["errors"].get(name), 1)]
            )
    header = ["n", "d", "method", "seconds", "25 %", "75 %", "ratio", "25 %", "75 %", "difference"]
    aim = data["aim"]
    goal = f"Aim: {NAIVE} at least {aim['ratio']:.0f} times ours at n {aim['n']}, d {aim['d']}."
    return f"{table(header, rows)}\n{goal}"
