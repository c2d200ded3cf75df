"""The report is complete, self-contained and safe; the figures draw every kind of run."""

import io
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

import newtention as nt
from newtention import plots
from newtention.diagnostics import QueryErrors, query_key_and_value_maps, zero_level
from newtention.drawing import number
from newtention.report import write_picture, write_report
from tests.certificates import ESTIMATED, GLOBAL, LOCAL, NOTHING
from tests.html import Page, require_self_contained, without_images

HOSTILE = "<script>alert('x')</script> & \"quotes\" {{ 7 * 7 }}"


def make_problem(like=np.float64, **keywords):
    rng = np.random.default_rng(3)
    offsets = np.array([0, 7, 12, 21])
    tokens = rng.standard_normal((21, 3))
    targets = rng.standard_normal((21, 2))
    if like is torch.float32:
        tokens, targets = (torch.tensor(a, dtype=torch.float32) for a in (tokens, targets))
    return nt.AttentionProblem.from_ragged(tokens, targets, offsets=offsets, **keywords)


def factored_start(heads=2, groups=1, rotary=None, biases=True):
    """A layer of the widths of `make_problem`."""
    rng = np.random.default_rng(7)
    shapes = {"W_Q": (heads, 3, 2), "W_K": (groups, 3, 2), "W_V": (groups, 3, 1)}
    shapes["W_O"] = (heads, 1, 2)
    if biases:
        shapes |= {"b_Q": (heads, 2), "b_K": (groups, 2), "b_O": (2,)}
    weights = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return nt.FactoredAttention(**weights, scale=0.5, rotary=rotary)


CG = {"method": "newton-cg", "max_iter": 2}


@pytest.fixture(scope="module")
def fitted():
    problem = make_problem(regularizer=nt.Ridge(0.1, 0.1))
    return problem, nt.solve(problem, n_init=3)


def report(tmp_path, problem, solution, title="A fit", provenance=None, certificate=None):
    path = tmp_path / "report.html"
    write_report(
        path, problem, solution, title=title, provenance=provenance, certificate=certificate
    )
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


def test_report_holds_the_key_numbers(tmp_path, fitted):
    problem, solution = fitted
    _, page = report(tmp_path, problem, solution, provenance={"source": "made up", "threads": 2})
    words = " ".join(page.text)
    for value in (solution.relative_loss, solution.loss, solution.data_loss, solution.penalty):
        assert number(value, 4)[:5] in words
    explained = f"explains {100 * (1 - solution.relative_loss):.1f} percent"
    assert explained in words
    assert solution.message in words
    assert "15 (X 9, Y 6)" in words
    assert "21 (5 to 9 in a sequence)" in words
    assert "ridge (x 0.1, y 0.1)" in words
    assert "made up" in words
    assert "each of the 3 starts" in re.sub(r"\s+", " ", words)
    assert words.count("Newton") >= len(solution.history)
    assert page.tags.count("svg") >= 12


def test_report_requests_nothing(tmp_path, fitted):
    text, page = report(tmp_path, *fitted)
    require_self_contained(text, page)


def test_report_escapes_what_it_is_given(tmp_path, fitted):
    provenance = {HOSTILE: HOSTILE, "nested": {HOSTILE: [HOSTILE]}, "list": [HOSTILE, 1]}
    text, page = report(tmp_path, *fitted, title=HOSTILE, provenance=provenance)
    assert "<script" not in text
    assert HOSTILE in "".join(page.text)


def test_report_is_the_same_twice(tmp_path, fitted):
    assert report(tmp_path, *fitted)[0] == report(tmp_path, *fitted)[0]


def test_report_refuses_a_stack(tmp_path, fitted):
    problem, solution = fitted
    with pytest.raises(ValueError, match="one problem"):
        write_report(
            tmp_path / "x.html",
            nt.AttentionProblem.stack([problem, problem]),
            solution,
            title="x",
        )


