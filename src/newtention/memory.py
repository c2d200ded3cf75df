"""How much memory a solve needs, known before anything is allocated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from newtention.chunks import TILE_ELEMENTS
from newtention.layers import AttentionMap, Bilinear

DENSE_MATRICES = 5.5
"""Nx x Nx matrices alive while the trust-region step is computed: the scaled Hessian, its shifted
copy, the factor, the copy of it that `cholesky_solve` makes and the factor of the previous
multiplier; the half is temporaries.  Measured 4.9 to 6.1 (tests/unit/test_memory.py)."""
_ASSEMBLED = 2
_MIXED_MATRICES = 3
"""Nx x Nx and Nx x Ny matrices alive while Y is eliminated: H_xx and the Schur complement; H_xy,
its transposed copy and H_xy H_yy^-1/2."""
_TILES = 8
"""Intermediates of a tile."""
WORKSPACE = 32 << 20
"""Buffers of BLAS and LAPACK."""


def newton_bytes(
    layer: Bilinear | AttentionMap, members: int, itemsize: int, tile: int = TILE_ELEMENTS
) -> int:
    """Peak bytes of a dense Newton solve with so many members in the batch.

    tile: elements of the widest intermediate of a pass over the data.
    """
    nx, ny = layer.size_x, layer.size_y
    step = DENSE_MATRICES * nx * nx
    elimination = _ASSEMBLED * nx * nx + _MIXED_MATRICES * nx * ny
    dense = members * max(step, elimination)
    return int(itemsize * (dense + _TILES * tile)) + WORKSPACE


def hessian_bytes(
    layer: Bilinear | AttentionMap, members: int, itemsize: int, tile: int = TILE_ELEMENTS
) -> int:
    """Peak bytes of forming the exact Hessian and its dense matrix."""
    nx, ny = layer.size_x, layer.size_y
    assembly = 2.75 * nx * nx + 3 * nx * ny  # packed triangle, unpacked rows, one block, the result
    dense = nx * nx + nx * ny + layer.size**2
    return int(itemsize * (members * max(assembly, dense) + _TILES * tile))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside it, while they live.

    now: bytes alive.  peak: the most since it began or was restarted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def restart(self) -> int:
        """Forget the peak so far; returns the bytes alive."""
        self.peak = self.now
        return self.now

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation and count the storage of its results, unless it is an argument's."""
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for t in _tensors(result):
            storage = t.untyped_storage()
            key = storage._cdata
            if key not in given and key not in self._known:
                self._known.add(key)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, key, storage.nbytes())
        return result

    def _freed(self, key: int, count: int) -> None:
        self._known.discard(key)
        self.now -= count


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


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
