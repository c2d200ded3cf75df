"""What objects look like in notebooks and terminals, and progress where there is neither."""

import inspect
import io
import math
import re
import sys
import xml.etree.ElementTree as ET
from abc import ABC
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from rich.console import Console

import newtention as nt
from newtention import display, plots, sketch
from newtention.cli.main import run
from newtention.cli.progress import Display, terminal
from newtention.solution import COLUMNS, TABLE_HEADER, table_cells, table_row

N = 10
A = np.random.default_rng(0).normal(size=(N, 3))
B = np.random.default_rng(1).normal(size=(N, 2))
b = np.full(N, 1 / N)
PUBLIC = [getattr(nt, name) for name in nt.__all__] + [getattr(sketch, n) for n in sketch.__all__]
TABLES = (
    *(nt.AttentionProblem, nt.Solution, nt.History, nt.Certificate, nt.SoftmaxRegression),
    *(nt.SoftmaxCertificate, nt.AttentionSVM, nt.SelectedTokens, nt.RegularisationPath),
    *(nt.Regime, nt.Contraction, nt.Spectrum, nt.CurvatureOperator, nt.FactoredAttention),
    *(nt.BilinearAttention, nt.MapAttention, nt.BasinHopping),
)


@cache
def objects():
    """Instances of every public class, several where they can look different."""
    problem = nt.AttentionProblem(A, A, A, B, regularizer=nt.Ridge(1.0, 0.5), mask="causal")
    seen = []
    solution = nt.solve(problem, n_init=2, callback=seen.append)
    shorter = nt.solve(problem, max_iter=0, validation=problem)
    X, Y = solution.X, solution.Y
    weighted = nt.AttentionProblem(A, A, A, B, regularizer=nt.TokenWeights(100 * np.ones(N)))
    points = []
    paper = nt.solve(
        weighted,
        method="paper",
        options=nt.Options(sketch="none"),
        callback=lambda p: points.append((p.X, p.Y)),
    )
    contraction = nt.contraction(weighted, points, paper, sketch="none")
    certificate = nt.certify(problem, X, Y)
    between = np.array([[0.0], [1.0], [-1.0]])
    impossible = nt.attention_svm(np.ones((1, 1)), between, [0])
    spectrum = nt.spectrum(problem, X, Y, k=2, density=True)
    fit = nt.softmax_regression(A, b)
    two = sketch.calibrate("gaussian", A[:, :1], A[:, :1], epsilon=0.9, delta=0.5, draws=20)
    heads = np.ones((2, 3, 3)), np.ones((2, 3, 2))
    return (
        *(problem, nt.AttentionProblem.stack([problem, problem]), weighted),
        nt.AttentionProblem.from_maps(A, A, np.full((N, N), 1 / N)),
        *(solution, shorter, paper, solution.history, solution.history[0], seen[-1], nt.History()),
        nt.basin_hopping(problem, members=2, rounds=1),
        *(certificate, nt.certify(problem, 9 * X, Y), certificate.basin),
        *(fit, nt.certify_softmax(A, b, fit.x), nt.certify_softmax(A, b, fit.x + 9)),
        *(impossible, impossible.conflict, nt.attention_svm(A, A, np.arange(N), soft=1.0)),
        nt.attention_svm(A, A, np.arange(N)),
        *(nt.selected_tokens(problem, X, Y), nt.selected_tokens(problem, *heads)),
        nt.regularisation_path(nt.selection_problem(A, A, np.zeros(N, dtype=int)), [1.0, 0.1]),
        *(nt.paper_regime(weighted, paper.X, paper.Y), nt.paper_regime(weighted, 99 * X, Y)),
        *(contraction, contraction.steps[0]),
        *(spectrum, spectrum.density, nt.hessian_operator(problem, X, Y)),
        *(nt.hessian(problem, X, Y), nt.check_derivatives(problem, X, Y), nt.to_scipy(problem)),
        *(solution.layer, nt.MapAttention(X), nt.BilinearAttention(*map(torch.tensor, heads))),
        nt.FactoredAttention.from_torch(torch.nn.MultiheadAttention(8, 2)),
        *(nt.Rotary(), nt.Rotary(kept=[range(64)] * 32, width=128)),
        *(nt.Ridge(1 / 3), nt.TokenWeights(b), nt.TokenWeights([1, [2]]), nt.Proximity((X, Y))),
        *(nt.Options(), nt.Options(heads=3, freeze=["X"]), *nt.Status, *nt.SvmStatus),
        *(two, *(kind(8, 8, 4) for kind in sketch.KINDS.values())),
        *(kind(N, N, 4).sample(A, A) for kind in sketch.KINDS.values()),
    )


def of(kind):
    return [o for o in objects() if type(o) is kind]


def shown(html):
    """The texts of an element in order."""
    return [text for text in ET.fromstring(html).itertext() if text]


def test_every_public_class_is_here():
    classes = {c for c in PUBLIC if inspect.isclass(c) and ABC not in c.__bases__}
    assert classes <= {type(o) for o in objects()}
    assert set(TABLES) <= classes


