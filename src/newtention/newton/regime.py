"""The regime in which the paper's approximate Hessian is one: a bound at a point; what suffices.

`accuracy_at` evaluates `newtention.bounds.dominance` on the data, O(n m d) like a gradient.  The
regime is where its epsilon is below 1/2, so that steps contract in the end.  Where the bound does
not show that and the unknowns are few, the eigenvalues of the exact Hessian decide.  The paper's
own condition is a weight of 100 x 30 R^8 on every token (Lemma 9.1, Parts 4 and 6).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.attention import score_gradient
from newtention.bounds.dominance import Accuracy, Dominance, Forms, accuracy, combined, tile_forms
from newtention.bounds.paper import Magnitude, assumptions, lemma_9_1_dominance
from newtention.chunks import Chunk
from newtention.derivatives.hessian import second_order
from newtention.derivatives.linearised import Linearised
from newtention.derivatives.penalty import penalty
from newtention.display import Displayed, Table
from newtention.layers import Bilinear, Parametrisation, evaluate
from newtention.newton.token_metric import SequenceTokens, TokenMetric
from newtention.newton.varpro import OutputMap
from newtention.problem import AttentionProblem
from newtention.regularizers import TokenWeights

LIMIT = 0.5
"""Epsilon from which steps are no longer proved to contract: epsilon / (1 - epsilon) reaches 1."""
FEW_UNKNOWNS = 512
"""Up to here the exact Hessian's eigenvalues are computed where the bound does not suffice."""
LARGEST_FACTOR = 1e12
"""Of the weights, up to which one that suffices is looked for."""
CLOSE = 1.01
"""Ratio to which it is found."""


@dataclass(frozen=True)
class Regime(Displayed):
    """Whether the regulariser dominates the data at a point; `newtention.paper_regime` makes it.

    epsilon: bound of the approximate Hessian's error, (1 - epsilon) H <= H~ and
        ||I - H~^-1 H|| <= epsilon / (1 - epsilon) in the norm of H; 1 if nothing is proved.
    two_sided: the same for the paper's (1 - epsilon) H <= H~ <= (1 + epsilon) H; may be infinite.
    rate: epsilon / (1 - epsilon), by which errors shrink in the end.
    sketch: bounds of the sketched curvature of X over the exact one, (1, 1) without a sketch.
    gauss_newton, positive, negative, mixed, output: the parts of the bound; see
        `newtention.bounds.dominance.Dominance`.
    w_factor: multiple of the weights that brings the point into the regime, with Y solved for
        again: at most 1 % above the least one found, below 1 if there is room; infinite if none is
        known.
    log10_weight: log10 of the smallest w^2.
    log10_threshold: log10 of the paper's 100 x 30 R^8 at the point.
    """

    epsilon: float
    two_sided: float
    rate: float
    sketch: tuple[float, float]
    gauss_newton: float
    positive: float
    negative: float
    mixed: float
    output: float
    w_factor: float
    log10_weight: float
    log10_threshold: float

    @property
    def inside(self) -> bool:
        """Whether steps are proved to contract once the point is near enough to the solution."""
        return self.epsilon < LIMIT

    @property
    def bound(self) -> float:
        """The epsilon that the parts give; `epsilon` is less where the exact Hessian was needed."""
        parts = (self.gauss_newton, self.positive, self.negative, self.mixed, self.output)
        return accuracy(Dominance(*parts), self.sketch).epsilon

    @property
    def sentence(self) -> str:
        """The verdict."""
        paper = (
            f"The paper asks for w^2 above 10^{self.log10_threshold:.1f}; the smallest here is "
            f"10^{self.log10_weight:.1f}."
        )
        exact = "" if self.epsilon == self.bound else " (by the exact Hessian)"
        bound = f"the approximate Hessian's error is at most {self.epsilon:.3g}{exact}"
        if self.inside:
            return (
                f"In the regime: {bound}, so that errors shrink by {self.rate:.3g} in the end. "
                + paper
            )
        if 1 - self.sketch[0] >= LIMIT:
            return (
                "Outside the regime: the sketch alone is wrong by "
                f"{1 - self.sketch[0]:.3g}, and {LIMIT} is the limit; more rows, "
                'Options(sketch_size=), or Options(sketch="none") would do.'
            )
        wanted = "no larger weights are known that would do"
        if math.isfinite(self.w_factor):
            wanted = f"weights w {self.w_factor:.3g} times as large would do"
        return (
            f"Outside the regime: the approximate Hessian's error is not proved below {LIMIT}, but "
            f"at most {self.epsilon:.3g}{exact}; {wanted}. {paper}"
        )

    def _table(self) -> Table:
        parts = ("gauss_newton", "positive", "negative", "mixed", "output")
        rows = [
            ("Error of the Hessian (epsilon)", f"{self.epsilon:.3g} (below {LIMIT} is needed)"),
            *((f"  {name.replace('_', '-')} part", f"{getattr(self, name):.3g}") for name in parts),
            ("Rate in the end", f"{self.rate:.3g}"),
            ("Weights that suffice", f"{self.w_factor:.3g} times these"),
            ("Smallest w^2", f"10^{self.log10_weight:.1f}"),
            ("The paper's threshold", f"10^{self.log10_threshold:.1f}"),
        ]
        return Table("Regime", rows, notes=(self.sentence,))

    def __repr__(self) -> str:
        """One line."""
        side = "inside" if self.inside else "outside"
        return f"Regime({side}, epsilon {self.epsilon:.3g}, w_factor {self.w_factor:.3g})"

    def __str__(self) -> str:
        """The verdict."""
        return self.sentence


