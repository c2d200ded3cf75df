"""Regularisation paths: angle to the SVM and growth of X; where paths end; a real selection."""

from __future__ import annotations

import numpy as np

import newtention as nt
from benchmarks.harness import Size, seconds, show, spread, table
from newtention.examples import KEYPOINTS
from newtention.io import open_arrays

THREADS = 1
CASES = {
    "toy": ((6, 5, 3),),
    "quick": ((12, 9, 4), (64, 64, 8)),
    "full": ((12, 9, 4), (64, 64, 8), (256, 256, 16)),
}
"""Queries, keys, width; Gaussian tokens, selections that some X makes."""
SEEDS = {"toy": 1, "quick": 5, "full": 20}
WRONG_SEEDS = {"toy": 1, "quick": 20, "full": 80}
WRONG_CASE = (8, 7, 4)
WRONG_RIDGES = 10.0 ** -np.arange(5, 13)
LEADS = (1.0, 2.0, 3.5)
DIRECTIONS = {"toy": (), "quick": (12, 16, 32), "full": (12, 16, 32)}


def run(size: Size) -> dict:
    """Paths from X = 0, paths from the SVMs of other selections, and the keypoint matcher."""
    return {
        "cases": [_case(*shape, SEEDS[size]) for shape in CASES[size]],
        "wrong": _wrong(WRONG_SEEDS[size]),
        "keypoints": _keypoints(size),
    }


