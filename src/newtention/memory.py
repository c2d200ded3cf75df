"""How much memory a dense solve needs, known before anything is allocated."""

from __future__ import annotations

import psutil
import torch

from newtention.chunks import TILE_ELEMENTS
from newtention.derivatives.linearised import evaluation_bytes
from newtention.layers import Bilinear, Parametrisation
from newtention.problem import AttentionProblem

_DENSE_MATRICES = 5.5
"""Nx x Nx matrices alive while the trust-region step is computed: the scaled Hessian, its shifted
copy, the factor, the copy of it that `cholesky_solve` makes and the factor of the previous
multiplier; the half is temporaries.  Measured 4.9 to 6.1 (tests/unit/test_memory.py)."""
_ASSEMBLED = 2
_MIXED_MATRICES = 3
"""Nx x Nx and Nx x Ny matrices alive while Y is eliminated: H_xx and the Schur complement; H_xy,
its transposed copy and H_xy H_yy^-1/2."""
_TILES = 8
"""Intermediates of a tile."""
_VECTORS = 28
"""Vectors of unknowns alive in a matrix-free step: the path's, those of conjugate gradients, the
gradient, the trial point and the factors of the preconditioner."""
_WORKSPACE = 32 << 20
"""Buffers of BLAS and LAPACK."""


def newton_bytes(layer: Bilinear, members: int, itemsize: int, tile: int = TILE_ELEMENTS) -> int:
    """Peak bytes of a dense Newton solve with so many members in the batch.

    tile: elements of the widest intermediate of a pass over the data.
    """
    nx, ny = layer.size_x, layer.size_y
    step = _DENSE_MATRICES * nx * nx
    elimination = _ASSEMBLED * nx * nx + _MIXED_MATRICES * nx * ny
    dense = members * max(step, elimination)
    return int(itemsize * (dense + _TILES * tile)) + _WORKSPACE


def hessian_bytes(layer: Bilinear, members: int, itemsize: int, tile: int = TILE_ELEMENTS) -> int:
    """Peak bytes of forming the exact Hessian and its dense matrix."""
    nx, ny = layer.size_x, layer.size_y
    assembly = 2.75 * nx * nx + 3 * nx * ny  # packed triangle, unpacked rows, one block, the result
    dense = nx * nx + nx * ny + layer.size**2
    return int(itemsize * (members * max(assembly, dense) + _TILES * tile))


def matrix_free_bytes(
    problem: AttentionProblem, layer: Parametrisation, members: int, cached: bool
) -> int:
    """Peak bytes of a matrix-free solve beside the data."""
    singles = problem.parts or (problem,)
    itemsize = problem.like.element_size()
    kept = max(evaluation_bytes(p, layer) for p in singles) if cached else 0
    rows = max(sum(c.weight.numel() for c in p.chunks) for p in singles)
    tile = max(min(TILE_ELEMENTS, evaluation_bytes(p, layer) // itemsize) for p in singles)
    output = layer.output_rows
    width = (layer.size - layer.output_start) // output
    vectors = (_VECTORS + members) * layer.size + rows * width
    return int(kept + itemsize * (vectors + _TILES * tile) + 8 * 4 * output**2) + _WORKSPACE


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
