"""Checks of the arguments of sketches."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from newtention.inputs import as_tensors, require_shape
from newtention.notation import ArrayLike


def factors(arrays: Mapping[str, tuple[ArrayLike, int | None]]) -> tuple[list[Tensor], bool]:
    """Matrices with so many rows (None: any) of one dtype, and whether they were NumPy."""
    tensors, numpy = as_tensors({name: array for name, (array, _) in arrays.items()})
    for name, t in tensors.items():
        require_shape(name, t, (arrays[name][1], None), "rows x columns")
        if not t.numel():
            raise ValueError(f"{name} must have rows and columns; found none.")
    return list(tensors.values()), numpy


def require_fraction(name: str, value: float) -> None:
    """Raise ValueError unless value lies between 0 and 1."""
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1; found {value}.")
