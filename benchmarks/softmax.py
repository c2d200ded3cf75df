"""Softmax regression: success over starts, far starts, seconds at size, and scipy beside it."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import numpy as np
import torch
from scipy import optimize

import newtention as nt
from benchmarks.harness import Size, alternate, seconds, show, spread, table
from newtention.regression import starts
from newtention.regression.rescaled import Kind
from newtention.regression.rows import Rows
from newtention.regression.softmax import SoftmaxLoss

THREADS = 1
STARTS = {
    "toy": ((100, 4, 2.0, "softmax"),),
    "quick": (
        (1000, 20, 2.0, "softmax"),
        (1000, 20, 8.0, "softmax"),
        (1000, 20, 1.0, "exp"),
        (1000, 20, 4.0, "exp"),
    ),
}
STARTS["full"] = (*STARTS["quick"], (1000, 20, 1.0, "cosh"))
"""Rows, columns, root mean square of the planted logits, and form; 50 starts each."""
TIMED = {
    "toy": ((200, 5),),
    "quick": ((10_000, 20), (100_000, 100)),
    "full": ((10_000, 20), (100_000, 100), (2000, 500), (1_000_000, 20)),
}
"""Rows and columns; logits of root mean square 1, targets with noise of 0.1 in the logarithm."""
FAR = {"toy": (100.0,), "quick": (1000.0,), "full": (100.0, 1000.0)}
"""Largest logit of a start that knows nothing of the target."""
RIVAL = {"toy": ((200, 5),), "quick": ((1000, 20),), "full": ((1000, 20), (10_000, 50))}
REPEATS = {"toy": 1, "quick": 3, "full": 5}
SEEDS = {"toy": 1, "quick": 5, "full": 10}


def run(size: Size) -> dict:
    """The four parts."""
    return {
        "starts": [
            _success(*case, SEEDS[size], 5 if size == "toy" else 50) for case in STARTS[size]
        ],
        "far": [
            _far(logits, kind, SEEDS[size]) for logits in FAR[size] for kind in ("exp", "cosh")
        ],
        "timed": [_timed(n, d, REPEATS[size]) for n, d in TIMED[size]],
        "rival": [_rival(n, d, REPEATS[size]) for n, d in RIVAL[size]],
    }


def _problem(n: int, d: int, scale: float, noise: float, seed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    A, x = rng.standard_normal((n, d)), scale * rng.standard_normal(d) / d**0.5
    z = A @ x + noise * rng.standard_normal(n)
    return A, z, x


def _success(n: int, d: int, scale: float, form: str, seeds: int, count: int) -> dict:
    """Share of starts that find the planted weights, and of first starts over the problems."""
    shares, firsts, statuses = [], [], set()
    for seed in range(seeds):
        A, z, _ = _problem(n, d, scale, 0.0, seed)
        u = np.exp(z) if form != "cosh" else np.cosh(z)
        b = u / u.sum()
        # The first start is no random one, but for cosh.
        keywords = {"ridge": 1e-8, "rescaled": True, "kind": form} if form != "softmax" else {}
        found = nt.softmax_regression(A, b, n_init=count, **keywords)
        losses = np.array(found.start_losses)
        least = losses.min() if form != "softmax" else 0.0
        good = losses <= least + 1e-9 * (0.5 * b @ b if form == "softmax" else least + 1e-300)
        shares.append(float(good.mean()) if _is_planted(found, b) else 0.0)
        firsts.append(bool(good[0]) and _is_planted(found, b))
        statuses.add(found.status.name)
    return {
        "n": n,
        "d": d,
        "scale": scale,
        "form": form,
        "starts": count,
        "first": sum(firsts) / len(firsts),
        "share": spread(shares),
        "worst": min(shares),
        "statuses": sorted(statuses),
    }


def _far(logits: float, kind: Kind, seeds: int) -> dict:
    """Iterations from starts with large logits, led towards 0 and as they are."""
    counts: dict[str, list[int]] = {"led": [], "as given": []}
    same = []
    for seed in range(seeds):
        A, z, _ = _problem(100, 8, 1.0, 0.1, seed)
        u = np.exp(z) if kind == "exp" else np.cosh(z)
        start = np.random.default_rng(1000 + seed).standard_normal(8)
        start *= logits / np.abs(A @ start).max()
        losses = []
        for name, bound in (("led", starts.LARGE), ("as given", np.inf)):
            with mock.patch.object(starts, "LARGE", bound):
                found = nt.softmax_regression(
                    A,
                    u / u.sum(),
                    ridge=1e-3,
                    rescaled=True,
                    kind=kind,
                    start=start,
                    max_iter=5000,
                )
            counts[name].append(found.iterations)
            losses.append(found.log10_loss)
        same.append(losses[0] <= losses[1] + 1e-6)
    return {
        "logits": logits,
        "kind": kind,
        "no_worse": sum(same) / len(same),
        **{name: spread(values) for name, values in counts.items()},
    }


def _is_planted(found: nt.SoftmaxRegression, b: np.ndarray) -> bool:
    return bool(np.abs(np.asarray(found.fitted) - b).max() < 1e-6 * b.max())


def _timed(n: int, d: int, repeats: int) -> dict:
    """Seconds of a fit and of its certificate."""
    fits, proofs, iterations, distances = [], [], [], []
    for seed in range(repeats):
        A, z, _ = _problem(n, d, 1.0, 0.1, seed)
        b = np.exp(z) / np.exp(z).sum()
        found: list[nt.SoftmaxRegression] = []
        proved: list[nt.SoftmaxCertificate] = []
        fits.append(seconds(lambda A=A, b=b, to=found: to.append(nt.softmax_regression(A, b))))
        x = found[0].x
        proofs.append(
            seconds(lambda A=A, b=b, x=x, to=proved: to.append(nt.certify_softmax(A, b, x)))
        )
        iterations.append(found[0].iterations)
        distances.append(proved[0].distance)
    return {
        "n": n,
        "d": d,
        "fit": spread(fits),
        "iterations": spread(iterations),
        "certificate": spread(proofs),
        "distance": max(distances) if np.isfinite(distances).all() else None,
    }


def _rival(n: int, d: int, repeats: int) -> dict:
    """scipy's trust-exact on our derivatives, from the same start, to the same gradient."""
    A, z, _ = _problem(n, d, 1.0, 0.1, 0)
    b = np.exp(z) / np.exp(z).sum()
    tensors = (torch.from_numpy(A)[None], torch.from_numpy(b)[None])
    rows = Rows(*tensors, None, torch.zeros(1, dtype=torch.long), torch.zeros(1).double())
    objective = SoftmaxLoss.of(rows)
    # scipy asks for loss, gradient and Hessian at a point one by one: computed once.
    last: dict[bytes, tuple[float, np.ndarray, np.ndarray]] = {}

    def at(x: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        if x.tobytes() not in last:
            last.clear()
            found = objective.derivatives(
                torch.from_numpy(x)[None], torch.ones(1, dtype=torch.bool)
            )
            last[x.tobytes()] = (
                float(found.loss),
                found.gradient[0].numpy(),
                found.hessian[0].numpy(),
            )
        return last[x.tobytes()]

    ours = nt.softmax_regression(A, b)
    gtol = max(1e-15, ours.history[-1].gradient)

    def scipy() -> optimize.OptimizeResult:
        last.clear()
        return optimize.minimize(
            lambda x: at(x)[0],
            np.zeros(d),
            jac=lambda x: at(x)[1],
            hess=lambda x: at(x)[2],
            method="trust-exact",
            options={"gtol": gtol, "maxiter": 200},
        )

    theirs = scipy()
    rivals: dict[str, Callable[[], object]] = {
        "ours": lambda: nt.softmax_regression(A, b),
        "trust-exact": scipy,
    }
    samples = alternate(rivals, repeats, 60.0)
    return {
        "n": n,
        "d": d,
        "seconds": {name: spread(times) for name, times in samples.items()},
        "iterations": {"ours": ours.iterations, "trust-exact": int(theirs.nit)},
        "gradient": {
            "ours": ours.history[-1].gradient,
            "trust-exact": float(np.linalg.norm(theirs.jac)),
        },
    }


def report(data: dict) -> str:
    """Four tables."""
    success = table(
        [
            "n x d",
            "logits",
            "form",
            "first start",
            "starts",
            "found (median)",
            "worst problem",
            "ended",
        ],
        [
            [
                f"{c['n']} x {c['d']}",
                show(c["scale"]),
                c["form"],
                show(c["first"]),
                c["starts"],
                show(c["share"]["median"]),
                show(c["worst"]),
                ", ".join(c["statuses"]),
            ]
            for c in data["starts"]
        ],
    )
    far = table(
        ["largest logit", "form", "iterations", "as given", "ends no worse"],
        [
            [
                show(c["logits"]),
                c["kind"],
                *(show(c[name]["median"]) for name in ("led", "as given")),
                show(c["no_worse"]),
            ]
            for c in data["far"]
        ],
    )
    timed = table(
        ["n x d", "seconds", "iterations", "certificate, seconds", "distance at most"],
        [
            [
                f"{c['n']} x {c['d']}",
                show(c["fit"]["median"]),
                show(c["iterations"]["median"]),
                show(c["certificate"]["median"]),
                show(c["distance"], 2),
            ]
            for c in data["timed"]
        ],
    )
    rival = table(
        ["n x d", "method", "seconds", "iterations", "gradient"],
        [
            [
                f"{c['n']} x {c['d']}",
                name,
                show(c["seconds"][name]["median"]),
                c["iterations"][name],
                show(c["gradient"][name], 2),
            ]
            for c in data["rival"]
            for name in c["seconds"]
        ],
    )
    return "\n\n".join([success, far, timed, rival])
