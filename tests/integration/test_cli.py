"""The command line, by its exit statuses, its output and what it writes."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import newtention as nt
from newtention.cli import fit as fit_command
from newtention.cli import report as report_command
from newtention.cli.progress import Display, Lines, sparkline
from newtention.cli.terminal import say
from newtention.io import load_problem, load_result, open_arrays, read_result, write_result
from newtention.solution import TABLE_HEADER

COMMAND = [sys.executable, "-c", "from newtention.cli.main import main; main()"]


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    return dict(
        tokens=rng.normal(size=(20, 3)),
        targets=rng.normal(size=(20, 2)),
        offsets=np.array([0, 8, 20]),
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "data.npz"
    np.savez(path, **arrays())
    return path


@pytest.fixture
def result(newtention, data, tmp_path):
    folder = tmp_path / "result"
    assert newtention("fit", data, "--out", folder, "--ridge", 0.1, "--no-report")[0] == 0
    return folder


def test_basin_hopping(newtention, data, tmp_path):
    folder = tmp_path / "result"
    common = ("fit", data, "--out", folder, "--ridge", 0.1, "--no-report", "--hopping")
    status, out, _ = newtention(*common, 0.1, "--heads", 2)
    assert status == 0
    assert "Basin hopping: " in out
    problem, solution, document = load_result(folder)
    assert document["hopping"] == 0.1
    assert solution.X.shape[0] == 2
    found = nt.basin_hopping(problem, rounds=0, options=nt.Options(heads=2))
    assert solution.loss <= found.solution.loss * (1 + 1e-9)
    for options, words in (
        ((-1.0,), "--hopping must be a positive"),
        ((1.0, "--n-init", 2), "--hopping does not go with --n-init"),
        ((1.0, "--max-iter", 10), "--hopping does not go with --max-iter"),
    ):
        status, _, err = newtention(*common, *options, "--force")
        assert status == 2
        assert words in err
    assert load_result(folder)[2] == document


def test_fit_writes_what_solve_returns(newtention, data, tmp_path):
    folder = tmp_path / "result"
    options = ["--ridge-x", 0.1, "--ridge-y", 0.2, "--scale", 0.5, "--mask", "causal"]
    options += ["--heads", 2, "--n-init", 3, "--seed", 4, "--max-iter", 100, "--no-report"]
    status, out, err = newtention("fit", data, "-o", folder, *options)
    assert (status, err) == (0, "")
    assert TABLE_HEADER in out.splitlines()
    assert "self-attention on 'tokens', targets 'targets'; 2 sequence(s), 20 queries" in out
    for words in ("Converged", "outputs miss", str(folder / "weights.safetensors")):
        assert words in out

    problem, _ = load_problem(data, ridge_x=0.1, ridge_y=0.2, scale=0.5, mask="causal")
    expected = nt.solve(problem, n_init=3, seed=4, max_iter=100, options=nt.Options(heads=2))
    _, saved, document = load_result(folder)
    assert torch.equal(saved.X, expected.X)
    assert saved.loss == expected.loss
    assert document["heads"] == 2
    assert (document["seed"], document["n_init"], document["max_iter"]) == (4, 3, 100)
    assert document["threads"] == torch.get_num_threads()


def test_json_prints_only_the_result(newtention, data, tmp_path):
    status, out, err = newtention("fit", data, "-o", tmp_path / "r", "--json", "--no-report")
    assert (status, err) == (0, "")
    assert json.loads(out) == json.loads((tmp_path / "r/result.json").read_text())
    # A warning goes to the other stream.
    np.savez(tmp_path / "i.npz", **arrays() | dict(tokens=np.arange(60).reshape(20, 3) % 7))
    _, out, err = newtention(
        "fit", tmp_path / "i.npz", "-o", tmp_path / "s", "--json", "--no-report", "--ridge", 1
    )
    assert json.loads(out)["success"]
    assert err.count("\n") == 1
    assert err.startswith("Warning: ")
    assert "'tokens' (queries) holds integers; computing in float64" in err


@pytest.mark.parametrize(
    ("option", "status"),
    [
        (["--max-iter", 1], "iteration limit"),
        (["--max-seconds", 0], "time limit"),
        (["--tol", 1e-300], "stalled"),
    ],
)
def test_unconverged_results_have_status_3(newtention, data, tmp_path, option, status):
    folder = tmp_path / "r"
    assert newtention("fit", data, "-o", folder, "--no-report", "--ridge", 0.1, *option)[0] == 3
    assert read_result(folder).solution.status == status


def test_float32(newtention, data, tmp_path):
    folder = tmp_path / "r"
    status, _, _ = newtention(
        "fit", data, "-o", folder, "--no-report", "--dtype", "float32", "--ridge", 0.1
    )
    assert status == 0
    assert read_result(folder).solution.X.dtype == torch.float32


def test_report_is_made_and_rebuilt(newtention, data, tmp_path):
    folder = tmp_path / "r"
    status, out, _ = newtention("fit", data, "-o", folder, "--ridge", 0.1)
    page = folder / "report.html"
    assert status == 0
    assert str(page) in out
    assert "data.npz" in page.read_text()
    page.unlink()
    assert newtention("report", folder)[:2] == (0, f"Report  {page}\n")
    assert "data.npz" in page.read_text()
    assert sorted(p.name for p in folder.iterdir()) == [
        "report.html",
        "result.json",
        "start.safetensors",
        "weights.safetensors",
    ]


def test_predict_for_the_data_of_the_fit(newtention, data, result, tmp_path):
    problem, solution, _ = load_result(result)
    expected = nt.predict(problem, solution.X, solution.Y)
    status, out, _ = newtention("predict", result)
    assert status == 0
    assert f"Relative loss  {solution.relative_loss:.6g}" in out
    assert torch.equal(
        open_arrays(result / "predictions.safetensors").read("predictions"), expected
    )
    target = tmp_path / "p.npz"
    assert newtention("predict", result, "--out", target)[0] == 0
    assert np.array_equal(np.load(target)["predictions"], expected)
    assert newtention("predict", result, "--out", target)[0] == 2
    assert newtention("predict", result, "--out", target, "--force")[0] == 0


def test_predict_for_other_data(newtention, result, tmp_path):
    other = tmp_path / "other.npz"
    content = arrays(seed=1)
    del content["targets"]
    np.savez(other, **content, keys=np.ones((3, 3)))
    out = tmp_path / "p.npz"
    status, printed, _ = newtention("predict", result, "--source", other, "-o", out)
    assert status == 0
    assert "Relative loss" not in printed
    solution = read_result(result).solution
    tokens = content["tokens"]
    problem = nt.AttentionProblem.from_ragged(tokens, np.zeros((20, 2)), offsets=content["offsets"])
    expected = nt.predict(problem, solution.X, solution.Y)
    assert np.array_equal(np.load(out)["predictions"], expected)

    status, _, err = newtention("predict", result, "--source", other, "-o", other, "--force")
    assert status == 2
    assert "holds the data" in err
    np.savez(other, **content | dict(tokens=tokens[:, :2]))
    status, _, err = newtention("predict", result, "--source", other, "-o", tmp_path / "q.npz")
    assert status == 2
    assert "fitted to queries of width 3" in err


def test_a_result_with_a_factored_layer(newtention, data, tmp_path):
    problem, provenance = load_problem(data, scale=0.5)
    rng = np.random.default_rng(1)
    shapes = {"W_Q": (2, 3, 2), "b_Q": (2, 2), "W_K": (1, 3, 2), "b_K": (1, 2), "W_V": (1, 3, 1)}
    shapes |= {"W_O": (2, 1, 2), "b_O": (2,)}
    weights = {name: torch.tensor(rng.standard_normal(shape)) for name, shape in shapes.items()}
    start = nt.FactoredAttention(**weights, scale=0.7, rotary=nt.Rotary(base=100.0))
    solution = nt.solve(problem, start=start, method="newton-cg", max_iter=2)
    folder = tmp_path / "r"
    document = write_result(folder, problem, solution, provenance, seed=0, n_init=1)
    assert (document["heads"], document["method"]) == (2, "newton-cg")

    again, saved, read = load_result(folder)
    assert read == document
    for got, want in ((saved.layer, solution.layer), (saved.start, solution.start)):
        assert got.parametrisation == want.parametrisation
        assert torch.equal(got.theta, want.theta)
    assert saved.history == solution.history
    assert nt.loss(again, saved.layer) == solution.loss
    assert torch.equal(nt.load_layer(folder / "weights.safetensors").theta, solution.layer.theta)

    status, out, _ = newtention("predict", folder)
    assert status == 0
    assert f"Relative loss  {solution.relative_loss:.6g}" in out
    outputs = open_arrays(folder / "predictions.safetensors").read("predictions")
    assert torch.equal(outputs, nt.predict(problem, solution.layer))
    page = folder / "report.html"
    assert newtention("report", folder)[:2] == (0, f"Report  {page}\n")
    text = page.read_text()
    assert "33 (W_Q 12, b_Q 4, W_K 6, b_K 2, W_V 3, W_O 4, b_O 2)" in text
    assert "undefined" not in text


def test_moved_and_changed_data(newtention, tmp_path):
    data, folder = tmp_path / "d.npz", tmp_path / "r"
    np.savez(data, **arrays())
    assert newtention("fit", data, "-o", folder, "--no-report", "--ridge", 0.1)[0] == 0
    moved = data.rename(tmp_path / "moved.npz")
    for command in ("report", "predict"):
        status, _, err = newtention(command, folder)
        assert status == 2
        assert "give their place with --source" in err
        assert newtention(command, folder, "--source", moved)[0] == 0
    np.savez(data, **arrays(seed=2))
    for command in ("report", "predict"):
        status, _, err = newtention(command, folder)
        assert status == 2
        assert "has changed since" in err


def test_examples_lists_commands_that_work(newtention):
    status, out, _ = newtention("examples")
    assert status == 0
    assert "1204 x 32 float32" in out
    assert "newtention fit example:minilm-head --out result --ridge 0.1\n" in out


@pytest.mark.parametrize("command", [[], ["fit"], ["predict"], ["report"], ["examples"]])
def test_help(newtention, command):
    status, out, _ = newtention(*command, "--help")
    assert status == 0
    assert "Usage: newtention" in out
    if command != ["examples"]:
        status, out, _ = newtention(*command)
        assert status == 2
        assert "Usage: newtention" in out


def test_help_of_fit_names_everything(newtention, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out = newtention("fit", "--help")[1]
    flags = """--queries --keys --values --targets --offsets --key-offsets --lengths --key-lengths
        --ridge --ridge-x --ridge-y --mask --scale --heads --method --tol --max-iter --max-seconds
        --n-init --seed --dtype --json --force --no-report --out"""
    for word in (*flags.split(), "Examples", "Exit status"):
        assert word in out


def test_version(newtention):
    assert newtention("--version")[:2] == (0, f"newtention {nt.__version__}\n")


def text_file(folder):
    (folder / "t.safetensors").write_text("not what it seems\n")
    return ["fit", folder / "t.safetensors", "-o", folder / "r"]


def file_with_nan(folder):
    content = arrays()
    content["targets"][2, 1] = np.nan
    np.savez(folder / "n.npz", **content)
    return ["fit", folder / "n.npz", "-o", folder / "r"]


def mismatched(folder):
    np.savez(folder / "m.npz", **arrays() | dict(targets=np.ones((19, 2))))
    return ["fit", folder / "m.npz", "-o", folder / "r"]


def good(folder, *options):
    np.savez(folder / "g.npz", **arrays())
    return ["fit", folder / "g.npz", "-o", folder / "r", *options]


MISTAKES = {
    "text file": (text_file, "t.safetensors is not a readable safetensors file"),
    "NaN": (file_with_nan, "array 'targets' (targets) must hold finite numbers; found nan at"),
    "shapes": (mismatched, "one row per row of 'tokens' (queries, 20 x 3); found 19 x 2"),
    "no file": (lambda f: ["fit", f / "x.npz", "-o", f / "r"], "There is no file"),
    "no example": (lambda f: ["fit", "example:x", "-o", f / "r"], "There is no example 'x'"),
    "no array": (lambda f: good(f, "--keys", "k"), "no array 'k' (keys); it holds 'offsets'"),
    "no out": (lambda f: good(f)[:2], "Missing option '--out'"),
    "method": (lambda f: good(f, "--method", "adam"), "'adam'"),
    "mask": (
        lambda f: good(f, "--mask", "block"),
        "Invalid value for '--mask': 'block' is not one of 'none', 'causal'.  See:",
    ),
    "dtype": (lambda f: good(f, "--dtype", "half"), "'half'"),
    "ridge": (
        lambda f: good(f, "--ridge", "-1"),
        "Invalid value for '--ridge': must be at least 0; found -1.  See:",
    ),
    "ridge NaN": (lambda f: good(f, "--ridge", "nan"), "idge"),
    "ridge text": (lambda f: good(f, "--ridge", "much"), "must be a number; found 'much'."),
    "half iterations": (lambda f: good(f, "--max-iter", "1.5"), "an integer; found '1.5'."),
    "tol": (lambda f: good(f, "--tol", "0"), "tol must be a positive finite number"),
    "scale": (lambda f: good(f, "--scale", "-1"), "scale must be a positive finite number"),
    "heads": (lambda f: good(f, "--heads", "0"), "'--heads'"),
    "option": (lambda f: good(f, "--ridges", "1"), "--ridges"),
    "command": (lambda f: ["fitt"], "'fitt'"),
    "file as folder": (lambda f: [*good(f)[:3], f / "g.npz"], "expected a folder"),
    "unwritable": (lambda f: [*good(f)[:3], f / "g.npz" / "r"], "cannot be written to"),
    "occupied": (lambda f: [*good(f)[:3], f], "choose another folder"),
    "no result": (lambda f: ["report", f / "r"], "There is no result folder"),
    "not a result": (lambda f: ["predict", f], "is not a result folder"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_gets_one_sentence(newtention, unchecked, tmp_path, case):
    build, message = MISTAKES[case]
    status, out, err = newtention(*build(tmp_path))
    assert status == 2
    assert err.startswith("Error: ")
    assert message in err
    assert err.count("\n") == 1
    assert out == ""
    assert not (tmp_path / "r").exists()


def map_file(folder, width=20, **more):
    content = arrays()
    del content["offsets"]
    np.savez(folder / "m.npz", **content | dict(weights=np.full((20, width), 1 / width)) | more)
    return ["fit", folder / "m.npz", "-o", folder / "r", "--targets", "weights"]


def test_messages_about_maps_name_the_arrays_of_the_file(newtention, tmp_path):
    kind = ("--kind", "attention-map", "--no-report")
    status, _, err = newtention(*map_file(tmp_path, 19), *kind)
    assert status == 2
    assert (
        f"{tmp_path / 'm.npz'}: array 'weights' (targets) must be 20 x 20 (queries x keys)" in err
    )
    fit = map_file(tmp_path, 7, offsets=np.array([0, 8, 20]))
    assert (
        "array 'weights' (targets) must have a column for every key" in newtention(*fit, *kind)[2]
    )
    fit = map_file(tmp_path, weights=np.full((20, 20), 0.06))
    err = newtention(*fit, *kind, "--max-iter", 1)[2]
    assert "array 'weights' (targets) has rows that no attention map matches: 20 that" in err
    fit = (*map_file(tmp_path), *kind, "--force", "--method", "sketched")
    status, out, err = newtention(*fit)
    assert (status, out) == (2, "")
    assert err == (
        "Error: --method sketched is not for attention maps.  Use --method newton or --method "
        "newton-cg.\n"
    )


@pytest.mark.parametrize("kind", ["layer", "attention-map"])
def test_a_fit_that_explains_nothing_is_named(newtention, tmp_path, kind):
    tokens = arrays()["tokens"]
    maps = np.exp(tokens @ np.random.default_rng(0).normal(size=(3, 3)) @ tokens.T)
    fit = map_file(tmp_path, weights=maps / maps.sum(1, keepdims=True))
    if kind == "layer":
        fit[-1] = "targets"
    fit += ["--kind", kind, "--no-report", "--force", "--ridge"]
    trivial = {"layer": "outputs that are all zero", "attention-map": "maps of equal weights"}
    status, _, err = newtention(*fit, 1e4)
    assert status == 0
    assert err.startswith("Warning: The fit explains next to nothing: its data loss is ")
    assert f" % of that of {trivial[kind]}" in err
    assert newtention(*fit, 0.0, "--max-iter", 50)[2] == ""


def test_memory_refusal(newtention, data, tmp_path, monkeypatch):
    monkeypatch.setattr("newtention.memory.available_bytes", lambda device: 1000)
    monkeypatch.setattr("newtention.planning.available_bytes", lambda device: 1000)
    status, _, err = newtention("fit", data, "-o", tmp_path / "r")
    assert status == 2
    assert "1000 bytes are free" in err


def test_results_are_replaced_only_on_demand(newtention, data, result):
    before = (result / "result.json").read_bytes()
    status, _, err = newtention("fit", data, "-o", result, "--no-report")
    assert status == 2
    assert "already holds a result; --force replaces it" in err
    assert (result / "result.json").read_bytes() == before
    assert newtention("fit", data, "-o", result, "--no-report", "--force")[0] == 0
    assert (result / "result.json").read_bytes() != before


def test_our_own_bugs_have_status_1(newtention, data, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise ValueError("a bug")

    monkeypatch.setattr("newtention.report.write_report", broken)
    status, _, err = newtention("fit", data, "-o", tmp_path / "r")
    assert status == 1
    assert "bug in Newtention" in err
    assert "The result in" in err
    read_result(tmp_path / "r")
    monkeypatch.setattr(fit_command, "solve", lambda *_, **__: 1 / 0)
    status, _, err = newtention("fit", data, "-o", tmp_path / "s")
    assert status == 1
    assert "ZeroDivisionError" in err
    assert not (tmp_path / "s").exists()


def test_an_interrupted_report_leaves_the_result(newtention, data, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(fit_command, "make_report", stop)
    status, _, err = newtention("fit", data, "-o", tmp_path / "r")
    assert status == 3
    assert "newtention report" in err
    monkeypatch.setattr(fit_command, "load_problem", stop)
    assert newtention("fit", data, "-o", tmp_path / "s")[0] == 130
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_ctrl_c_keeps_the_best_point(tmp_path, number):
    folder = tmp_path / "r"
    arguments = ["fit", "example:minilm-head", "-o", str(folder), "--tol", "1e-300", "--no-report"]
    with subprocess.Popen(
        [*COMMAND, *arguments, "--max-seconds", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        line = ""
        for line in process.stdout:
            if line.startswith("   0 "):
                break
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert err == ""
    assert "Interrupted; this is the best point so far." in out
    problem, solution, document = load_result(folder)
    assert document["status"] == "interrupted"
    assert nt.loss(problem, solution.X, solution.Y) == pytest.approx(solution.loss)
    assert solution.loss <= float(line.split()[1])


def test_a_closed_pipe_does_not_end_a_run(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        say("nobody reads this")
        say("nor this")


def test_the_live_display(data):
    problem, _ = load_problem(data, ridge_x=0.1, ridge_y=0.1)
    screen = io.StringIO()
    with Display(Console(file=screen, force_terminal=True, width=100)) as display:
        assert "starting" in str(display.render().renderables[0])
        nt.solve(problem, n_init=2, callback=display)
        lines = [str(line) for line in display.render().renderables]
    assert lines[2] == TABLE_HEADER
    assert f"{min(record.loss for record in display.records):.6e}" in lines[0]
    assert "0 of 2 starts running; 2 starts at once: a row is of the best" in lines[-1]
    assert "below the first" in screen.getvalue()


def test_lines_follow_the_starts_still_running(data, capsys):
    problem, _ = load_problem(data, ridge_x=0.1, ridge_y=0.1)
    nt.solve(problem, n_init=4, callback=Lines())
    caption, header, *rows = capsys.readouterr().out.splitlines()
    assert caption.startswith("4 starts at once: a row is of the best of those still running")
    assert header == TABLE_HEADER
    assert [int(row.split()[0]) for row in rows] == list(range(len(rows)))


def test_sparkline():
    assert sparkline([1000.0, 10.0, 0.1]) == "█▅▁"
    assert sparkline([1.0]) == "▁"
    assert sparkline([2.0, 0.0])[-1] == "▁"
    assert len(sparkline([float(i + 1) for i in range(500)])) == 24


def test_provenance_rows_are_text(result):
    rows = report_command.provenance_rows(read_result(result).document)
    assert all(isinstance(value, str) for value in rows.values())
    assert Path(rows["source"]).name == "data.npz"
