"""The Hessian or Gauss-Newton matrix at a point as a linear operator that never forms it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from newtention.derivatives.products import Kind, hessian_product
from newtention.display import Displayed, Table
from newtention.inputs import as_like, shape_text
from newtention.memory import require_memory
from newtention.notation import Array, ArrayLike
from newtention.weights import Weights

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator


@dataclass(frozen=True, eq=False)
class CurvatureOperator(Displayed):
    """H at a point of one problem; ``op @ v`` for v (N,) or (N, k).

    Products take NumPy arrays and torch tensors and return the same kind, in the problem's dtype.
    One product costs about two gradients and no more memory than one.

    weights: the point, of a problem.
    kind: "full" or "gauss-newton".
    """

    weights: Weights
    kind: Kind

    @property
    def shape(self) -> tuple[int, int]:
        """(N, N)."""
        n = self.weights.layer.size
        return n, n

    @property
    def dtype(self) -> torch.dtype:
        """The problem's dtype."""
        return self.weights.theta.dtype

    def __matmul__(self, vectors: ArrayLike) -> Array:
        """H v, or H V column by column.

        Raises:
            ValueError: a length other than N, NaN or infinity.
        """
        w = self.weights
        v = as_like("The vector", vectors, w.theta)
        if v.ndim not in (1, 2) or v.shape[0] != w.layer.size or v.numel() == 0:
            raise ValueError(
                f"The operator takes vectors of length {w.layer.size}, as (N,) or (N, k); "
                f"found {shape_text(v.shape)}."
            )
        columns = v.reshape(1, len(v), -1).mT
        product = hessian_product(w.problem, w.layer, w.theta, columns, self.kind)
        result = product[0].mT.reshape(v.shape)
        return result if isinstance(vectors, Tensor) else result.cpu().numpy()

    def to_dense(self) -> Array:
        """The (N, N) matrix, by N products.

        Raises:
            MemoryError: it does not fit into free memory.
        """
        n, theta = self.weights.layer.size, self.weights.theta
        require_memory(
            f"A dense matrix of {n} unknowns",
            2 * n * n * theta.element_size(),
            theta.device,
            "products with the operator do not form it.",
        )
        H = self @ torch.eye(n, dtype=theta.dtype, device=theta.device)
        return self.weights.problem.present(torch.as_tensor(H))

    def to_scipy(self) -> LinearOperator:
        """The operator for ``scipy.sparse.linalg`` (eigsh, minres, ...); needs scipy."""
        from scipy.sparse.linalg import LinearOperator

        operator = self

        class Products(LinearOperator):
            """Symmetric, so that the adjoint is the operator itself."""

            def _matmat(self, X: np.ndarray) -> np.ndarray:
                return np.asarray(operator @ np.asarray(X))

            def _matvec(self, x: np.ndarray) -> np.ndarray:
                return np.asarray(operator @ np.asarray(x).reshape(-1))

            _rmatvec, _rmatmat = _matvec, _matmat

        return Products(np.float64 if self.dtype == torch.float64 else np.float32, self.shape)

    def _table(self) -> Table:
        w = self.weights
        blocks = ", ".join(f"{b.name} {shape_text(b.shape)}" for b in w.layer.blocks)
        rows = [
            ("Matrix", "Hessian" if self.kind == "full" else "Gauss-Newton matrix"),
            ("Size", shape_text(self.shape)),
            ("Unknowns", blocks),
            ("Numbers", f"{str(self.dtype)[6:]} on {w.theta.device}"),
            ("Problem", repr(w.problem)),
        ]
        return Table("CurvatureOperator", rows)

    def __repr__(self) -> str:
        """Size and kind."""
        return f"CurvatureOperator({shape_text(self.shape)}, {self.kind})"