def require_paper(problem: AttentionProblem, layer: Parametrisation, frozen: bool) -> None:
    """Refuse what the method is not for.

    Raises:
        ValueError: a stack of problems, a factored layer, frozen blocks, another regulariser than
            TokenWeights, or a token weight of 0.
    """
    wrong = None
    if problem.parts:
        wrong = "takes one problem; found a stack"
    elif not isinstance(layer, Bilinear):
        found = "attention maps" if problem.of_maps else "a factored layer"
        wrong = f"is for the bilinear form (X, Y); found {found}"
    elif frozen:
        wrong = "solves for all of X and Y; found frozen blocks"
    elif not isinstance(problem.regularizer, TokenWeights):
        found = problem.regularizer
        name = "none" if found is None else type(found).__name__
        wrong = f"needs the regulariser TokenWeights; found {name}"
    elif not smallest_weight(problem) > 0:
        wrong = "needs TokenWeights(w=) other than 0 for every key token; found 0"
    if wrong is not None:
        raise ValueError(f'method="paper" {wrong}.  Use method="auto".')


def smallest_weight(problem: AttentionProblem) -> float:
    """The least |w| of a real key token."""
    least = math.inf
    for chunk in problem.chunks:
        assert chunk.key_weight is not None
        w = chunk.key_weight.abs()
        if chunk.mask.key_lengths is not None:
            real = torch.arange(w.shape[-1], device=w.device) < chunk.mask.key_lengths[..., None]
            w = w.masked_fill(~real, math.inf)
        least = min(least, float(w.min()))
    return least


def dominance_at(
    problem: AttentionProblem,
    layer: Bilinear,
    theta: Float[Tensor, "1 N"],
    metric: TokenMetric,
    output: OutputMap,
) -> Dominance:
    """Bounds of the data's part at a point; output: of the point."""
    # (hd3, k): H_yy^(-1/2), head by head.
    root = output.inverse.root[0].to(theta.dtype)
    roots = root.view(layer.heads, layer.d3, -1)
    sequences = (_sequence_forms(layer, theta, tokens, roots) for tokens in metric.sequences)
    share = root.mT @ penalty(problem, layer).output_gram[0] @ root
    known = root.any(0)
    least = torch.linalg.eigvalsh(share[known][:, known])[:1]
    # w^T w = H_yy - A3^T W^2 A3
    return combined(sequences, 1 - float(least.sum()) if len(least) else 0.0)


def _sequence_forms(
    layer: Bilinear,
    theta: Float[Tensor, "1 N"],
    tokens: SequenceTokens,
    roots: Float[Tensor, "h d3 k"],
) -> Forms:
    chunk = tokens.chunk
    assert chunk.key_weight is not None
    w = chunk.key_weight[0, 0]
    inverse = torch.where(w != 0, 1 / w.where(w != 0, torch.ones_like(w)), 0.0)  # padded keys: 0
    a = inverse[:, None] * tokens.keys.to(theta.dtype)
    b = chunk.A3[0, 0] @ roots
    q = chunk.scale * tokens.queries.to(theta.dtype)
    total, first = None, 0
    elements = layer.heads * max(chunk.A2.shape[2], layer.d2, layer.heads * layer.d3)
    for tile in chunk.tiles(elements):
        rows = tile.A1.shape[2]
        forms = _tile(tile, layer, theta, q[first : first + rows], a, b)
        total, first = forms if total is None else total.plus(forms), first + rows
    assert total is not None
    return total


def _tile(
    tile: Chunk,
    layer: Bilinear,
    theta: Float[Tensor, "1 N"],
    q: Float[Tensor, "n r1"],
    a: Float[Tensor, "m r2"],
    b: Float[Tensor, "h m k"],
) -> Forms:
    at = evaluate(tile, layer, theta)
    v = at.heads.v
    assert v is not None
    T = score_gradient(at.P, v, at.O, at.qC[:, :, None])
    return tile_forms(at.P[0, 0], T[0, 0], v[0, 0], at.C[0, 0], tile.weight[0, 0], q, a, b)


def accuracy_at(
    problem: AttentionProblem,
    layer: Bilinear,
    theta: Float[Tensor, "1 N"],
    metric: TokenMetric,
    output: OutputMap,
) -> Accuracy:
    """Bounds of H~ over H at a point; exact ones where those do not suffice, if affordable."""
    found = accuracy(dominance_at(problem, layer, theta, metric, output), metric.spectrum)
    affordable = layer.size <= FEW_UNKNOWNS and theta.dtype == torch.float64
    if found.epsilon < LIMIT or not affordable or not metric.spectrum[0] > 0:
        return found
    return exact_accuracy(problem, layer, theta, metric, output)


