"""Least squares with fewer features or of lower rank, from Gram matrices alone, in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.linsolve.pseudo_inverse import gram_inverse

JITTER = 1e-10
"""Added to the unit diagonal of a Gram matrix whose features are ranked: duplicates leave it
singular, and then either of two equal features may go."""


class LinearFit(NamedTuple):
    """Least squares F ~ O W + b: means over the rows, about the means if there is a constant b.

    mean_O and mean_F are zero if there is none.
    """

    gram: Float[Tensor, "k k"]
    cross: Float[Tensor, "k p"]
    mean_O: Float[Tensor, " k"]
    mean_F: Float[Tensor, " p"]

    @classmethod
    def of_moments(
        cls, gram: Float[Tensor, "a a"], cross: Float[Tensor, "a p"], constant: bool
    ) -> LinearFit:
        """From the means of (O, 1)^T (O, 1) and (O, 1)^T F."""
        mean_O, mean_F = float(constant) * gram[-1, :-1], float(constant) * cross[-1]
        return cls(
            gram[:-1, :-1] - mean_O[:, None] * mean_O,
            cross[:-1] - mean_O[:, None] * mean_F,
            mean_O,
            mean_F,
        )

    def mixed(
        self, share: float, moment: Float[Tensor, "k k"], W: Float[Tensor, "k p"]
    ) -> LinearFit:
        """With a share of rows with F = O W, and the second moment of O given."""
        gram = (1 - share) * self.gram + share * moment
        cross = (1 - share) * self.cross + share * moment @ W
        return self._replace(gram=gram, cross=cross)

    def mapped(self, T: Float[Tensor, "k l"]) -> LinearFit:
        """For the features O T."""
        return LinearFit(T.mT @ self.gram @ T, T.mT @ self.cross, self.mean_O @ T, self.mean_F)

    def solve(self, W: Float[Tensor, "k p"]) -> Float[Tensor, "k p"]:
        """The minimiser nearest to W; the second correction takes the first one's rounding away."""
        inverse = gram_inverse(self.gram[None])
        for _ in range(2):
            W = W + inverse.solve((self.cross - self.gram @ W)[None])[0]
        return W

    def constant(self, W: Float[Tensor, "k p"]) -> Float[Tensor, " p"]:
        """The best b beside W."""
        return self.mean_F - self.mean_O @ W

    def misfit(self, W: Float[Tensor, "k p"]) -> float:
        """Mean square error with the best b, less the mean square of F."""
        return float((W * (self.gram @ W - 2 * self.cross)).sum())


