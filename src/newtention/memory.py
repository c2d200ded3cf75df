"""How much memory a dense solve needs, known before anything is allocated."""

from __future__ import annotations

import psutil
import torch

from newtention.chunks import TILE_ELEMENTS
from newtention.layers import Bilinear

_DENSE_MATRICES = 5
"""Nx x Nx matrices alive at the peak of a solve: H_xx and its packed form, the reduced Hessian
and its scaled copy, the shifted matrix with its factor (counted from the code, checked in the
tests)."""
_MIXED_MATRICES = 3
"""Nx x Ny matrices alive at the peak: H_xy as summed, H_xy in order, and H_xy H_yy^-1/2."""
_TILES = 8
"""Intermediates of a tile."""


def newton_bytes(layer: Bilinear, members: int, itemsize: int) -> int:
    """Peak bytes of a dense Newton solve with so many members in the batch."""
    nx, ny = layer.size_x, layer.size_y
    dense = members * (_DENSE_MATRICES * nx * nx + _MIXED_MATRICES * nx * ny)
    return itemsize * (dense + _TILES * TILE_ELEMENTS)


def hessian_bytes(layer: Bilinear, members: int, itemsize: int) -> int:
    """Peak bytes of forming the exact Hessian and its dense matrix."""
    nx, ny = layer.size_x, layer.size_y
    dense = members * (2 * nx * nx + 2 * nx * ny + layer.size**2)
    return itemsize * (dense + _TILES * TILE_ELEMENTS)


def available_bytes(device: torch.device) -> int:
    """Free memory on the device the data lives on."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def require_memory(what: str, needed: int, device: torch.device, alternative: str) -> None:
    """Raise MemoryError with bytes needed and available, and what would fit."""
    available = available_bytes(device)
    if needed > available:
        raise MemoryError(
            f"{what} needs {readable(needed)} but {readable(available)} are free on {device}; "
            f"{alternative}"
        )


def readable(count: int) -> str:
    """Bytes with a binary unit."""
    value = float(count)
    units = iter(("bytes", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while value >= 1024 and unit != "TiB":
        value /= 1024
        unit = next(units)
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
