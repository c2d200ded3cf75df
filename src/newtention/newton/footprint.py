"""Peak memory of the matrix-free method: an iteration on tensors without storage.

The parts of an iteration run on torch's "meta" device on the largest tiles of the data, and the
bytes of every tensor that they make are counted while it lives.  So the prediction follows the code
instead of a list of its arrays kept by hand; what grows with the number of tiles (evaluations that
are kept, tangents of the output) is added for the rest of the data.
"""

from __future__ import annotations

from torch import Tensor

from newtention.chunks import Chunk
from newtention.derivatives.gradient import backward, tile_loss
from newtention.derivatives.linearised import Linearised, evaluation_bytes, forward_elements
from newtention.layers import Parametrisation
from newtention.linsolve.cg import points_kept
from newtention.memory import WORKSPACE, LiveBytes
from newtention.newton.matrix_free import METRIC_ROWS, Settings, eliminates
from newtention.newton.metric import Metric
from newtention.newton.reduced import Curvature
from newtention.newton.varpro import OutputMap
from newtention.problem import AttentionProblem
from newtention.regularizers import FlatQuadratic

ALLOCATOR = 1.2
"""Resident bytes of a live one, except those kept for long: 1.0 to 1.5, by the luck of the C
library's heap (docs/choices.md)."""
CG_VECTORS = 6
"""g, x, r, z, p and the last H p are alive while a product is computed."""
SMALL = 8 << 20
"""Bytes up to which a generous estimate will do."""
TILES = 2
"""Tiles that a pass is played on: sums and a previous tile's remains are alive in the second."""


def matrix_free_bytes(
    problem: AttentionProblem, layer: Parametrisation, members: int, settings: Settings
) -> int:
    """Predicted peak bytes of a matrix-free solve, beside its data.

    members: independent problems times starts; they are solved one after another.
    """
    singles = problem.parts or (problem,)
    estimate = max(_generous_bytes(single, layer, settings) for single in singles)
    if estimate <= SMALL:  # playing takes longer than such a solve
        return estimate + WORKSPACE
    weights = 2 * members * layer.size * problem.like.element_size()  # starts and current points
    live, kept = max(_iteration_bytes(single, layer, settings) for single in singles)
    return int(ALLOCATOR * (live - kept + weights) + kept) + WORKSPACE


def _generous_bytes(problem: AttentionProblem, layer: Parametrisation, settings: Settings) -> int:
    """More than small problems take: several evaluations and all vectors at once."""
    evaluations = evaluation_bytes(problem, layer)
    kept = evaluations if evaluations <= settings.cache_bytes else 0
    vectors = CG_VECTORS + 2 * points_kept(settings.max_products) + layer.output_rows
    return 10 * evaluations + kept + vectors * layer.size * problem.like.element_size()


def _iteration_bytes(
    problem: AttentionProblem, layer: Parametrisation, settings: Settings
) -> tuple[float, float]:
    """Peak of the live bytes over an iteration of one problem, and evaluations kept among them."""
    rows = sum(c.weight.numel() for c in problem.chunks)
    metric_share, share = min(1.0, METRIC_ROWS / rows), settings.curvature_share
    own, sample = (_stand_in(problem, layer, part) for part in (1.0, metric_share))
    kept = evaluation_bytes(problem, layer)
    played = evaluation_bytes(own, layer)
    cached = kept <= settings.cache_bytes
    # Evaluations of the tiles that are not played, relative to those of the tiles that are.
    others = (kept - played) / played if cached else 0.0
    path = points_kept(settings.max_products)

    def vectors(count: int) -> list[Tensor]:
        return [own.like.new_empty(layer.size) for _ in range(count)]

    with LiveBytes() as live:
        theta, free, v = vectors(3)
        width = layer.output_rows
        regularizer = FlatQuadratic(lambda d: d.clone(), own.like.new_empty(1, width, width))

        # The next point, while the path of the step that leads there is alive.
        held, start = vectors(1 + path), live.restart()
        point = Linearised.at(own, layer, theta[None], played if cached else 0)
        output = OutputMap.at(point, regularizer) if eliminates(layer) else None
        if output is not None:
            point = point.with_output(output.solved(point.theta))
        point.reduce(lambda at: (tile_loss(at),))
        peaks = [live.peak + others * (live.peak - start)]
        evaluations = others * (live.now - start)

        # The gradient and the preconditioner.
        del held
        live.restart()
        point.reduce(lambda at: (backward(at, layer, point.theta, at.qC),))
        at = Linearised(sample, layer, theta[None])
        names = {block.name for block in layer.blocks}
        kind, seed = settings.preconditioner, settings.seed
        metric = Metric.at(at, free, kind, regularizer, seed, names)
        peaks.append(live.peak + evaluations)

        # A product of conjugate gradients, on all of the data or a share of its own.
        held = vectors(CG_VECTORS + path)
        live.restart()
        metric.solve(v)
        Curvature(point, regularizer, settings.kind, free, output).product(v)
        others_rows = rows - sum(c.weight.numel() for c in own.chunks)
        tangents = max(0.0, share * others_rows) * problem.widths[3] * own.like.element_size()
        second = share * kept if cached and share < 1 else 0.0
        peaks.append(live.peak + evaluations + tangents + second)
        del held
    tokens = sum(_token_bytes(c) for c in problem.chunks)
    copies = tokens * sum(part for part in (metric_share, share) if part < 1)
    return max(peaks) + copies, kept if cached else 0


def _stand_in(problem: AttentionProblem, layer: Parametrisation, share: float) -> AttentionProblem:
    """The largest tiles of a share of every chunk's sequences, without storage."""
    elements = forward_elements(problem, layer)
    tiles: list[Chunk] = []
    for chunk in problem.chunks:
        count = max(1, round(share * chunk.weight.shape[1]))
        tiles += chunk.to("meta").sequences(slice(count)).tiles(elements)
    tiles.sort(key=lambda tile: tile.weight.numel() * tile.A2.shape[2], reverse=True)
    return problem.with_chunks(tuple(tiles[:TILES]))


def _token_bytes(chunk: Chunk) -> int:
    """Bytes of a chunk's tokens, targets and weights."""
    arrays = {id(t): t for t in (chunk.A1, chunk.A2, chunk.A3, chunk.B, chunk.weight)}
    return sum(t.numel() * t.element_size() for t in arrays.values())