def test_text_is_one_short_line_without_arrays():
    for o in objects():
        text = repr(o)
        assert 0 < len(text) < 200, text
        assert "\n" not in text
        assert not any(dump in text for dump in ("tensor(", "array(", "object at 0x")), text
        assert type(o).__name__ in text


def test_text_states_the_facts():
    (fit,) = of(nt.SoftmaxRegression)
    problem, (options, chosen) = of(nt.AttentionProblem)[0], of(nt.Options)
    assert repr(options) == "Options()"
    assert repr(chosen) == "Options(heads=3, freeze=['X'])"
    assert repr(problem) == (
        "AttentionProblem(1 sequence(s), 10 queries, 10 keys; d1 3, d2 3, d3 3, p 2; scale 1, "
        "mask causal, ridge; float64 on cpu)"
    )
    assert [repr(r) for r in of(nt.Rotary)] == [
        "Rotary(base=10000.0, pairing='halves')",
        "Rotary(base=10000.0, pairing='halves', 64 of 64 pairs in 32 head(s))",
    ]
    assert repr(nt.History()) == "History(0 records)"
    assert repr(fit.history).startswith(f"History({len(fit.history)} records, loss ")
    proved, unproved = of(nt.SoftmaxCertificate)
    assert "local minimum proved; within " in repr(proved)
    assert "local minimum not certified; softmax" in repr(unproved)
    regimes = of(nt.Regime)
    assert ["inside" in repr(r) for r in regimes] == [r.inside for r in regimes]


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.__name__)
def test_html_is_one_plain_element(kind):
    for o in of(kind):
        html = o._repr_html_()
        assert ET.fromstring(html).tag == "div"
        assert not any(bad in html for bad in ("<script", "<img", "color:", "background", "href"))
        texts = shown(html)
        assert len(texts) >= 2
        assert not any("tensor(" in text or "\n" in text for text in texts)


def test_html_has_the_rows_of_the_summary():
    for o in (*of(nt.Solution), *of(nt.SoftmaxRegression)):
        texts = shown(o._repr_html_())
        for line in o.summary().splitlines()[1:-1]:
            label, value = line[:20].rstrip(), line.split("  ")[-1].strip()
            assert any(text.startswith(label) or label.startswith(text) for text in texts)
            assert value in texts
        assert o.message in texts
    for o in (*of(nt.Certificate), *of(nt.SoftmaxCertificate)):
        texts = shown(o._repr_html_())
        for line in o.summary().splitlines():
            parts = line.rstrip(".").split(": ", 1)
            assert line in texts or all(part in texts for part in parts), line
    for o in (*of(nt.AttentionSVM), *of(nt.Spectrum)):
        text = " ".join(shown(o._repr_html_()))
        for number in (word.rstrip(".,;") for word in o.summary().split() if word[0].isdigit()):
            assert number in text


def test_html_of_tables_and_of_settings():
    (path,), (contraction,) = of(nt.RegularisationPath), of(nt.Contraction)
    for o, head in ((path, "ridge"), (contraction, "k")):
        texts, lines = shown(o._repr_html_()), str(o).splitlines()
        first = texts.index(head)
        names = lines[0].replace("data loss", "data_loss").replace("* ||X||", "*_||X||")
        names = names.replace("cond H", "cond_H").split()
        assert [t.replace(" ", "_") for t in texts[first : first + len(names)]] == names
        for line in lines[1 : 1 + len(getattr(o, "statuses", None) or o.steps)]:
            assert {line.split()[1], line.split("  ")[-1]} <= set(texts)
    problem, stack, weighted, maps = of(nt.AttentionProblem)
    assert "ridge, x 1.0, y 0.5" in shown(problem._repr_html_())
    assert "token weights, min 100.0, max 100.0" in shown(weighted._repr_html_())
    assert "d1 3, d2 3, attention maps" in shown(maps._repr_html_())
    assert shown(stack._repr_html_())[1:3] == ["Problems", "2"]
    (layer,) = of(nt.FactoredAttention)
    assert "2 x 8 x 4" in shown(layer._repr_html_())
    (operator,) = of(nt.CurvatureOperator)
    assert "X 1 x 3 x 3, Y 1 x 3 x 2" in shown(operator._repr_html_())
    one, two = of(nt.SelectedTokens)
    assert f"{N}, arranged {N}" in shown(one._repr_html_())
    assert f"{2 * N}, arranged 2 x {N}" in shown(two._repr_html_())


def test_a_solution_draws_its_loss():
    solution, _, _ = of(nt.Solution)
    root = ET.fromstring(solution._repr_html_())
    (line,) = root.iter("polyline")
    assert line.get("stroke") == "currentColor"
    heights = [float(point.split(",")[1]) for point in line.get("points").split()]
    assert len(heights) == len(solution.history)
    assert heights == sorted(heights)  # downwards on the screen
    assert "<svg" not in of(nt.Solution)[1]._repr_html_()  # a single point


