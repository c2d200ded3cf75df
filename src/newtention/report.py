"""The HTML page about the fit of a layer.

    newtention.report.write_report("report.html", problem, solution, title="Head 4 of layer 3")

`write_picture` saves the overview figure alone, as in the README:

    python -c "
    import numpy as np, newtention as nt
    from safetensors.numpy import load_file
    from newtention.report import write_picture
    head = load_file('src/newtention/examples/minilm_head.safetensors')
    tokens, targets = (head[k].astype(np.float64) for k in ('tokens', 'head_output'))
    problem = nt.AttentionProblem.from_ragged(
        tokens, targets, offsets=head['offsets'], regularizer=nt.Ridge(0.1, 0.1))
    write_picture('docs/images/report.png', problem, nt.solve(problem))"
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from newtention import drawing, plots
from newtention.certify.certificate import Certificate
from newtention.diagnostics import (
    QueryErrors,
    as_array,
    epsilon,
    query_key_and_value_maps,
    singular_values,
)
from newtention.drawing import number
from newtention.functions import attention_weights, hessian, hessian_operator
from newtention.layers import BilinearAttention, FactoredAttention, MapAttention
from newtention.page import curvature, explained, svg, write_page
from newtention.problem import AttentionProblem
from newtention.solution import Solution

SENTENCES = 3
READABLE = (6, 30)
"""Queries and keys of a sentence whose heat map is easy to read."""
LONGEST_MAP = 64
"""Queries and keys of a heat map; longer ones are cut off."""
HEADS = 3
WORST = 10


def write_report(
    path: str | Path,
    problem: AttentionProblem,
    solution: Solution,
    *,
    title: str,
    provenance: Mapping[str, Any] | None = None,
    certificate: Certificate | None = None,
) -> None:
    """Write the report of a fit as one HTML file.

    Args:
        path: the file; an existing one is replaced.
        problem: the problem that was solved.
        solution: what `solve` returned for it.
        title: heading of the report.
        provenance: where the data came from, versions, settings: names and values, one level of
            nesting allowed.
        certificate: what is proved about the solution's weights for this problem.

    Raises:
        ValueError: a stack of problems.
    """
    if problem.parts:
        raise ValueError("write_report takes one problem; write one for each of the stack's parts.")
    tokens = QueryErrors(problem, solution)
    write_page(
        path,
        "report.html.j2",
        solution,
        title=title,
        provenance=provenance,
        solution=solution,
        factored=isinstance(solution.layer, FactoredAttention),
        of_maps=problem.of_maps,
        energy=_energy(problem, solution),
        meaning=_meaning(problem, solution),
        data=_data(problem, solution),
        attention=_attention(problem, solution, tokens),
        errors=_errors(tokens),
        curvature=_curvature(problem, solution),
        singular=_singular(solution),
        certificate=certificate,
    )


def write_picture(path: str | Path, problem: AttentionProblem, solution: Solution) -> None:
    """Save convergence and the attention of a typical sentence as a PNG of about 1200 pixels.

    Raises:
        ValueError: a stack of problems.
    """
    tokens = QueryErrors(problem, solution)
    i = _sentences(problem, tokens)[0][0]
    before, after = (_maps(problem, layer, i)[0] for layer in (solution.start, solution.layer))
    figure = plots.overview(solution, before, after)
    figure.savefig(path, dpi=1200 / drawing.WIDE, metadata={"Software": None})


def _energy(problem: AttentionProblem, solution: Solution) -> str:
    """The relative loss in one plain sentence."""
    of = "energy of the targets"
    if any(bool((c.weight != 1).logical_and(c.weight != 0).any()) for c in problem.chunks):
        of = "weighted energy of the targets"
    if float(problem.target_energy()[0]) == 0:
        loss = number(solution.data_loss)
        return f"The targets are all zero; the loss is absolute, and {loss} of it is left."
    return explained("The layer", solution.relative_loss, of)


def _meaning(problem: AttentionProblem, solution: Solution) -> str:
    """What the relative loss says about a typical output."""
    rest = solution.relative_loss
    if not 0 < rest < math.inf or float(problem.target_energy()[0]) == 0:
        return ""
    return (
        "Energy is the sum of squares over all outputs. What is left, the relative loss of "
        f"{number(rest)}, amounts to an error of {number(100 * math.sqrt(rest))} percent in the "
        "root mean square."
    )


def _data(problem: AttentionProblem, solution: Solution) -> dict[str, str]:
    """What was fitted, as names and values."""
    lay = problem.layout
    d1, d2, d3, p = problem.widths
    shape = solution.layer.parametrisation
    blocks = ", ".join(f"{b.name} {b.stop - b.start:,}" for b in shape.blocks)

    def span(counts: tuple[int, ...]) -> str:
        total = f"{sum(counts):,}"
        if len(counts) == 1:
            return total
        low, high = min(counts), max(counts)
        return f"{total} ({low if low == high else f'{low} to {high}'} in a sequence)"

    mask = {"none": "none", "causal": "causal", "explicit": "given pair by pair"}[problem.mask]
    return {
        "Sequences": f"{len(lay.queries):,}",
        "Queries": span(lay.queries),
        "Keys": span(lay.keys),
        "Widths": f"query {d1}, key {d2}"
        + ("" if problem.of_maps else f", value {d3}, output {p}"),
        "Heads": str(shape.heads),
        "Unknowns": f"{shape.size:,} ({blocks})",
        "Mask": mask,
        "Scale of the logits": number(problem.scale, 6),
        "Regulariser": _regulariser(problem),
        "Arithmetic": f"{str(problem.like.dtype)[6:]} on {problem.like.device}",
    }


def _regulariser(problem: AttentionProblem) -> str:
    if problem.regularizer is None:
        return "none"
    about = dict(problem.regularizer.describe())
    name = about.pop("name")
    values = (f"{k} {number(v) if isinstance(v, float) else v}" for k, v in about.items())
    return f"{name} ({', '.join(values)})"


def _sentences(problem: AttentionProblem, tokens: QueryErrors) -> list[tuple[int, str]]:
    """A typical, the best and the worst fitted sequence among those of readable size."""
    lay = problem.layout
    sizes = [max(n, m) for n, m in zip(lay.queries, lay.keys, strict=True)]
    fitting = [i for i, s in enumerate(sizes) if READABLE[0] <= s <= READABLE[1]]
    if not fitting:
        fitting = sorted(range(len(sizes)), key=lambda i: abs(sizes[i] - READABLE[1]))[:SENTENCES]
    ranked = sorted(fitting, key=tokens.of_sequence)
    chosen: dict[int, str] = {}
    for place, name in ((len(ranked) // 2, "typical"), (0, "best fitted"), (-1, "worst fitted")):
        chosen.setdefault(ranked[place], name)
    return list(chosen.items())


def _maps(problem: AttentionProblem, X: Any, sequence: int) -> np.ndarray:
    """(h, n, m) attention weights, cut to the longest map."""
    P = as_array(attention_weights(problem, X, sequence=sequence))
    return (P if P.ndim == 3 else P[None])[:, :LONGEST_MAP, :LONGEST_MAP]


def _attention(
    problem: AttentionProblem, solution: Solution, errors: QueryErrors
) -> dict[str, Any]:
    """Heat maps of a few sentences and heads on one colour scale."""
    chosen = _sentences(problem, errors)
    pairs = [
        (_maps(problem, solution.start, i), _maps(problem, solution.layer, i)) for i, _ in chosen
    ]
    h = pairs[0][0].shape[0]
    change = sum(np.abs(after - before).mean((1, 2)) for before, after in pairs)
    heads = sorted(np.argsort(-np.asarray(change), kind="stable")[:HEADS].tolist())
    top = max(float(m[heads].max()) for pair in pairs for m in pair)
    figures = []
    for (i, name), (before, after) in zip(chosen, pairs, strict=True):
        n, m = problem.layout.queries[i], problem.layout.keys[i]
        figure = plots.attention(before[heads], after[heads], heads, top)
        cut = "" if max(n, m) <= LONGEST_MAP else f"; the first {LONGEST_MAP} are shown"
        figures.append(
            {
                "svg": svg(figure, f"attention{i}", f"attention of sequence {i} before and after"),
                "sequence": i,
                "name": name if len(chosen) > 1 else "",
                "size": f"{n} queries, {m} keys{cut}",
                "error": errors.of_sequence(i),
            }
        )
    return {"figures": figures, "heads": h, "shown": heads}


def _errors(tokens: QueryErrors) -> dict[str, Any]:
    """Error per query: two figures and the worst rows."""
    known = tokens.known
    worst = np.argsort(-np.where(known, tokens.relative, -1), kind="stable")[:WORST]
    rows = [
        {
            "sequence": tokens.sequence[j],
            "position": tokens.position[j],
            "relative": tokens.relative[j],
            "residual": tokens.residual[j],
            "target": tokens.target[j],
            "share": f"{100 * tokens.share[j]:.2f} %",
        }
        for j in worst
        if known[j]
    ]
    strip = plots.error_strip(tokens.relative, tokens.sequence)
    values = tokens.relative[known]
    return {
        "histogram": svg(
            plots.error_histogram(tokens.relative),
            "histogram",
            "histogram of relative errors",
        ),
        "strip": svg(strip, "strip", "relative error of every query"),
        "rows": rows,
        "left_out": int((~known).sum()),
        "count": len(values),
        "above_one": int((values > 1).sum()),
        "sequences": len(np.unique(tokens.sequence)),
    }


def _curvature(problem: AttentionProblem, solution: Solution) -> dict[str, Any]:
    """Eigenvalues of the full Hessian at the solution, or why they are left out."""
    layer = solution.layer

    def dense() -> np.ndarray:
        if isinstance(layer, BilinearAttention | MapAttention):
            return as_array(hessian(problem, layer).to_dense())
        return as_array(hessian_operator(problem, layer).to_dense())

    about = {} if problem.regularizer is None else problem.regularizer.describe()
    ridge = float(about["x"]) if about.get("name") == "ridge" and about["x"] else 0.0  # type: ignore[arg-type]
    return curvature(layer.parametrisation.size, dense, epsilon(problem.like), ridge, "ridge on X")


def _singular(solution: Solution) -> dict[str, Any]:
    """Singular values of the weights and their numerical ranks."""
    ranks = {}
    X, Y = query_key_and_value_maps(solution.layer)
    eps = epsilon(next(iter(vars(solution.layer).values())))
    for name, weights in (("X", X), ("Y", Y)) if len(Y) else (("X", X),):
        found = [int((sizes > 0).sum()) for sizes in singular_values(weights, eps)]
        ranks[name] = f"{min(found)} to {max(found)}" if len(set(found)) > 1 else str(found[0])
    drawn = plots.singular_values(X, Y, eps)
    return {"svg": svg(drawn, "singular", "singular values of X and Y"), "ranks": ranks}
