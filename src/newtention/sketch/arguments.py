"""Checks of the arguments of sketches."""

from __future__ import annotations

import operator
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


def integer(name: str, value: int, least: int) -> int:
    """An integer that is at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer; found {value!r}.") from None
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer; found {value!r}.")
    if number < least:
        raise ValueError(f"{name} must be at least {least}; found {number}.")
    return number
