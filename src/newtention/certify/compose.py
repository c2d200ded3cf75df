"""`certify`: theorems of `newtention.bounds` put together for a problem and a point."""

from __future__ import annotations

import math

from newtention.bounds.paper import lemma_6_1
from newtention.bounds.rounding import (
    norm_upper,
    smallest_eigenvalue_lower,
    spectral_norm_upper,
    upward,
)
from newtention.certify.certificate import Basin, Certificate, Verdict, rounded_up
from newtention.certify.evaluation import PointEvaluation, data_in_double, evaluate_point
from newtention.certify.globally import GlobalProof, PaperConstants, paper_constants, prove_global
from newtention.certify.invariances import FlatSpace, flat_space
from newtention.certify.local import LocalProof, prove_local, widest_basin
from newtention.derivatives.gradient import data_loss, loss_and_gradient
from newtention.layers import AttentionMap, Bilinear
from newtention.memory import WORKSPACE, available_bytes, readable
from newtention.notation import ArrayLike
from newtention.problem import AttentionProblem
from newtention.spectra import spectrum
from newtention.weights import Point, Weights, as_weights

NEAR = 0.01
"""||gradient|| / (smallest eigenvalue), relative to the weights, up to which a minimum is near."""
MATRICES = 15
"""N x N float64 matrices at the peak of a proof: 6 to 8 at the given point, 13 to 15 where Newton
steps lead elsewhere (N 1152, 1352 and 2048; tests/unit/test_certify.py)."""


def certify(
    problem: AttentionProblem,
    X: Point,
    Y: ArrayLike | None = None,
    *,
    precise: bool = False,
    unfolding: bool | None = None,
    epsilon: float = 0.01,
    accuracy: float = 1e-8,
) -> Certificate:
    """What can be proved about a point of attention regression; everything is in float64.

    Args:
        problem: one problem, with any regulariser.
        X: query/key map (d1, d2) or (h, d1, d2), a layer, or a Solution.
        Y: value map (d3, p) or (h, d3, p); left out beside a layer and for attention maps.
        precise: compute the decisive quantities beyond float64: slower, for points so near to a
            minimum that rounding hides the rest.
        unfolding: whether the third derivative is unfolded, which gives the tightest Lipschitz
            constant at the cost of N Hessians of N unknowns; by default up to 256 unknowns, and up
            to 640 where the proof needs it.
        epsilon: accuracy of the approximate Hessians that the basin is for.
        accuracy: share of the first error after which iterations are counted.

    A factored layer, whose Hessian is singular by its gauge, and a problem whose Hessian does not
    fit into memory are not certified; the smallest eigenvalue is then an estimate by Lanczos.

    Returns:
        Verdicts and the numbers behind them; `print` gives sentences to quote.

    Raises:
        ValueError: a stack of problems, weights of the wrong shape, NaN or infinity, epsilon
            outside [0, 1) or accuracy outside (0, 1).

    Example:
        >>> from newtention import zoo
        >>> problem = zoo.planted(2, 40, noise=0.1, tokens="real").problem
        >>> solution = nt.solve(problem, n_init=4)
        >>> certificate = nt.certify(problem, solution.X, solution.Y)
        >>> certificate.local_minimum, certificate.distance < 1e-6
        ('proved', True)
    """
    if not 0 <= epsilon < 1:
        raise ValueError(f"epsilon must be in [0, 1); found {epsilon}.")
    if not 0 < accuracy < 1:
        raise ValueError(f"accuracy must be in (0, 1); found {accuracy}.")
    w = as_weights(problem, X, Y)
    if problem.batch != 1:
        raise ValueError(f"A certificate is of one problem; found a stack of {problem.batch}.")
    obstacle = _obstacle(problem, w)
    if obstacle is not None:
        return _estimated(problem, w, X, Y, obstacle)
    assert isinstance(w.layer, Bilinear | AttentionMap)
    data = data_in_double(problem)
    # Not rounded to the data's type: the distance is from the weights as given.
    theta = as_weights(data, X, Y).theta
    point = evaluate_point(problem, w.layer, theta, precise)
    flat = flat_space(problem, data, w.layer, point.penalty_hessian)
    local = prove_local(problem, data, point, flat, unfolding)
    overall = prove_global(problem, data, point)
    paper = paper_constants(data, point, _radius(local))
    basin = widest_basin(local, epsilon, accuracy)
    return _composed(problem, point, flat, local, overall, paper, basin, precise)


def _composed(
    problem: AttentionProblem,
    point: PointEvaluation,
    flat: FlatSpace,
    local: LocalProof,
    overall: GlobalProof,
    paper: PaperConstants,
    basin: Basin | None,
    precise: bool,
) -> Certificate:
    found = local.found
    radius = _radius(local)
    # The ball about the given point lies in this one about the centre.
    lipschitz = local.bounds.at(upward(radius + local.moved, 2))
    proved = found.certified or overall.proved
    reasons = _reasons(point, flat, local, overall, paper)
    verdict: Verdict = "proved" if proved else "not certified"
    return Certificate(
        local_minimum=verdict,
        global_minimum="proved" if overall.proved else "not certified",
        distance=min(local.distance, overall.distance),
        uniqueness_radius=math.inf if overall.proved else local.uniqueness,
        smallest_eigenvalue=local.eigenvalue,
        eigenvalue_proved=local.proved,
        gradient=upward(norm_upper(point.gradient) + point.gradient_error, 2),
        step=local.step,
        kantorovich=found.h,
        lipschitz=lipschitz.value,
        lipschitz_level=lipschitz.level,
        lipschitz_radius=radius,
        lipschitz_levels=dict(lipschitz.levels),
        paper_log10_lipschitz=paper.lipschitz,
        certifying_ridge=overall.certifying_ridge,
        paper_log10_threshold=paper.threshold,
        block_eigenvalue=_block_eigenvalue(point),
        basin=basin,
        flat=flat.names,
        unknowns=point.layer.size,
        relative_loss=_relative(problem, point.data_loss),
        precise=precise,
        reasons=reasons,
    )