@pytest.fixture(scope="module")
def quick(fitted):
    """A run whose report is made in no time."""
    problem, solution = fitted
    return problem, replace(solution, history=nt.History(), start_losses=())


@pytest.fixture
def undrawn(monkeypatch):
    """Reports without their figures, where only the words count: drawing is most of the time."""
    monkeypatch.setattr("newtention.drawing.svg", lambda figure, name, label: "<svg></svg>")


def section(page):
    """Words of the section on the certificate."""
    words = re.sub(r"\s+", " ", " ".join(page.text))
    return words.partition(" Certificate ")[2].partition("This file is complete")[0]


@pytest.mark.usefixtures("undrawn")
def test_no_certificate_no_section(tmp_path, quick):
    assert section(report(tmp_path, *quick)[1]) == ""


@pytest.mark.usefixtures("undrawn")
def test_certificate_of_a_local_minimum(tmp_path, quick):
    words = section(report(tmp_path, *quick, certificate=LOCAL)[1])
    assert "Local minimum: proved. Within a distance of 3.25×10⁻¹¹ of these weights" in words
    assert "Global minimum: not certified." in words
    shown = {
        "Distance": "3.25×10⁻¹¹",
        "Alone within": "0.0421",
        "Smallest eigenvalue": "0.0875",
        "The same from blocks": "−4.5",
        "Gradient": "6.50×10⁻¹³",
        "Newton step": "3.13×10⁻¹¹",
        "Change of curvature": "952",
        "Kantorovich’s h": "2.75×10⁻⁷",
        "Basin of Newton steps": "1.50×10⁻⁴",
        "Certifying ridge": "1920",
        "Flat directions": "3",
    }
    for name, value in shown.items():
        assert f" {name} {value} " in words
    assert " Within 0.0625 of these weights the Hessian changes" in words
    assert "2.50×10⁵ The same, by radii and the residual’s Jacobian" in words
    assert "10 3709 The same, composed as in the paper’s" in words
    assert "10 17.25 The paper’s threshold" in words
    assert "a proved lower bound. If it is positive" in words
    assert "7 steps reach 10⁻⁸ of the first error. These weights are proved to lie inside." in words
    assert "leave the loss as it is: shift of the keys." in words
    assert f" What stands in the way {LOCAL.reasons[0]} " in words


@pytest.mark.usefixtures("undrawn")
def test_certificate_of_the_global_minimum(tmp_path, quick):
    words = section(report(tmp_path, *quick, certificate=GLOBAL)[1])
    assert "Local minimum: proved." in words
    assert "Global minimum: proved. The loss has no other stationary point" in words
    assert "decisive quantities beyond float64" in words
    for absent in ("Alone within", "flat", "What stands in the way", "∞"):
        assert absent not in words


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("certificate", [NOTHING, ESTIMATED])
def test_certificate_that_proves_nothing(tmp_path, quick, certificate):
    _, page = report(tmp_path, *quick, certificate=certificate)
    words = section(page)
    assert f"Local minimum: {certificate.local_minimum}. " in words
    for reason in certificate.reasons:
        assert reason in words
    for absent in ("Distance", "Alone within", "exactly one", "∞", "undefined", "proved lower"):
        assert absent not in words


@pytest.mark.usefixtures("undrawn")
def test_certified_bounds_are_rounded_outward(tmp_path, quick):
    """To nearest they would claim more than is proved."""
    certificate = replace(
        LOCAL,
        distance=1.2341e-9,
        uniqueness_radius=0.98765,
        smallest_eigenvalue=0.056789,
        block_eigenvalue=-1.2341,
        gradient=0.10001,
        lipschitz=12341.0,
        kantorovich=0.49999,
        certifying_ridge=123.4,
    )
    words = section(report(tmp_path, *quick, certificate=certificate)[1])
    for name, value in {
        "Distance": "1.24×10⁻⁹",
        "Alone within": "0.987",
        "Smallest eigenvalue": "0.0567",
        "The same from blocks": "−1.24",
        "Gradient": "0.101",
        "Change of curvature": "12400",
        "Kantorovich’s h": "0.5",
        "Certifying ridge": "124",
    }.items():
        assert f" {name} {value} " in words