def exact_accuracy(
    problem: AttentionProblem,
    layer: Bilinear,
    theta: Float[Tensor, "1 N"],
    metric: TokenMetric,
    output: OutputMap,
) -> Accuracy:
    """The extreme eigenvalues of H~ over H, from the exact Hessian in coordinates where H~ is I.

    Directions that neither sees are left out.
    """
    H = second_order(problem, *layer.unpack(theta))[3].to_dense()[0]
    one = metric.whitening()
    root = output.inverse.root[0].contiguous()
    channels = torch.eye(layer.p, dtype=root.dtype, device=root.device)
    both = torch.block_diag(*[one] * layer.heads, torch.kron(root, channels))
    both = both[:, both.any(0)]
    values = torch.linalg.eigvalsh(both.mT @ H @ both)
    if not len(values):
        return Accuracy(1.0, 1.0)
    least, most = float(values[0]), float(values[-1])
    return Accuracy(1 / most if most > 0 else math.inf, 1 / least if least > 0 else math.inf)


def output_map(
    problem: AttentionProblem, layer: Bilinear, theta: Float[Tensor, "1 N"]
) -> OutputMap:
    """The least-squares problem of Y at a point: H_yy and the gradient in Y."""
    return OutputMap.at(Linearised(problem, layer, theta), penalty(problem, layer))


def regime_at(
    problem: AttentionProblem,
    layer: Bilinear,
    theta: Float[Tensor, "1 N"],
    metric: TokenMetric,
) -> Regime:
    """The bound at a point, its parts, and what would suffice."""
    output = output_map(problem, layer, theta)
    parts = dominance_at(problem, layer, theta, metric, output)
    found = accuracy_at(problem, layer, theta, metric, output)

    def epsilon(factor: float) -> float:
        scaled = with_weights_times(problem, factor)
        other = replace(metric, sequences=TokenMetric.of(scaled).sequences)
        best = output_map(scaled, layer, theta).solved(theta)
        return accuracy_at(scaled, layer, best, other, output_map(scaled, layer, best)).epsilon

    hopeless = accuracy(Dominance(0.0, 0.0, 0.0, 0.0, 0.0), metric.spectrum).epsilon >= LIMIT
    factor = math.inf if hopeless else sufficient_factor(epsilon)
    return Regime(
        epsilon=found.epsilon,
        two_sided=found.two_sided,
        rate=found.rate,
        sketch=metric.spectrum,
        **parts._asdict(),
        w_factor=factor,
        log10_weight=2 * math.log10(smallest_weight(problem)),
        log10_threshold=paper_threshold(problem, layer, theta).log10,
    )


def sufficient_factor(epsilon: Callable[[float], float]) -> float:
    """A factor with epsilon(factor) < LIMIT, within CLOSE of one without; infinite if none.

    Bisection: the bound need not fall everywhere, so the factor is one that suffices, and perhaps
    not the least.
    """
    low, high = 1.0, 1.0
    while epsilon(high) >= LIMIT:
        low, high = high, 4 * high
        if high > LARGEST_FACTOR:
            return math.inf
    while low == high:
        low = low / 4
        if low < 1 / LARGEST_FACTOR:
            return low
        if epsilon(low) < LIMIT:
            high = low
    while high > CLOSE * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if epsilon(middle) < LIMIT else (middle, high)
    return high


def with_weights_times(problem: AttentionProblem, factor: float) -> AttentionProblem:
    """The same under token weights factor times as large."""

    def scaled(chunk: Chunk) -> Chunk:
        assert chunk.key_weight is not None
        return replace(chunk, key_weight=factor * chunk.key_weight)

    q = problem.quadratic
    square = factor * factor
    quadratic = replace(q, right=square * q.right, gram=square * q.gram)
    return problem._changed(chunks=tuple(map(scaled, problem.chunks)), quadratic=quadratic)


def paper_threshold(
    problem: AttentionProblem, layer: Bilinear, theta: Float[Tensor, "1 N"]
) -> Magnitude:
    """100 x 30 R^8 for the smallest R >= 4 that the data and the point allow."""
    X, Y = layer.unpack(theta)
    block = A3 = b = 0.0
    for chunk in problem.chunks:
        longest = chunk.queries[0].norm(dim=-1).amax(-1)
        block = max(block, float((longest * torch.linalg.matrix_norm(chunk.A2[0], 2)).max()))
        A3 = max(A3, float(torch.linalg.matrix_norm(chunk.A3[0], 2).max()))
        b = max(b, float(chunk.B.abs().max()))
    x, y = (float(torch.linalg.matrix_norm(t[0]).max()) for t in (X, Y))
    rows, keys = problem.layout.queries, problem.layout.keys
    given = assumptions(block, A3, x, y, b, float(sum(rows)), max(keys), layer.p)
    return lemma_9_1_dominance(given.R)