def _radius(local: LocalProof) -> float:
    """Of the ball about the given point for which the Lipschitz constants are reported."""
    radius = local.distance if local.found.certified else local.step
    return radius if math.isfinite(radius) else 0.0


def _reasons(
    point: PointEvaluation,
    flat: FlatSpace,
    local: LocalProof,
    overall: GlobalProof,
    paper: PaperConstants,
) -> tuple[str, ...]:
    reasons = []
    of_map = isinstance(point.layer, AttentionMap)
    weights = "X" if of_map else "X and Y"
    if flat.names:
        count = sum(f.count for f in flat.names)
        reasons.append(
            f"{count} of {point.layer.size} directions are flat but for the tokens' rounding ("
            + "; ".join(f"{f.name}: {f.count}" for f in flat.names)
            + "): the local statement is about the others. A ridge would leave none."
        )
    if not local.found.certified:
        if not math.isfinite(point.hessian_error):
            reasons.append("No local proof: the Hessian's rounding errors are not bounded here.")
        elif not local.proved:
            reasons.append(
                "No local proof: the smallest eigenvalue of the Hessian is about "
                f"{local.eigenvalue:.3g}, with an error of up to {point.hessian_error:.3g}, and "
                "not proved positive; a ridge above that would help."
            )
        else:
            reasons.append(f"No local proof: {local.found.reason}")
    if not overall.proved:
        reasons.append(
            "No global proof: the regulariser is too weak for it; a ridge of "
            f"{rounded_up(overall.certifying_ridge):.3g} on {weights} would do."
            if math.isfinite(overall.certifying_ridge)
            else "No global proof: no ridge is known that would give one."
        )
    if paper.lipschitz is None and not of_map:
        reasons.append("The paper's constants are for one head without a bias: not evaluated.")
    return tuple(reasons)


def _block_eigenvalue(point: PointEvaluation) -> float:
    """Lemma 6.1: from the blocks' smallest eigenvalues and the norm of the mixed block.

    A map has one block.
    """
    nx, H, error = point.layer.size_x, point.hessian, point.hessian_error
    if isinstance(point.layer, AttentionMap):
        return smallest_eigenvalue_lower(H, error)
    xx, xy, yy = H[:nx, :nx], H[:nx, nx:], H[nx:, nx:]
    alpha_1, alpha_2 = (smallest_eigenvalue_lower(t.contiguous(), error) for t in (xx, yy))
    return lemma_6_1(alpha_1, alpha_2, spectral_norm_upper(xy, error))


def _relative(problem: AttentionProblem, loss: float) -> float:
    energy = float(problem.target_energy().double()[0])
    return loss / energy if energy > 0 else loss


def _obstacle(problem: AttentionProblem, w: Weights) -> str | None:
    """Why no dense proof is tried, or None."""
    if not isinstance(w.layer, Bilinear | AttentionMap):
        return (
            "Not certified: a factored layer has a gauge (W_Q G, W_K G^-T), so that its Hessian is "
            "singular at every point."
        )
    needed, free = proof_bytes(w.layer), available_bytes(problem.like.device)
    if needed > free:
        return (
            f"Not certified: a proof for {w.layer.size} unknowns needs {readable(needed)}, but "
            f"{readable(free)} are free: it does not fit into memory."
        )
    return None


def proof_bytes(layer: Bilinear | AttentionMap) -> int:
    """Predicted peak bytes of a proof without unfolding, beside the data."""
    return MATRICES * 8 * layer.size**2 + WORKSPACE


def _estimated(
    problem: AttentionProblem, w: Weights, X: Point, Y: ArrayLike | None, obstacle: str
) -> Certificate:
    """Without a dense Hessian: a Lanczos estimate of the smallest eigenvalue, called that."""
    layer = w.layer
    flat = loss_and_gradient(problem, layer, w.theta)[1]
    smallest = float(spectrum(problem, X, Y, k=1).smallest[0])
    gradient = float(flat.norm())
    verdict: Verdict = "not certified"
    reasons = [obstacle]
    if isinstance(layer, Bilinear | AttentionMap) and smallest > 0:
        if gradient <= NEAR * smallest * float(w.theta.norm()):
            verdict = "estimated"
        else:
            reasons.append(
                f"Not estimated: a gradient of {gradient:.3g} with a curvature of {smallest:.3g} "
                "leads far away."
            )
    return Certificate(
        local_minimum=verdict,
        global_minimum="not certified",
        distance=math.inf,
        uniqueness_radius=0.0,
        smallest_eigenvalue=smallest,
        eigenvalue_proved=False,
        gradient=gradient,
        step=math.inf,
        kantorovich=math.inf,
        lipschitz=math.inf,
        lipschitz_level="none",
        lipschitz_radius=0.0,
        lipschitz_levels={},
        paper_log10_lipschitz=None,
        certifying_ridge=math.inf,
        paper_log10_threshold=None,
        block_eigenvalue=-math.inf,
        basin=None,
        flat=(),
        unknowns=layer.size,
        relative_loss=_relative(problem, float(data_loss(problem, layer, w.theta)[0])),
        precise=False,
        reasons=tuple(reasons),
    )