@pytest.mark.usefixtures("undrawn")
def test_certificate_is_escaped(tmp_path, quick):
    hostile = replace(
        LOCAL,
        lipschitz_level=HOSTILE,
        lipschitz_levels={HOSTILE + "2": 1.0},
        flat=(replace(LOCAL.flat[0], name=HOSTILE),),
        reasons=(HOSTILE,),
    )
    text, page = report(tmp_path, *quick, certificate=hostile)
    assert "<script" not in text
    assert section(page).count(HOSTILE) == 4


def cases():
    rng = np.random.default_rng(0)

    def arrays(*shapes):
        return [rng.standard_normal(shape) for shape in shapes]

    one_token = nt.AttentionProblem(*arrays((1, 2), (1, 2), (1, 2), (1, 2)))
    A1, A2, A3, B = arrays((2, 5, 3), (2, 5, 3), (2, 5, 3), (2, 5, 2))
    weights = np.ones((2, 5))
    weights[0, 1] = 0
    padded = nt.AttentionProblem(
        A1, A2, A3, B, lengths=np.array([5, 3]), mask="causal", query_weights=weights
    )
    cross = nt.AttentionProblem(*arrays((70, 2), (90, 3), (90, 2), (70, 1)), scale=0.5)
    zero = nt.AttentionProblem(*arrays((4, 2), (4, 2), (4, 2)), np.zeros((4, 2)))
    heads = make_problem(regularizer=nt.Ridge(0.1, 0.1))
    return {
        "one token": (one_token, {}),
        "padded, causal, weighted": (padded, {"max_iter": 5}),
        "longer than a map": (cross, {"max_iter": 3}),
        "zero targets": (zero, {}),
        "no iterations": (heads, {"max_iter": 0}),
        "five heads": (heads, {"max_iter": 3, "options": nt.Options(heads=5)}),
        "torch, float32": (make_problem(torch.float32), {"max_iter": 5}),
        "proximity": (
            make_problem(regularizer=nt.Proximity((np.eye(3), np.ones((3, 2))), 0.5)),
            {"max_iter": 5},
        ),
        "bilinear, matrix-free": (heads, CG),
        "factored layer": (heads, {"start": factored_start()} | CG),
        "factored layer, rotary, no biases": (
            make_problem(mask="causal"),
            {"start": factored_start(rotary=nt.Rotary(), biases=False)} | CG,
        ),
        "factored layer, torch, float32": (
            make_problem(torch.float32),
            {"options": nt.Options(ranks=2), "validation": make_problem(torch.float32)} | CG,
        ),
    }


QUICK = ("one token", "padded, causal, weighted", "longer than a map", "zero targets")
QUICK += ("torch, float32", "factored layer, rotary, no biases")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in cases()]
)
def test_report_of_every_kind_of_fit(tmp_path, name):
    problem, settings = cases()[name]
    solution = nt.solve(problem, **settings)
    text, page = report(tmp_path, problem, solution)
    assert solution.message in "".join(page.text)
    assert "nan" not in without_images(text).lower()
    assert "undefined" not in text


