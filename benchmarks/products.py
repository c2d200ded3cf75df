"""Hessian and Gauss-Newton products: cost in gradients, against autograd, and how it scales.

One product against one gradient of the same layer, with the evaluations kept and computed again;
against double backward through plain attention; and the time of a product while the number of
sequences, or their length, grows by a decade.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from benchmarks.harness import Size, alternate, ratios, show, spread, table
from benchmarks.product_peers import KEEP_ALL, Product, double_backward, random_point
from newtention.derivatives.gradient import data_loss_and_gradient
from newtention.derivatives.linearised import Linearised
from newtention.derivatives.products import data_product

SIZES: Mapping[str, dict] = {
    "toy": {"n": 32, "d": 4, "repeats": 2, "counts": (1, 2), "lengths": (8, 16), "length": 8},
    "quick": {
        "n": 1024,
        "d": 32,
        "repeats": 9,
        "counts": (16, 32, 64, 160),
        "lengths": (256, 512, 1024, 2560),
        "length": 128,
    },
    "full": {
        "n": 1024,
        "d": 32,
        "repeats": 31,
        "counts": (16, 32, 64, 128, 160),
        "lengths": (256, 512, 1024, 2048, 2560, 4096),
        "length": 128,
    },
}
PATIENCE = 5.0


def run(size: Size) -> dict:
    """All three comparisons."""
    setting = SIZES[size]
    n, d, repeats = setting["n"], setting["d"], setting["repeats"]
    cost = []
    for name, dtype in (
        ("bilinear", torch.float64),
        ("layer", torch.float64),
        ("layer", torch.float32),
    ):
        point = random_point(name, 1, n, d, dtype)
        cost.append({"form": name, "dtype": str(dtype)[6:], **_cost(point, repeats)})
    return {
        "n": n,
        "d": d,
        "cost": cost,
        "sequences": _scaling(setting["counts"], lambda s: (s, setting["length"]), d, repeats),
        "length": _scaling(setting["lengths"], lambda n: (1, n), d, repeats),
        "fixed_length": setting["length"],
    }


def _cost(point: Linearised, repeats: int) -> dict:
    """Ratios to one gradient, and of autograd's double backward to one product."""
    problem, layer, theta = point.problem, point.layer, point.theta
    kept = Linearised.at(problem, layer, theta, KEEP_ALL)
    v = torch.ones_like(theta)[:, None]
    rivals: dict[str, Callable[[], object]] = {
        "gradient": lambda: data_loss_and_gradient(point),
        "Hessian": lambda: data_product(point, v, "full"),
        "Hessian, kept": lambda: data_product(kept, v, "full"),
        "Gauss-Newton": lambda: data_product(point, v, "gauss-newton"),
        "Gauss-Newton, kept": lambda: data_product(kept, v, "gauss-newton"),
        "double backward": _double_backward(point),
    }
    samples = alternate(rivals, repeats, PATIENCE)
    return {
        "seconds": {name: spread(times) for name, times in samples.items()},
        "gradients": ratios(samples, "gradient"),
        "of_double_backward": ratios(samples, "double backward"),
    }


def _double_backward(point: Linearised) -> Product:
    """A Hessian product by autograd, checked against ours."""
    theirs = double_backward(point)
    own, other = data_product(point, torch.ones_like(point.theta)[:, None], "full")[0, 0], theirs()
    error = float((own - other).norm() / other.norm())
    limit = 1e-10 if other.dtype == torch.float64 else 1e-4
    if not error < limit:
        raise AssertionError(f"The products differ by {error:.1e}.")
    return theirs


def _scaling(
    values: tuple[int, ...], shape: Callable[[int], tuple[int, int]], d: int, repeats: int
) -> dict:
    """Seconds of one Gauss-Newton product, and the exponent of its growth."""
    points = {value: random_point("layer", *shape(value), d, torch.float32) for value in values}
    v = torch.ones_like(next(iter(points.values())).theta)[:, None]
    rivals = {
        str(value): lambda point=point: data_product(point, v, "gauss-newton")
        for value, point in points.items()
    }
    samples = alternate(rivals, repeats, PATIENCE)
    seconds = {name: spread(times) for name, times in samples.items()}
    middle = [seconds[str(value)]["median"] for value in values]
    upper = [i for i, value in enumerate(values) if value * 4 >= values[-1]]
    slope = np.polyfit(np.log([values[i] for i in upper]), np.log([middle[i] for i in upper]), 1)
    return {"values": list(values), "seconds": seconds, "exponent": float(slope[0])}


def report(data: dict) -> str:
    """Two tables and the exponents."""
    header = ["form", "type", *data["cost"][0]["gradients"]]
    rows = [
        [c["form"], c["dtype"], *(show(r["median"]) for r in c["gradients"].values())]
        for c in data["cost"]
    ]
    shares = [
        [
            c["form"],
            c["dtype"],
            *(
                show(c["of_double_backward"][name]["median"])
                for name in ("Hessian", "Hessian, kept", "Gauss-Newton", "Gauss-Newton, kept")
            ),
        ]
        for c in data["cost"]
    ]
    lines = [
        f"Time in gradients, n {data['n']}, d {data['d']} (medians of ratios in one repeat):",
        table(header, rows),
        "Time in autograd's double backward:",
        table(
            ["form", "type", "Hessian", "Hessian, kept", "Gauss-Newton", "Gauss-Newton, kept"],
            shares,
        ),
    ]
    for name, what in (("sequences", "number of sequences"), ("length", "length")):
        part = data[name]
        times = ", ".join(
            f"{v}: {show(part['seconds'][str(v)]['median'])} s" for v in part["values"]
        )
        lines.append(
            f"Growth with the {what}: exponent {part['exponent']:.2f} over the last factor of 4 "
            f"({times})"
        )
    return "\n".join(lines)
