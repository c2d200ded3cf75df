"""The page about a softmax regression: complete, self-contained, for every kind of run."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import newtention as nt
from newtention import plots
from newtention.drawing import number
from newtention.regression import fit, starts
from newtention.softmax_report import write_softmax_report
from tests.html import Page, require_self_contained, without_images


def problem(n=40, d=3, seed=0, noise=0.5):
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(n, d))
    b = np.exp(A @ rng.normal(size=d) + noise * rng.normal(size=n))
    return A, b / b.sum()


def report(tmp_path, A, b, result, **settings):
    path = tmp_path / "report.html"
    write_softmax_report(path, A, b, result, **{"title": "A row"} | settings)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    return text, page, re.sub(r"\s+", " ", " ".join(page.text))


def test_it_holds_the_key_numbers(tmp_path):
    A, b = problem()
    result = nt.softmax_regression(A, b, n_init=3)
    proof = nt.certify_softmax(A, b, result.x)
    text, page, words = report(
        tmp_path, A, b, result, certificate=proof, provenance={"source": "<b>made up</b>"}
    )
    require_self_contained(text, page)
    for value in (result.relative_loss, result.loss, result.data_loss):
        assert number(value, 4)[:5] in words
    assert f"The softmax explains {100 * (1 - result.relative_loss):.1f} percent" in words
    assert result.message in words
    assert "<b>made up</b>" in words
    assert "each of the 3 starts" in words
    assert "The full Hessian in all 3 unknowns has 3 positive" in words
    assert "Local minimum: proved. Within a distance of" in words
    assert "Alone within" in words
    worst = int(np.abs(result.fitted - b).argmax())
    assert re.search(rf"Share of data loss {worst} {re.escape(number(b[worst], 4))} ", words)
    assert report(tmp_path, A, b, result)[2].count("Certificate") == 0


def cases():
    A, b = problem()
    whole = problem(n=4000, d=2)
    signed = problem(seed=1)[1] * np.where(np.arange(40) % 2, 1, -1)
    return {
        "zero targets": (A, 0 * b, {}, "targets are all zero"),
        "exact": (*problem(noise=0), {}, "explains all but|reproduces the targets exactly"),
        "many rows": (*whole, {}, "explains"),
        "one row": (np.ones((1, 2)), np.ones(1), {}, "reproduces the targets exactly"),
        "no iterations": (A, b, {"max_iter": 0}, "Stopped at the iteration limit"),
        "worse than zero": (A, -b, {}, "outputs of zero would do no worse"),
        "cosh": (A, b, {"rescaled": True, "kind": "cosh", "ridge": 0.1}, "The residual is"),
        "sinh": (A, signed, {"rescaled": True, "kind": "sinh", "ridge": 0.1}, "The residual is"),
        "float32": (A.astype("f4"), b.astype("f4"), {"ridge": 1e-3}, "float32 on cpu"),
    }


QUICK = ("zero targets", "one row", "no iterations", "cosh")


@pytest.mark.filterwarnings("ignore:b ")
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in cases()]
)
def test_every_kind_of_run(tmp_path, name):
    A, b, settings, expected = cases()[name]
    result = nt.softmax_regression(A, b, **settings)
    text, _, words = report(tmp_path, A, b, result, ridge=settings.get("ridge", 0.0))
    assert re.search(expected, words)
    assert "nan" not in without_images(text).lower()
    assert "undefined" not in text


def test_what_overflows_is_said(tmp_path, monkeypatch):
    """A rescaled loss beyond any float: its power of ten instead; no spectrum."""
    monkeypatch.setattr(starts, "LARGE", np.inf)  # the start is taken as it is
    A, b = problem()
    start = 900 * A[0] / (A[0] @ A[0])
    settings = {"ridge": 1.0, "rescaled": True, "start": start, "max_iter": 2}
    result = nt.softmax_regression(A, b, **settings)
    assert result.loss == np.inf
    text, _, words = report(tmp_path, A, b, result, ridge=1.0)
    assert "the Hessian overflows at this point" in words
    assert f"10 {number(result.log10_loss, 4)}" in words
    assert "nan" not in without_images(text).lower()


def test_the_hessian_is_that_of_the_loss():
    A, b = (torch.from_numpy(t) for t in problem())
    x = torch.from_numpy(np.array([0.3, -0.2, 0.5]))
    for form in ("softmax", "exp", "sinh", "cosh"):

        def loss(x, form=form):
            if form == "softmax":
                r = torch.softmax(A @ x, 0) - b
            else:
                u = getattr(torch, form)(A @ x)
                r = u - u.sum() * b
            return 0.5 * r.square().sum() + 0.05 * x @ x

        expected = torch.func.hessian(loss)(x)
        assert torch.allclose(fit.hessian_at(A, b, x, 0.1, form), expected, rtol=1e-11, atol=0)


def test_large_hessians_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("newtention.page.LARGEST_SPECTRUM", 2)
    A, b = problem()
    words = report(tmp_path, A, b, nt.softmax_regression(A, b))[2]
    assert "the dense Hessian of 3 unknowns is beyond the limit of 2" in words


def test_a_run_without_records(tmp_path):
    A, b = problem()
    bare = replace(nt.softmax_regression(A, b), history=nt.History(), start_losses=())
    assert "before its first iteration" in report(tmp_path, A, b, bare)[2]


def test_the_figure_of_probabilities():
    """Dots at (target, fitted); the worst rows' share of the squares."""
    f, b = np.array([0.1, 0.2, 0.7]), np.array([0.1, 0.4, 0.5])
    left, right = plots.probabilities(f, b).axes
    dots = left.collections[0].get_offsets()
    assert np.array_equal(np.asarray(dots), np.stack([b, f], 1))
    assert np.allclose(right.lines[0].get_ydata(), [0.5, 1.0, 1.0])
    for nothing in (np.full(3, np.nan), b):
        assert plots.probabilities(nothing, b).axes
