"""Sketch and precondition: the Gauss-Newton matrix of a sample of the query rows, factored.

Conjugate gradients on the exact system converge at a rate that depends on the sample alone, not on
the conditioning of the data, and keep the accuracy of the exact system (the idea of Blendenpik:
Avron, Maymounkov, Toledo 2010).  The sample may be coarse, so it is computed in float32.
docs/methods.md measures when this pays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.derivatives.hessian import second_order
from newtention.derivatives.linearised import Linearised
from newtention.layers import Bilinear
from newtention.newton.varpro import eliminate_output
from newtention.problem import AttentionProblem
from newtention.sampling import sampled

ROWS_PER_UNKNOWN = 64
"""Equations of the sample (rows times outputs) for each entry of X.  A fit of 4096 clustered tokens
of width 32 took 162 products with 32 of them, 65 with 64 and 17 with all, 128: docs/methods.md."""
FLOOR = 1e-3
"""Added to the matrix, scaled to a unit diagonal: directions that the sample hardly shows."""


def default_rows(layer: Bilinear) -> int:
    """Query rows of the sample."""
    return -(-ROWS_PER_UNKNOWN * layer.size_x // layer.p)


@dataclass(frozen=True, eq=False)
class SampledInverse:
    """The inverse of the sampled matrix on X, the output map eliminated; zero on the rest.

    root: of the diagonal that scales it.  factor: Cholesky factor of the scaled matrix.
    """

    root: Float[Tensor, " Nx"]
    factor: Float[Tensor, "Nx Nx"]

    def solve(self, v: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """The approximate inverse times a vector."""
        nx = len(self.root)
        scaled = (v[:nx] / self.root)[:, None]
        # The length of a vector is no concern of the preconditioner; float32 has less range.
        size = scaled.abs().max().clamp(min=torch.finfo(v.dtype).tiny)
        x = torch.cholesky_solve((scaled / size).to(self.factor), self.factor)
        return torch.cat([(x.to(v) * size)[:, 0] / self.root, torch.zeros_like(v[nx:])])

    @classmethod
    def at(cls, point: Linearised, rows: int, seed: int) -> SampledInverse:
        """From about so many query rows at a point of one problem in the bilinear form."""
        sample = sampled(point, rows, "leverage", seed)
        inverse = cls._of(sample.cast(torch.float32), point)
        if bool(torch.isfinite(inverse.factor).all()):
            return inverse
        return cls._of(sample, point)  # beyond float32

    @classmethod
    def _of(cls, sample: AttentionProblem, point: Linearised) -> SampledInverse:
        layer = point.layer
        assert isinstance(layer, Bilinear)
        X, Y = layer.unpack(point.theta.to(sample.like))
        _, GX, GY, blocks = second_order(sample, X, Y, X.new_zeros(1))
        H = eliminate_output(blocks, GX, GY).hessian[0]
        del blocks
        diagonal = H.diagonal()
        root = torch.maximum(diagonal, FLOOR * diagonal.mean()).sqrt()
        root = torch.where(root > 0, root, torch.ones_like(root))
        H /= root[:, None]
        H /= root
        H.diagonal().add_(FLOOR)
        factor, failed = torch.linalg.cholesky_ex(H)
        if bool(failed):
            factor = torch.full_like(factor, torch.nan)
        return cls(root.to(point.theta), factor)
