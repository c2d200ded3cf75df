"""`fit --kind softmax`, `certify` and `report`, by exit statuses, output and what they write."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

import newtention as nt
from newtention.cli import softmax as command
from newtention.io import open_arrays
from newtention.io.softmax import load_softmax, read_softmax_certificate

KIND = ("--kind", "softmax")


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    A = rng.normal(size=(60, 3))
    b = np.exp(A @ rng.normal(size=3) + 0.3 * rng.normal(size=60))
    np.savez(tmp_path / "s.npz", A=A, b=b / b.sum())
    return tmp_path / "s.npz"


@pytest.fixture
def folder(newtention, data, tmp_path):
    assert newtention("fit", data, "-o", tmp_path / "r", *KIND, "--no-report")[0] == 0
    (tmp_path / "r" / "report.html").write_text("of the fit")
    return tmp_path / "r"


def test_a_fit_leaves_a_report(newtention, data, tmp_path):
    folder = tmp_path / "r"
    status, out, err = newtention("fit", data, "-o", folder, *KIND, "--n-init", 2)
    assert (status, err) == (0, "")
    assert out.endswith(f"Report  {folder / 'report.html'}\n")
    page = (folder / "report.html").read_text()
    assert "<h1>s.npz</h1>" in page
    assert "Softmax regression" in page
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]
    (folder / "report.html").unlink()
    status, out, err = newtention("report", folder)
    assert (status, out, err) == (0, f"Report  {folder / 'report.html'}\n", "")
    assert (folder / "report.html").read_text() == page


@pytest.mark.parametrize("form", ["exp", "cosh", pytest.param("sinh", marks=pytest.mark.full)])
def test_rescaled_forms(newtention, data, tmp_path, form):
    fit = ("fit", data, "-o", tmp_path / "r", *KIND, "--rescaled", form)
    status, _, err = newtention(*fit)
    assert status == 2
    assert f"--rescaled {form} needs a positive --ridge" in err
    assert not (tmp_path / "r").exists()
    status, out, err = newtention(*fit, "--ridge", 0.1, "--no-report")
    assert status == 0
    # These b are of exponentials: the other forms do no better than x = 0.
    assert ("explains next to nothing" in err) == (form != "exp")
    assert f"rescaled {form} regression" in out
    file = open_arrays(data)
    expected = nt.softmax_regression(
        file.read("A"), file.read("b"), ridge=0.1, rescaled=True, kind=form
    )
    saved = load_softmax(tmp_path / "r")
    assert saved.result.x.equal(expected.x)
    assert saved.result.form == form
    assert newtention("certify", tmp_path / "r", "--require", "local")[0] == 0
    assert not (tmp_path / "r" / "report.html").exists()  # as the fit had it
    proof = nt.certify_softmax(
        saved.A, saved.b, saved.result.x, ridge=0.1, rescaled=True, kind=form
    )
    assert read_softmax_certificate(saved) == proof


def test_what_is_read_is_what_was_found(data, folder):
    file = open_arrays(data)
    expected = nt.softmax_regression(file.read("A"), file.read("b"))
    found = load_softmax(folder).result
    assert found.x.equal(expected.x)
    assert found.fitted.equal(expected.fitted)
    same = ("form", "loss", "log10_loss", "penalty", "status", "iterations", "tol", "start_losses")
    assert all(getattr(found, name) == getattr(expected, name) for name in same)
    times = {"seconds", "ratio"}
    for ours, theirs in zip(found.history.to_dicts(), expected.history.to_dicts(), strict=True):
        assert all(ours[name] == theirs[name] for name in ours.keys() - times)


def test_certify(newtention, folder):
    status, out, err = newtention("certify", folder, "--require", "local")
    assert (status, err) == (0, "")
    assert out.startswith("Local minimum: proved.\n")
    assert out.endswith(f"Report       {folder / 'report.html'}\n")
    saved = load_softmax(folder)
    assert read_softmax_certificate(saved) == nt.certify_softmax(saved.A, saved.b, saved.result.x)
    assert "<h2>Certificate</h2>" in (folder / "report.html").read_text()
    status, out, _ = newtention("certify", folder, "--json", "--no-report")
    assert json.loads(out) == json.loads((folder / "certificate.json").read_text())
    assert newtention("certify", folder, "--require", "global", "--no-report")[0] == 3
    for option in (("--precise",), ("--epsilon", 0.1), ("--no-unfolding",)):
        status, _, err = newtention("certify", folder, *option)
        assert status == 2
        assert f"{option[0].replace('no-', '')} does not go with a softmax regression" in err


@pytest.mark.parametrize("form", [None, "exp", "sinh"])
def test_predictions(newtention, data, tmp_path, form):
    folder, other = tmp_path / "r", tmp_path / "other.npz"
    ridge = () if form is None else ("--rescaled", form, "--ridge", 1e-3)
    assert newtention("fit", data, "-o", folder, *KIND, "--no-report", *ridge)[0] == 0
    saved = load_softmax(folder).result
    status, out, err = newtention("predict", folder)
    assert (status, err) == (0, "")
    assert out.startswith(f"Relative loss  {saved.relative_loss:.6g} on {data}: 60 rows\n")
    fitted = open_arrays(folder / "predictions.safetensors").read("predictions")
    assert np.allclose(fitted, saved.fitted, rtol=1e-12, atol=0)
    # Other data, without b and under other names.
    A = np.random.default_rng(1).normal(size=(7, 3))
    np.savez(other, M=A, wide=np.ones((7, 4)))
    data.unlink()
    asked = ("predict", folder, "--source", other, "-o", tmp_path / "p.npz", "--queries", "M")
    status, out, err = newtention(*asked)
    assert (status, err) == (0, "")
    assert "Relative loss" not in out
    u = {None: np.exp, "exp": np.exp, "sinh": np.sinh}[form](A @ saved.x.numpy())
    assert np.allclose(np.load(tmp_path / "p.npz")["predictions"], u / u.sum(), rtol=1e-10)
    status, _, err = newtention(*asked[:-1], "wide", "--force")
    assert status == 2
    assert "array 'wide' (queries) must have 3 columns" in err
    for option in ("--keys", "--offsets"):
        status, _, err = newtention(*asked, option, "M")
        assert status == 2
        assert f"{option} does not go with a softmax regression" in err
    status, _, err = newtention("predict", folder)
    assert status == 2
    assert "give their place with --source" in err


@pytest.mark.parametrize("ridge", [1e-4, 1e4])
@pytest.mark.parametrize("form", [None, "exp", "sinh"])
def test_a_fit_that_explains_nothing_is_named(newtention, data, tmp_path, form, ridge):
    rescaled = () if form is None else ("--rescaled", form)
    fit = ("fit", data, "-o", tmp_path / "r", *KIND, *rescaled, "--ridge", ridge, "--no-report")
    status, out, err = newtention(*fit)
    assert status == 0
    saved = load_softmax(tmp_path / "r")
    share = (saved.result.fitted - saved.b).square().sum() / (1 / 60 - saved.b).square().sum()
    assert f"The fitted values miss {100 * share:.4g} % of the sum of squares" in out
    assert err.startswith("Warning: The fit explains next to nothing") == bool(share >= 0.95)
    assert bool(share >= 0.95) == (ridge > 1 or form == "sinh")


def test_a_fit_cut_short_is_named_before_the_verdict(newtention, data, tmp_path):
    folder = tmp_path / "r"
    assert newtention("fit", data, "-o", folder, *KIND, "--no-report", "--max-iter", 0)[0] == 3
    status, out, _ = newtention("certify", folder)
    assert status == 0
    assert out.startswith("The fit had not converged (iteration limit; its gradient is up to ")
    assert "Fit again with a higher --max-iter or --max-seconds.\n\nLocal minimum: not" in out
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (dict(v=np.ones(9)), "array 'v' (targets) must have one entry per row of 'M' (queries, 4"),
        (dict(M=np.ones(4)), "array 'M' (queries) must be 2-D and not empty; found 4."),
        (dict(M=np.ones((4, 0))), "array 'M' (queries) must be 2-D and not empty; found 4 x 0."),
        (dict(v=np.full(4, np.nan)), "array 'v' (targets) must hold finite numbers; found nan"),
        (dict(M=np.ones((4, 1), bool)), "array 'M' (queries) must hold real numbers; found bool"),
    ],
)
def test_messages_name_the_arrays_of_the_file(newtention, tmp_path, content, message):
    path = tmp_path / "c.npz"
    np.savez(path, **dict(M=np.ones((4, 1)), v=np.full(4, 0.25)) | content)
    fit = ("fit", path, "-o", tmp_path / "r", *KIND, "--queries", "M", "--targets", "v")
    status, _, err = newtention(*fit)
    assert status == 2
    assert err.startswith(f"Error: {path}: {message}")


def test_warnings_name_the_arrays_of_the_file(newtention, tmp_path):
    path = tmp_path / "c.npz"
    np.savez(path, M=np.array([[1], [0], [2]]), v=np.array([2.0, 1.0, -0.5]))
    fit = ("fit", path, "-o", tmp_path / "r", *KIND, "--queries", "M", "--targets", "v")
    err = newtention(*fit, "--ridge", 1, "--no-report")[2]
    assert f"Warning: {path}: array 'M' (queries) holds integers; computing in float64.\n" in err
    assert f"Warning: {path}: array 'v' (targets) has 1 negative entries and sums to 2.5" in err


def test_what_is_not_proved_has_status_3(newtention, folder, monkeypatch):
    saved = load_softmax(folder)
    proof = nt.certify_softmax(saved.A, saved.b, saved.result.x)
    nothing = replace(
        proof, local_minimum="not certified", distance=np.inf, reasons=("<i>Nothing</i> is known.",)
    )
    monkeypatch.setattr(command, "certify_softmax", lambda *_, **__: nothing)
    status, out, err = newtention("certify", folder, "--require", "local")
    assert status == 3
    assert "the verdict is 'not certified'" in err
    assert "Nothing" in out
    page = (folder / "report.html").read_text()
    assert "&lt;i&gt;Nothing&lt;/i&gt; is known." in page
    assert read_softmax_certificate(saved) == nothing


def test_a_new_fit_drops_what_was_derived(newtention, data, folder):
    assert newtention("certify", folder, "--no-report")[0] == 0
    fit = ("fit", data, "-o", folder, *KIND, "--force", "--no-report")
    assert newtention(*fit)[0] == 0
    assert {p.name for p in folder.iterdir()} == {"softmax.json", "softmax.safetensors"}


def test_data_that_moved_or_changed(newtention, data, folder, tmp_path):
    shutil.move(data, tmp_path / "new.npz")
    status, _, err = newtention("certify", folder)
    assert status == 2
    assert "give their place with --source" in err
    assert newtention("certify", folder, "--no-report", "--source", tmp_path / "new.npz")[0] == 0
    np.savez(data, A=np.ones((3, 1)), b=np.ones(3) / 3)
    status, _, err = newtention("report", folder)
    assert status == 2
    assert "has changed since" in err


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("softmax.json", lambda text: "{", "is damaged"),
        ("softmax.json", lambda text: text.replace("newtention-softmax", "x"), "not written by"),
        ("softmax.json", lambda text: text.replace('"form"', '"from"'), "incomplete or damaged"),
        ("softmax.safetensors", lambda text: text[:-1] + "\0", "does not belong to"),
    ],
)
def test_damaged_folders(newtention, folder, name, edit, message):
    path = folder / name
    path.write_text(edit(path.read_text("latin-1")), "latin-1")
    for name in ("report", "certify"):
        status, _, err = newtention(name, folder)
        assert status == 2
        assert message in err


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda record: {**record, "ridge": 1.0}, "belongs to another x or other data"),
        (lambda record: {**record, "certificate": {}}, "incomplete or damaged"),
        (
            lambda record: record | {"certificate": record["certificate"] | {"distance": "far"}},
            "incomplete or damaged",
        ),
        (
            lambda record: record | {"certificate": record["certificate"] | {"local_minimum": 3}},
            "incomplete or damaged",
        ),
    ],
)
def test_a_certificate_of_something_else_is_refused(newtention, folder, edit, message):
    assert newtention("certify", folder, "--no-report")[0] == 0
    path = folder / "certificate.json"
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=f"{message}.*newtention certify .* writes it anew"):
        read_softmax_certificate(load_softmax(folder))


def test_a_damaged_certificate_is_not_shown(newtention, folder):
    (folder / "certificate.json").write_text("{")
    status, _, err = newtention("report", folder)
    assert status == 0
    assert "Warning: the report shows no certificate" in err
    assert "<h2>Certificate</h2>" not in (folder / "report.html").read_text()


def test_interruptions_and_bugs(newtention, data, folder, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    def broken(*_, **__):
        raise ValueError("a bug")

    monkeypatch.setattr("newtention.softmax_report.write_softmax_report", broken)
    assert newtention("report", folder)[0] == 1
    monkeypatch.setattr(command, "make_softmax_report", stop)
    status, _, err = newtention("fit", data, "-o", tmp_path / "s", *KIND)
    assert status == 3
    assert f"newtention report {tmp_path / 's'}" in err
    assert newtention("certify", folder)[0] == 130
    assert (folder / "certificate.json").exists()


def test_rescaled_goes_with_softmax_alone(newtention, data, tmp_path):
    status, _, err = newtention("fit", data, "-o", tmp_path / "r", "--rescaled", "exp")
    assert status == 2
    assert "--rescaled does not go with --kind layer" in err