@pytest.mark.usefixtures("unchecked")
def test_report_of_a_factored_layer(tmp_path, fitted):
    problem = fitted[0]
    solution = nt.solve(problem, start=factored_start(), validation=problem, **CG)
    text, page = report(tmp_path, problem, solution)
    words = re.sub(r"\s+", " ", " ".join(page.text))
    blocks = "W_Q 12, b_Q 4, W_K 6, b_K 2, W_V 3, W_O 4, b_O 2"
    assert f"33 ({blocks})" in words
    assert "The full Hessian in all 33 unknowns" in words
    assert "Every step used the Gauss–Newton matrix." in words
    assert f"Validation loss {number(solution.validation_loss, 4)} " in words
    assert "Of 2 heads" not in words
    assert report(tmp_path, problem, solution)[0] == text
    write_picture(tmp_path / "picture.png", problem, solution)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_maps_of_a_factored_layer():
    """The attention of X = W_Q W_K^T and the outputs of Y = W_V W_O, key/value heads shared."""
    problem = make_problem(scale=0.5)
    layer = replace(factored_start(heads=4, groups=2, biases=False), scale=1.0)
    X, Y = query_key_and_value_maps(layer)
    assert (X.shape, Y.shape) == ((4, 3, 3), (4, 3, 2))
    assert np.allclose(nt.predict(problem, X, Y), nt.predict(problem, layer), rtol=0, atol=1e-12)
    again = query_key_and_value_maps(nt.BilinearAttention(X[0], Y[0]))
    assert np.array_equal(again[0], X[:1])
    assert np.array_equal(again[1], Y[:1])


def test_report_of_a_run_without_records(tmp_path, fitted):
    problem, solution = fitted
    bare = replace(solution, history=nt.History(), start_losses=(), status=nt.Status.INTERRUPTED)
    _, page = report(tmp_path, problem, bare)
    assert "before its first iteration" in "".join(page.text)


@pytest.mark.usefixtures("undrawn")
def test_large_hessians_are_left_out(tmp_path, fitted, monkeypatch):
    monkeypatch.setattr("newtention.page.LARGEST_SPECTRUM", 14)
    _, page = report(tmp_path, *fitted)
    assert "The spectrum is left out: the dense Hessian of 15 unknowns" in "".join(page.text)


@pytest.mark.usefixtures("undrawn")
def test_exact_fit_is_called_exact(tmp_path, fitted):
    problem, solution = fitted
    exact = replace(solution, relative_loss=0.0, data_loss=0.0)
    assert "reproduces the targets exactly" in "".join(report(tmp_path, problem, exact)[1].text)
    tiny = replace(solution, relative_loss=3e-9)
    assert "all but a fraction 3×10⁻⁹" in "".join(report(tmp_path, problem, tiny)[1].text)
    bad = replace(solution, relative_loss=1.5)
    assert "1.5 times the energy" in "".join(report(tmp_path, problem, bad)[1].text)


def test_query_errors_add_up_to_the_loss(fitted):
    problem, solution = fitted
    errors = QueryErrors(problem, solution)
    assert np.isclose(0.5 * (errors.residual**2).sum(), solution.data_loss)
    relative = (errors.residual**2).sum() / (errors.target**2).sum()
    assert np.isclose(relative, solution.relative_loss)
    assert np.isclose(errors.share.sum(), 1)


def run(length, **columns):
    """A solution with a made-up history."""
    record = nt.Record(0, 1.0, 1.0, 1.0, 0.1, 0.1, 1.0, 0.1, 1.0, "newton", 1, 1, 0.0)
    rows = []
    for i in range(length):
        values = {name: value[i] for name, value in columns.items()}
        rows.append(replace(record, iteration=i, seconds=0.5 * i, **values))
    layer = nt.BilinearAttention(np.eye(2), np.eye(2))
    return nt.Solution(
        layer=layer,
        start=layer,
        loss=rows[-1].loss if rows else 0.0,
        data_loss=0.0,
        penalty=0.0,
        relative_loss=0.0,
        status=nt.Status.STALLED,
        iterations=max(0, length - 1),
        seconds=1.0,
        method="newton",
        tol=1e-10,
        history=nt.History(rows),
        start_losses=(0.0,),
    )


