"""What a fit says about its data before it begins, and about its result."""

from __future__ import annotations

from newtention.cli.start import Start
from newtention.diagnostics import unexplained
from newtention.io import Provenance
from newtention.layers import AttentionMap, Bilinear, Factored, Parametrisation
from newtention.problem import AttentionProblem
from newtention.solution import Solution, Status

USELESS = 0.95
"""A fit that leaves this share of the trivial loss, or more, explains nothing worth its name."""
CONTINUABLE = (Status.ITERATION_LIMIT, Status.TIME_LIMIT, Status.INTERRUPTED)
"""Ends after which more iterations may help."""

AGAIN = "Fit again with a higher --max-iter or --max-seconds."
"""To continue a fit that cannot be continued."""


def fitted_shape(
    problem: AttentionProblem, start: Start | None, heads: int, ranks: tuple[int, ...] | None
) -> Parametrisation:
    """The weights that will be fitted."""
    if problem.of_maps:
        return AttentionMap(*problem.widths[:2])
    if start is not None:
        return start.layer.parametrisation
    if ranks is not None:
        return Factored(heads, heads, *problem.widths, ranks[0], ranks[-1], out_bias=True)
    return Bilinear(heads, *problem.widths)


def describe(problem: AttentionProblem, provenance: Provenance, shape: Parametrisation) -> str:
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


def useless(problem: AttentionProblem, solution: Solution) -> str | None:
    """A sentence of warning about a fit that explains next to nothing, or None."""
    share = unexplained(problem, solution)
    if share < USELESS:
        return None
    trivial = "maps of equal weights, X = 0" if problem.of_maps else "outputs that are all zero"
    return (
        f"The fit explains next to nothing: its data loss is {100 * share:.4g} % of that of "
        f"{trivial}.  {_remedy(solution.penalty)}"
    )


def meaning_of_softmax(share: float) -> str:
    """What `unexplained_softmax` says, in a sentence."""
    return (
        f"The fitted values miss {100 * share:.4g} % of the sum of squares that equal values, "
        "those of x = 0, miss."
    )


def useless_softmax(share: float, penalty: float) -> str | None:
    """A sentence of warning about a softmax fit that explains next to nothing, or None."""
    if share < USELESS:
        return None
    return (
        "The fit explains next to nothing: its squared distance from the target is "
        f"{100 * share:.4g} % of that of equal values, those of x = 0.  {_remedy(penalty)}"
    )


def _remedy(penalty: float) -> str:
    ridge = "a smaller penalty, " if penalty else ""
    return f"Try {ridge}more starts (--n-init), or look whether these are the right arrays."


def not_converged(status: Status, gradient: float, again: str) -> str | None:
    """What comes before a failed proof about a fit that had not converged; None if it had.

    gradient: a bound on its norm at the point.  again: how to go on.
    """
    size = f"its gradient is up to {gradient:.3g}"
    if status is Status.EARLY_STOP:
        return (
            f"The fit stopped early, where the validation loss was lowest ({size}): that is no "
            "minimum of the loss, and no proof can be expected."
        )
    if status not in CONTINUABLE:
        return None
    return (
        f"The fit had not converged ({status.value}; {size}), and before that no proof can be "
        f"expected.  {again}"
    )