def planted(n: int, m: int, d: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gaussian tokens and a selection that some X makes."""
    rng = np.random.default_rng(seed)
    A1, A2 = rng.standard_normal((n, d)), rng.standard_normal((m, d))
    return A1, A2, (A1 @ rng.standard_normal((d, d)) @ A2.T).argmax(1)


def _case(n: int, m: int, d: int, seeds: int) -> dict:
    paths: list[nt.RegularisationPath] = []
    times = []
    for seed in range(seeds):
        problem = nt.selection_problem(*planted(n, m, d, seed))
        times.append(seconds(lambda p=problem: paths.append(nt.regularisation_path(p))))
    right = [path for path in paths if not path.wrong]
    angles, norms = (np.array([getattr(p, a) for p in right]) for a in ("angles", "norms"))
    products = angles * norms
    return {
        "n": n,
        "m": m,
        "d": d,
        "seeds": seeds,
        "right": len(right),
        "ridges": paths[0].ridges.tolist(),
        "converged": sum(s is nt.Status.CONVERGED for path in paths for s in path.statuses),
        "fits": sum(len(path.statuses) for path in paths),
        "angle": [spread(column) for column in angles.T],
        "norm": [spread(column) for column in norms.T],
        "product": [spread(column) for column in products.T],
        "product_change": spread(products[:, -1] / products[:, -7]),
        "growth": spread([p.growth / p.predicted_growth for p in right]),
        "seconds": spread(times),
    }


def _wrong(seeds: int) -> list[dict]:
    """Starts in the SVM of all queries but one, where that one selects a wrong key."""
    ends: list[tuple[float, str, float]] = []
    n = WRONG_CASE[0]
    for seed in range(seeds):
        A1, A2, wanted = planted(*WRONG_CASE, seed)
        for j in range(n):
            others = np.arange(n) != j
            svm = nt.attention_svm(A1[others], A2, wanted[others])
            problem = nt.selection_problem(A1, A2, wanted)
            there = nt.selected_tokens(problem, svm.X)
            lead = float(there.margins[j])
            if there.keys[j] == wanted[j] or lead < LEADS[0]:
                continue
            path = nt.regularisation_path(problem, WRONG_RIDGES, start=8 * svm.X)
            divided = path.wrong and min(path.last.weights[i] for i in path.wrong) < 0.9
            end = "divided" if divided else "other" if path.wrong else "right"
            ends.append((lead, end, float(path.last.angle or 90.0)))
    rows = []
    for low, high in zip(LEADS, (*LEADS[1:], np.inf), strict=True):
        own = [(end, angle) for lead, end, angle in ends if low <= lead < high]
        counts = {
            word: sum(end == word for end, _ in own) for word in ("right", "divided", "other")
        }
        angle = spread([angle for end, angle in own if end == "other"])
        rows.append({"lead": low, "starts": len(own), **counts, "angle": angle})
    return rows


def _keypoints(size: Size) -> dict:
    """What the queries of the packaged matcher select, and whether some X on less selects it."""
    file = open_arrays(KEYPOINTS)
    names = ("queries", "keys", "to_qk_W", "to_qk_b")
    queries, keys, W, b = (file.read(name).double().numpy() for name in names)
    W, scale = np.vstack([W, b]), 96**-0.5
    A1, A2, X = with_constant(queries), with_constant(keys), W @ W.T
    problem = nt.selection_problem(A1, A2, np.zeros(len(A1), int), scale=scale)
    found = nt.selected_tokens(problem, X)
    shuffled = np.random.default_rng(0).permutation(found.keys)
    rows = []
    selections = {"the layer's": found.keys, "shuffled": shuffled}
    for k in DIRECTIONS[size]:
        left, right = leading(queries, k), leading(keys, k)
        for name, wanted in selections.items():
            svm = nt.attention_svm(scale * left, right, wanted)
            rows.append({"directions": k, "keys": name, **_short(svm)})
    if size != "toy":
        rows.append({"directions": 96, "keys": "the layer's", **_short(found.svm())})
    if size == "full":
        svm = nt.attention_svm(scale * A1, A2, shuffled)
        rows.append({"directions": 96, "keys": "shuffled", **_short(svm)})
    return {
        "distinct": len(set(found.keys.tolist())),
        "weight": spread(found.weights),
        "margin": spread(found.margins),
        "smallest": float(found.relative_margins.min()),
        "angle": None if size == "toy" else found.angle,
        "svm": rows,
    }


def with_constant(tokens: np.ndarray) -> np.ndarray:
    """Tokens with a 1 appended, which takes the place of a bias."""
    return np.hstack([tokens, np.ones((len(tokens), 1))])


def leading(tokens: np.ndarray, k: int) -> np.ndarray:
    """The k leading directions of centred tokens, and the constant."""
    centred = tokens - tokens.mean(0)
    return with_constant(centred @ np.linalg.svd(centred, full_matrices=False)[2][:k].T)


def _short(svm: nt.AttentionSVM) -> dict:
    conflict = None if svm.conflict is None else len(svm.conflict.pairs)
    return {
        "status": svm.status.name,
        "margin": svm.margin,
        "support": len(svm.support),
        "conflict": conflict,
    }


def report(data: dict) -> str:
    """Three tables."""
    cases = [
        [
            f"{c['n']} x {c['m']} x {c['d']}",
            f"{c['right']} of {c['seeds']}",
            f"{c['converged']} of {c['fits']}",
            show(c["angle"][-7]["median"]),
            show(c["angle"][-1]["median"]),
            show(c["product_change"]["median"]),
            show(c["growth"]["median"]),
            show(c["seconds"]["median"]),
        ]
        for c in data["cases"]
    ]
    ridges = data["cases"][0]["ridges"]
    header = ["n x m x d", "right", "converged", f"angle at {ridges[-7]:.0e}"]
    header += [f"at {ridges[-1]:.0e}", "angle ||X||", "growth", "seconds"]
    wrong = [
        [
            f"{r['lead']:g}",
            *(r[name] for name in ("starts", "right", "divided", "other")),
            show(r["angle"]["median"]),
        ]
        for r in data["wrong"]
    ]
    k = data["keypoints"]
    svm = [
        [
            *(r[name] for name in ("directions", "keys", "status")),
            show(r["margin"]),
            r["support"],
            show(r["conflict"]),
        ]
        for r in k["svm"]
    ]
    return "\n".join(
        [
            "From X = 0; angle ||X||: over that six decades before; growth: over ||X_svm|| / 2.",
            table(header, cases),
            "From the SVM without one query, by that query's lead for a wrong key there:",
            table(["lead", "starts", "right", "divided", "other selection", "its angle"], wrong),
            f"Keypoints: {k['distinct']} keys selected; median weight "
            f"{show(k['weight']['median'])}, median lead {show(k['margin']['median'])}, smallest "
            f"lead / ||X|| {show(k['smallest'])}; the layer's X is {show(k['angle'])} degrees "
            "from its SVM.",
            table(["directions", "keys", "ended", "margin", "support pairs", "conflict"], svm),
        ]
    )