def eliminate(
    gram: Float[Tensor, "b k k"],
    cross: Float[Tensor, "b k p"],
    size: int,
    groups: int,
    count: int,
) -> list[int]:
    """Backward elimination in least squares: the indices of the units that stay, ascending.

    The k features form units of `size` features, the units `groups` of equal size, and `count`
    units of each stay.  Removing the unit u from the solution W = G^-1 c raises the squares by
    tr(W_u^T (G^-1)_uu^-1 W_u); the unit of the least rise, summed over the batch, goes first.  Such
    a greedy choice is exact for one removal, and for all where units are uncorrelated.
    """
    scale = gram.diagonal(dim1=1, dim2=2)
    scale = torch.where(scale > 0, scale, 1.0).rsqrt()[..., None]
    unit = gram * scale * scale.mT
    # Features that are zero get a diagonal all the same.
    lift = 1 - unit.diagonal(dim1=1, dim2=2).sign() + JITTER
    inverse = torch.linalg.inv(unit + torch.diag_embed(lift))
    W = inverse @ (cross * scale)
    units = list(range(gram.shape[-1] // size))
    per_group = len(units) // groups
    while len(units) > groups * count:
        blocks = inverse.unflatten(1, (-1, size)).unflatten(3, (-1, size))
        blocks = blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)
        parts = W.unflatten(1, (-1, size))
        rise = (parts * torch.linalg.solve(blocks, parts)).sum((0, 2, 3))
        left = [sum(v // per_group == u // per_group for v in units) for u in units]
        rise[[n == count for n in left]] = torch.inf
        worst = int(rise.argmin())
        gone = slice(worst * size, (worst + 1) * size)
        stay = [i for i in range(W.shape[1]) if not gone.start <= i < gone.stop]
        across = torch.linalg.solve(inverse[:, gone, gone], inverse[:, gone][:, :, stay]).mT
        W = W[:, stay] - across @ W[:, gone]
        inverse = inverse[:, stay][:, :, stay] - across @ inverse[:, gone][:, :, stay]
        del units[worst]
    return units


def balanced(
    left: Float[Tensor, "b e e"], right: Float[Tensor, "b e e"], rank: int
) -> tuple[Float[Tensor, "b e r"], Float[Tensor, "b e r"]]:
    """A and B (e, rank) that minimise tr((I - A B^T)^T left (I - A B^T) right).

    With U s V^T the leading part of the SVD of left^T/2 right^1/2, that is
    A = right^1/2 V s^-1/2, B = left^1/2 U s^-1/2 (Tombs and Postlethwaite 1987): no inverse of
    either moment, and A^T left A = B^T right B = s.
    """
    roots = []
    for moment in (left, right):
        values, vectors = torch.linalg.eigh(moment)
        roots.append(vectors * values.clamp(min=0).sqrt()[:, None])
    U, s, Vh = torch.linalg.svd(roots[0].mT @ roots[1])
    # Directions that the activations do not reach are left out: zero columns.
    reached = s > s[:, :1] * s.shape[-1] * torch.finfo(s.dtype).eps
    inverse = torch.where(reached, s, torch.inf).rsqrt()[:, None, :rank]
    return roots[1] @ Vh.mT[..., :rank] * inverse, roots[0] @ U[..., :rank] * inverse


def block_reduced_rank(
    gram: Float[Tensor, "k k"],
    cross: Float[Tensor, "k p"],
    W: Float[Tensor, "k p"],
    groups: int,
    size: int,
    rank: int,
    sweeps: int,
) -> tuple[Float[Tensor, "g s r"], Float[Tensor, "l p"]]:
    """Least squares F ~ O W where the blocks of W share a column space of low rank.

    O holds groups of blocks of `size` features; every block of a group goes through the group's
    map C (size, rank) before it meets a W of its own.  One group after another is fitted to what
    the others leave, by reduced-rank regression (Izenman 1975), starting from the full W: exact
    for groups of one block, by the sum of the blocks' moments for larger ones.  C is scaled so that
    O C and the new W share the size of their product.

    Returns:
        C by group, and the new W (l = blocks * rank rows).
    """
    p = W.shape[1]
    W = W.clone()  # in terms of the old features; of the lower rank in groups that are done
    C = list(W.new_zeros(groups, size, rank))
    narrow = list(W.new_zeros(groups, len(W) // size // groups * rank, p))
    rows = torch.arange(len(W), device=W.device).view(groups, -1)
    for own, i in [*zip(rows, range(groups), strict=True)] * sweeps:
        G = gram[own][:, own]
        R = cross[own] - gram[own] @ W + G @ W[own]
        M = gram_inverse(G[None]).solve(R[None])[0]  # the group's best map at full rank
        M = M.view(-1, size, p).transpose(0, 1).flatten(1)
        blocks = G.unflatten(0, (-1, size)).unflatten(2, (-1, size))
        moment = blocks.diagonal(dim1=0, dim2=2).sum(-1)
        inverse = gram_inverse(moment[None]).root[0]
        K = inverse.mT @ moment @ M
        energy, U = torch.linalg.eigh(K @ K.mT)
        C[i] = inverse @ U[:, -rank:] * energy[-rank:].clamp(min=0) ** 0.25
        T = torch.block_diag(*[C[i]] * (len(own) // size))
        narrow[i] = gram_inverse((T.mT @ G @ T)[None]).solve((T.mT @ R)[None])[0]
        W[own] = T @ narrow[i]
    return torch.stack(C), torch.cat(narrow)
