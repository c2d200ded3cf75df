"""The method and its memory, chosen from sizes."""

import pytest
import torch

import newtention as nt
from newtention import zoo
from newtention.derivatives.linearised import evaluation_bytes
from newtention.layers import Bilinear
from newtention.newton.matrix_free import Settings
from newtention.planning import plan

SETTINGS = Settings(tol=1e-8, max_iter=200)


def tokens(n, d, p=2):
    g = torch.Generator().manual_seed(0)
    A, B = (torch.randn(n, k, generator=g, dtype=torch.float64) for k in (d, p))
    return nt.AttentionProblem(A, A, A, B)


def chosen(problem, method="auto", cache=None, **kw):
    return plan(problem, Bilinear(1, *problem.widths), 1, method, SETTINGS, cache, **kw)


def test_auto_is_dense_where_that_is_fast():
    assert chosen(tokens(200, 8)).method == "newton"
    assert chosen(tokens(4000, 16)).method == "newton"


def test_auto_forms_no_matrix_where_that_is_slow():
    """4096 unknowns but eight rows: a factorisation costs a hundred times an iteration."""
    assert chosen(tokens(8, 64)).method == "newton-cg"


def test_auto_is_matrix_free_for_what_has_no_dense_method():
    problem = tokens(50, 4)
    assert chosen(problem, frozen=True).method == "newton-cg"
    e = torch.ones(1, 4, 2, dtype=torch.float64)
    layer = nt.FactoredAttention(W_Q=e, W_K=e, W_V=e, W_O=e.mT[..., :2])
    assert plan(problem, layer.parametrisation, 1, "auto", SETTINGS, None).method == "newton-cg"
    with pytest.raises(ValueError, match=r"Options\(freeze=\)"):
        chosen(problem, "newton", frozen=True)


def test_evaluations_are_kept_within_the_budget():
    problem = tokens(200, 8)
    size = evaluation_bytes(problem, Bilinear(1, *problem.widths))
    for cache, kept in ((size, True), (size - 1, False), (0, False), (None, True)):
        at = chosen(problem, "newton-cg", cache)
        assert at.cached is kept
        assert ("kept between products" in at.sentence) is kept
        assert ("computed again" in at.sentence) is not kept


def test_kept_evaluations_are_in_the_prediction():
    A = torch.randn(4000, 60, 4, dtype=torch.float64)
    problem = nt.AttentionProblem(A, A, A, A)
    size = evaluation_bytes(problem, Bilinear(1, *problem.widths))
    kept, fresh = (chosen(problem, "newton-cg", cache).needed for cache in (size, 0))
    assert 0.5 * size < kept - fresh < 1.5 * size


def test_the_choice_is_printed(capsys):
    problem = zoo.planted(3, 30).problem
    for method, cache, words in (
        ("newton", None, "method newton, "),
        ("newton-cg", 0, "attention weights computed again for every product"),
        ("newton-cg", 1 << 30, "attention weights kept between products"),
    ):
        options = nt.Options(cache_bytes=cache)
        nt.solve(problem, method=method, max_iter=1, verbose=True, options=options)
        assert words in capsys.readouterr().out
