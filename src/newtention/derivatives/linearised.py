"""A problem at a point: what gradients and many Hessian products there have in common.

The evaluations of all tiles (queries, keys, values, attention weights, outputs) are kept when they
fit a budget, and computed again for every pass otherwise: slower, in memory that does not grow with
the data.  Both give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from newtention.chunks import Chunk, sum_by_owner
from newtention.layers import Bilinear, Evaluation, Parametrisation, evaluate
from newtention.problem import AttentionProblem


@dataclass(frozen=True, eq=False)
class Linearised:
    """A problem at theta; `at` builds it.

    kept: the evaluations of all tiles, or None if every pass computes them.
    """

    problem: AttentionProblem
    layer: Parametrisation
    theta: Float[Tensor, "b N"]
    kept: tuple[Evaluation, ...] | None = None

    @classmethod
    def at(
        cls,
        problem: AttentionProblem,
        layer: Parametrisation,
        theta: Float[Tensor, "b N"],
        budget: int = 0,
    ) -> Linearised:
        """The problem at theta; evaluations are kept if they take at most `budget` bytes."""
        fresh = cls(problem, layer, theta)
        if evaluation_bytes(problem, layer) > budget:
            return fresh
        return cls(problem, layer, theta, tuple(fresh.evaluations()))

    def with_output(self, theta: Float[Tensor, "b N"]) -> Linearised:
        """The same at weights that differ in the output map alone; kept evaluations are reused."""
        layer = self.layer

        def moved(at: Evaluation) -> Evaluation:
            heads, O = at.heads, at.O
            if isinstance(layer, Bilinear):  # its output map makes the values
                v = layer.qkv_tangent(at.tile, theta).v
                assert v is not None
                heads, O = heads._replace(v=v), at.P @ v
            return at.with_output(heads, O, layer.mix(at.tile, theta, O) - at.tile.B)

        kept = None if self.kept is None else tuple(map(moved, self.kept))
        return Linearised(self.problem, layer, theta, kept)

    def evaluations(self) -> Iterator[Evaluation]:
        """The evaluation of every tile, in order."""
        if self.kept is not None:
            yield from self.kept
            return
        elements = forward_elements(self.problem, self.layer)
        for chunk in self.problem.chunks:
            for tile in chunk.tiles(elements):
                yield evaluate(tile, self.layer, self.theta)

    def reduce(self, fn: Callable[[Evaluation], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Sum fn over all tiles by owner; see `newtention.chunks.reduce`."""

        def parts() -> Iterator[tuple[Chunk, tuple[Tensor, ...]]]:
            for at in self.evaluations():
                tile, values = at.tile, fn(at)
                del at  # before the next tile is evaluated
                yield tile, values
                del values

        return sum_by_owner(parts(), self.problem.batch)


def evaluation_bytes(problem: AttentionProblem, layer: Parametrisation) -> int:
    """Bytes that the evaluations of all tiles take, tokens and targets apart."""
    elements = 0
    for chunk in problem.chunks:
        o, s, n = chunk.weight.shape
        elements += o * s * layer.evaluation_elements(n, chunk.A2.shape[2])
    return elements * problem.like.element_size()


def forward_elements(problem: AttentionProblem, layer: Parametrisation) -> int:
    """Elements per query row of the largest array of a pass: attention weights or projections."""
    keys = max(chunk.A2.shape[2] for chunk in problem.chunks)
    return layer.heads * max(keys, *problem.widths)
