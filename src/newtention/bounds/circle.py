"""Polynomials with nonnegative coefficients in u, z >= 0, and their maximum on the unit circle."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Form = dict[tuple[int, int], float]
"""A polynomial with nonnegative coefficients: (power of u, power of z) to coefficient."""


def circle_maximum(form: Form, tolerance: float = 0.01) -> float:
    """A proved upper bound of a form's maximum over u^2 + z^2 = 1, u, z >= 0, near it by tolerance.

    The form grows with u and z, so on the arc between angles t_i < t_(i+1) it is at most its value
    at u = cos t_i, z = sin t_(i+1).  Arcs are halved until the largest such value exceeds the
    largest value on the circle by the tolerance only.
    """
    scale = max(form.values(), default=0.0)
    if scale == 0 or not math.isfinite(scale):
        return scale
    cells = 256
    while True:
        angle = torch.linspace(0, math.pi / 2, cells + 1, dtype=torch.float64)
        u, z = angle.cos().clamp_min(0), angle.sin()
        upper = lower = 0.0
        for (i, k), c in form.items():
            upper = upper + (c / scale) * u[:-1] ** i * z[1:] ** k
            lower = lower + (c / scale) * u**i * z**k
        assert isinstance(upper, Tensor)
        assert isinstance(lower, Tensor)
        if float(upper.max()) <= (1 + tolerance) * float(lower.max()):
            return float(upper.max()) * scale
        cells *= 2


def add(*forms: Form) -> Form:
    """The sum of forms."""
    total: Form = {}
    for form in forms:
        for key, c in form.items():
            total[key] = total.get(key, 0.0) + c
    return total


def times(left: Form | float, right: Form) -> Form:
    """The product of two forms, or of a number and a form."""
    if not isinstance(left, dict):
        left = {(0, 0): left}
    total: Form = {}
    for (i, k), c in left.items():
        for (i2, k2), c2 in right.items():
            key = i + i2, k + k2
            total[key] = total.get(key, 0.0) + c * c2
    return total
