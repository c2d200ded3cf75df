"""The interface of all sketches: a distribution, a sampled sketch, and its application.

A sketch S is a random matrix of `size` rows with E[S^T S] = I.  It acts on Kronecker products
A1 (x) A2 of n1 n2 rows, row j n2 + k being kron(A1[j], A2[k]), without forming them, and on any
matrix of n1 n2 rows.  With n2 = 1 it is an ordinary sketch of n1 rows.

Every draw is made on the CPU, in int64 or float64, by a generator of the distribution's own, and
cast afterwards: the same seed gives the same S on every device and in every dtype.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.inputs import require_count
from newtention.notation import Array, ArrayLike
from newtention.sketch.arguments import factors


@dataclass(frozen=True)
class Distribution(ABC):
    """A kind of sketch with its sizes.

    n1, n2: rows of the two factors.  size: rows of the sketch.  seed: of all its draws; 0 to
    2^32 - 1, since the CPU generator of torch keeps 32 bits.

    Raises:
        ValueError: an argument is no integer, or out of range.

    Warns:
        UserWarning: the sketch has more rows than what it sketches.
    """

    name: ClassVar[str]

    n1: int
    n2: int = 1
    size: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {"n1": 1, "n2": 1, "size": 1, "seed": 0}
        for name, least in limits.items():
            object.__setattr__(self, name, require_count(name, getattr(self, name), least))
        if self.seed >= 1 << 32:
            raise ValueError(f"seed must be below 2^32; found {self.seed}.")
        if self.size > self.n1 * self.n2:
            warnings.warn(
                f"A sketch of size={self.size} does not compress the {self.n1 * self.n2} rows of "
                "A1 (x) A2.  Sizes by formula often exceed them on small problems; "
                "sketch.calibrate measures one.",
                stacklevel=3,
            )

    @abstractmethod
    def sample(self, A1: ArrayLike | None = None, A2: ArrayLike | None = None) -> Sketch:
        """Draw S.  Only a sketch that depends on the data looks at A1 (n1, d1) and A2 (n2, d2)."""

    def apply(self, A1: ArrayLike, A2: ArrayLike | None = None) -> Array:
        """S (A1 (x) A2), (size, d1 d2); see `Sketch.apply`."""
        return self.sample(A1, A2).apply(A1, A2)

    def apply_left(self, M: ArrayLike) -> Array:
        """S M, (size, c); see `Sketch.apply_left`."""
        return self.sample().apply_left(M)

    def adjoint(self, Z: ArrayLike) -> Array:
        """S^T Z, (n1 n2, c); see `Sketch.adjoint`."""
        return self.sample().adjoint(Z)

    def to_dense(self) -> Float[Tensor, "size n1n2"]:
        """S itself, for tests."""
        return self.sample().to_dense()

    def generator(self) -> torch.Generator:
        """A new generator, on the CPU, at the seed."""
        return torch.Generator().manual_seed(self.seed)


@dataclass(frozen=True, eq=False, repr=False)
class Sketch(ABC):
    """A matrix S (size, n1 n2) that was drawn, in factored form.

    Arrays may be torch or NumPy and come back as such; float32 and float64 are kept, other real
    types are promoted with a warning.  Every method raises a ValueError for a wrong shape and for
    NaN or infinity, and a TypeError for complex numbers, mixed dtypes or devices.

    n1, n2: rows of the two factors.
    size: rows of S.
    """

    n1: int
    n2: int
    size: int

    def apply(self, A1: ArrayLike, A2: ArrayLike | None = None) -> Array:
        """S (A1 (x) A2), (size, d1 d2), for A1 (n1, d1) and A2 (n2, d2).

        Without A2 (n2 = 1) S A1.
        """
        if A2 is None:
            if self.n2 != 1:
                raise ValueError(f"A2 is missing: it must have {self.n2} rows.")
            return self.apply_left(A1)
        (t1, t2), numpy = factors({"A1": (A1, self.n1), "A2": (A2, self.n2)})
        out = self._kronecker(t1, t2)
        return out.numpy() if numpy else out

    def apply_left(self, M: ArrayLike) -> Array:
        """S M, (size, c), for M (n1 n2, c)."""
        (t,), numpy = factors({"M": (M, self.n1 * self.n2)})
        out = self._left(t)
        return out.numpy() if numpy else out

    def adjoint(self, Z: ArrayLike) -> Array:
        """S^T Z, (n1 n2, c), for Z (size, c)."""
        (t,), numpy = factors({"Z": (Z, self.size)})
        out = self._adjoint(t)
        return out.numpy() if numpy else out

    def to_dense(self) -> Float[Tensor, "size n1n2"]:
        """S itself in float64, for tests."""
        return self._left(torch.eye(self.n1 * self.n2, dtype=torch.float64))

    def __repr__(self) -> str:
        """Sizes."""
        return f"{type(self).__name__}(n1 {self.n1}, n2 {self.n2}, size {self.size})"

    @abstractmethod
    def _kronecker(
        self, A1: Float[Tensor, "n1 d1"], A2: Float[Tensor, "n2 d2"]
    ) -> Float[Tensor, "size d1d2"]: ...

    @abstractmethod
    def _left(self, M: Float[Tensor, "n1n2 c"]) -> Float[Tensor, "size c"]: ...

    @abstractmethod
    def _adjoint(self, Z: Float[Tensor, "size c"]) -> Float[Tensor, "n1n2 c"]: ...
