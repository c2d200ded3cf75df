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
    assert (status, err) == (0, "")
    assert f"rescaled {form} regression" in out
    file = open_arrays(data)
    expected = nt.softmax_regression(
        file.read("A"), file.read("b"), ridge=0.1, rescaled=True, kind=form
    )
    saved = load_softmax(tmp_path / "r")
    assert saved.result.x.equal(expected.x)
    assert saved.result.form == form
    assert newtention("certify", tmp_path / "r", "--require", "local", "--no-report")[0] == 0
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
