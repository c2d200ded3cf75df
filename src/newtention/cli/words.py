"""What a fit says about its data before it begins, and about its result."""

from __future__ import annotations

from newtention.cli.start import Start
from newtention.io import Provenance
from newtention.layers import AttentionMap, Bilinear, Factored
from newtention.problem import AttentionProblem
from newtention.solution import Solution


def describe(
    problem: AttentionProblem,
    provenance: Provenance,
    start: Start | None,
    heads: int,
    ranks: tuple[int, ...] | None,
) -> str:
    """One line on what will be fitted, so that a wrong array is noticed at once."""
    arrays = provenance.arrays
    if arrays.keys is None:
        roles = [f"self-attention on {arrays.queries!r}"]
    elif arrays.values is None and not problem.of_maps:
        roles = [f"queries {arrays.queries!r}", f"keys and values {arrays.keys!r}"]
    else:
        roles = [f"queries {arrays.queries!r}", f"keys {arrays.keys!r}"]
    if arrays.values is not None:
        roles.append(f"values {arrays.values!r}")
    layout = problem.layout
    if problem.of_maps:
        shape = AttentionMap(*problem.widths[:2])
    elif start is not None:
        shape = start.layer.parametrisation
    elif ranks is not None:
        shape = Factored(heads, heads, *problem.widths, ranks[0], ranks[-1], out_bias=True)
    else:
        shape = Bilinear(heads, *problem.widths)
    return (
        f"Fitting {provenance.source}: {', '.join(roles)}, targets {arrays.targets!r}; "
        f"{len(layout.queries)} sequence(s), {sum(layout.queries)} queries, "
        f"{shape.size} unknowns, {provenance.dtype}."
    )


def meaning(problem: AttentionProblem, solution: Solution) -> str:
    """What the numbers say, in a sentence."""
    if float(problem.target_energy()) == 0:
        return "The targets are all zero, so that the relative loss is the data loss itself."
    ridge = "; the loss includes the penalty, this share does not" if solution.penalty else ""
    if problem.of_maps:
        return (
            f"The fitted maps miss {100 * solution.relative_loss:.4g} % of the targets' sum of "
            f"squares{ridge}."
        )
    return (
        f"The fitted layer's outputs miss {100 * solution.relative_loss:.4g} % of the targets' sum "
        f"of squares (outputs of zero would miss 100 %){ridge}."
    )