def test_a_history_is_the_iteration_table():
    solution = of(nt.Solution)[0]
    history = nt.History([replace(r, validation=0.5) for r in solution.history])
    texts = shown(history._repr_html_())
    names = [*COLUMNS, "held out", "model"]
    assert texts[1 : 1 + len(names)] == names
    assert texts[-len(names) :] == [*table_cells(history[-1]), "0.50000", history[-1].model]
    assert "held out" not in shown(solution.history._repr_html_())


@pytest.mark.parametrize("ratio", [None, 0.5, -1.0, -1.5e24, 2.5e7, 1e-9, 99999.4])
def test_rows_stay_in_their_columns(ratio):
    record = replace(of(nt.Solution)[0].history[-1], ratio=ratio, model="newton")
    ends = [m.end() for m in re.finditer(r"\S+", table_row(record))]
    assert ends == [m.end() for m in re.finditer(r"\S+", TABLE_HEADER)]


def test_a_figure_shows_itself_without_pyplot():
    image = plots.loss(of(nt.Solution)[0])._repr_png_()
    assert image.startswith(b"\x89PNG")


def test_everything_is_escaped():
    rough = """<b> & "quotes" 'too'"""
    figure = display.sparkline([3.0, 1.0], rough)
    table = display.Table(rough, [(rough, rough), (rough,)], (rough, rough), [rough], figure)
    assert shown(table.html()) == [rough] * 8


def test_lines_and_long_tables():
    assert display.aligned([("a", "1"), ("long", "2")]) == ["a     1", "long  2"]
    assert display.sentences([("A", "b"), ("C d.",)]) == ["A: b.", "C d."]
    assert display.columns([("k", "name"), ("12", "x")], [3]) == ["  k  name", " 12  x"]
    rows = [(str(i), "value") for i in range(100)]
    texts = shown(display.Table("many", rows, ("k", "v")).html())
    assert "... 60 more ..." in texts
    assert {"19", "80"} < set(texts)
    assert not {"20", "79"} & set(texts)
    assert shown(display.Table("empty", []).html()) == ["empty"]


def test_course_and_sparkline():
    assert display.course([100.0, 10.0, 1.0], 9) == pytest.approx([1, 0.5, 0])
    assert display.course([1.0, 0.0], 9) == [1, 0]
    assert display.course([2.0, 2.0], 9) == [0, 0]
    assert display.course([0.0, 0.0], 9) == [0, 0]
    assert display.course([], 9) == []
    assert len(display.course([float(i) for i in range(999)], 24)) == 24
    assert display.sparkline([1.0, math.inf, math.nan], "x") == ""
    points = ET.fromstring(display.sparkline([float(i) for i in range(999)], "x"))[1]
    assert len(points.get("points").split()) == 200


# Progress


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, tokens=A, targets=B)
    return path


@pytest.mark.parametrize("forced", [False, True])
def test_piped_output_is_plain(data, tmp_path, capsys, monkeypatch, forced):
    if forced:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
    run(["fit", str(data), "--out", str(tmp_path / "r"), "--ridge=1", "--n-init=3", "--no-report"])
    out, err = capsys.readouterr()
    assert err == ""
    assert "Converged" in out
    assert out.replace("\n", "").isprintable()
    table = [line for line in out.splitlines() if line[:4].strip().isdigit()]
    assert [int(line[:4]) for line in table] == list(range(len(table)))
    assert max(map(len, table)) <= 140


def test_verbose_output_is_plain(capsys):
    nt.solve(of(nt.AttentionProblem)[0], n_init=3, verbose=True)
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert len([line for line in out.splitlines() if line.startswith("   0 ")]) == 1


def test_which_terminals_are_redrawn(monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    assert terminal() is None
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    assert terminal() is not None
    monkeypatch.setenv("TERM", "dumb")
    assert terminal() is None


@pytest.mark.parametrize("held_out", [None, 0.5])
@pytest.mark.parametrize("width", [20, 60, 83, 100])
def test_a_narrow_terminal_shows_whole_numbers(width, held_out):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None)
    display = Display(console)
    display.records = [replace(r, validation=held_out) for r in of(nt.Solution)[0].history]
    console.print(display.render())
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    first = next(i for i, line in enumerate(lines) if line.startswith("iter"))
    names = lines[first].replace("held out", "held-out").split()
    assert names == [*COLUMNS, "held-out"][: len(names)]
    row = [*table_cells(display.records[-1]), f"{held_out or 0:.5f}"]
    assert lines[first + len(display.records)].split() == row[: len(names)]


def interrupted(display):
    with display:
        print("a warning", file=sys.stderr)
        raise KeyboardInterrupt


def test_an_interrupt_leaves_the_terminal_clean(capsys):
    screen = io.StringIO()
    stdout, stderr = sys.stdout, sys.stderr
    console = Console(file=screen, force_terminal=True, width=100)
    with pytest.raises(KeyboardInterrupt):
        interrupted(Display(console))
    text = screen.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
    assert "a warning" not in text  # standard error was no terminal: it stays where it was sent
    assert capsys.readouterr().err == "a warning\n"
