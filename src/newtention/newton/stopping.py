"""When a member of the batch is done.  Tests are free of the scale of data and unknowns."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

DEFAULT_TOL = {torch.float64: 1e-10, torch.float32: 1e-4}
"""The decrement's rounding floor is a small multiple of eps ||C|| / ||B||."""


def default_tol(dtype: torch.dtype) -> float:
    """Tolerance on the relative Newton decrement for a floating type."""
    return DEFAULT_TOL[dtype]


def relative_decrement(
    decrease: Float[Tensor, " b"], energy: Float[Tensor, " b"]
) -> Float[Tensor, " b"]:
    """sqrt of a predicted decrease over 1/2 ||B||^2: the step's effect on the fit, relative to it.

    Where B = 0 the decrease itself stands under the root.
    """
    scale = torch.where(energy > 0, energy, torch.ones_like(energy))
    return (decrease.clamp(min=0) / scale).sqrt()


def converged(
    decrement: Float[Tensor, " b"],
    gradient: Float[Tensor, " b"],
    interior: Bool[Tensor, " b"],
    full_model: Bool[Tensor, " b"],
    tol: float,
) -> Bool[Tensor, " b"]:
    """Second-order test: the full Hessian is positive semidefinite (to rounding), its Newton step
    lies inside the region, and both the Newton decrement and the gradient in the scaled metric
    (the decrement that the Hessian's diagonal alone would give) are below tol.
    """
    return full_model & interior & (decrement <= tol) & (gradient <= tol)