RUNS = {
    "none": run(0),
    "one": run(1),
    "zero loss": run(3, loss=[0.0] * 3, gradient=[0.0] * 3, decrement=[0.0] * 3),
    "constant": run(3, loss=[2.0] * 3),
    "not finite": run(
        4,
        loss=[3.0, 2.0, 1.0, np.inf],
        gradient=[np.nan] * 4,
        radius=[np.inf, 1.0, 2.0, 3.0],
        decrement=[1.0, 0.0, np.inf, 1e-300],
        damping=[0.0, 0.0, 0.0, 0.0],
    ),
    "tiny": run(2, loss=[1e-300, 1e-310], gradient=[1e-320, 1e308]),
    "switch": run(
        4, loss=[1e6, 1e3, 1.0, 1e-3], model=["gauss-newton", "gauss-newton", "newton", "newton"]
    ),
    "same second": run(3, loss=[3.0, 2.0, 1.0]),
}


def check(figure):
    """It draws without a warning (warnings are errors here), and every line is finite."""
    assert isinstance(figure.canvas, FigureCanvasAgg)
    figure.savefig(io.BytesIO(), dpi=50)
    for ax in figure.findobj(lambda a: hasattr(a, "get_xlim")):
        assert np.isfinite([*ax.get_xlim(), *ax.get_ylim()]).all()
        for line in ax.lines:
            assert np.isfinite(np.asarray(line.get_xydata(), dtype=float)).all()


@pytest.mark.parametrize("name", RUNS)
def test_convergence_figures(name):
    check(plots.convergence(RUNS[name]))
    check(plots.loss_gap(RUNS[name], "seconds"))
    check(plots.gradient(RUNS[name], "seconds"))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (1, 40), (40, 1), (2, 4, 3)])
def test_attention_figures(shape):
    before = np.full(shape, 1 / shape[-1])
    check(plots.attention(before, torch.tensor(before, dtype=torch.float32)))
    check(plots.attention(0 * before, 0 * before))


@pytest.mark.parametrize(
    "values", [[0.0], [0.5], [0.0] * 9, [np.nan, 0.2], [np.nan], np.linspace(0, 3, 4000)]
)
def test_error_figures(values):
    check(plots.errors(values))
    check(plots.errors(torch.tensor(values), torch.arange(len(values)) // 2))


@pytest.mark.parametrize(
    "values", [[1.0], [0.0], [-1.0], [], [1e-12, 3.0, 0.0, -1e5], np.geomspace(1e-8, 1e8, 500)]
)
def test_spectrum_figures(values):
    check(plots.spectrum(values))
    check(plots.spectrum(torch.tensor(values), marks={"a level": 0.1}))


def test_spectrum_counts_rounding_as_zero():
    values = np.array([1.0, 1e-16, -1e-16, -0.5])
    assert 1e-16 < zero_level(values) < 1e-14
    labels = [line.get_label() for line in plots.spectrum(values).axes[0].lines]
    assert labels == ["1 positive", "2 zero", "1 negative"]


@pytest.mark.parametrize("weights", [np.eye(3), np.zeros((2, 2)), torch.ones(2, 3, 4)])
def test_singular_value_figures(weights):
    check(plots.singular_values(weights, weights))


@pytest.mark.parametrize("losses", [[1.0], [1.0, 1.0], [1.0, np.inf, 3.0], [np.nan]])
def test_starts_figures(losses):
    check(plots.starts(losses))


def test_picture(tmp_path, fitted):
    path = tmp_path / "picture.png"
    write_picture(path, *fitted)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width = int.from_bytes(data[16:20], "big")
    assert 1190 <= width <= 1210


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0806124, "0.0806"),
        (-2.5, "−2.5"),
        (12345.0, "12345"),
        (1e-10, "10⁻¹⁰"),
        (-1e6, "−10⁶"),
        (1.2e-15, "1.20×10⁻¹⁵"),
        (9.999e-5, "10⁻⁴"),
        (float("inf"), "∞"),
        (float("nan"), "undefined"),
    ],
)
def test_number(value, text):
    assert number(value) == text
