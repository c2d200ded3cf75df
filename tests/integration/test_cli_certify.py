"""`newtention certify`, by its exit statuses, its output and what it writes."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import newtention as nt
from newtention.certify.certificate import Certificate
from newtention.cli import certify as command
from newtention.io import (
    load_problem,
    load_result,
    open_arrays,
    read_certificate,
    read_result,
    write_result,
)
from newtention.solution import Status
from tests.certificates import ESTIMATED, GLOBAL, LOCAL, NOTHING


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    return dict(
        tokens=rng.normal(size=(20, 3)),
        targets=rng.normal(size=(20, 2)),
        offsets=np.array([0, 8, 20]),
    )


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, **arrays())
    return path


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A problem read from a file, and its solution."""
    path = tmp_path_factory.mktemp("data") / "data.npz"
    np.savez(path, **arrays())
    problem, provenance = load_problem(path, ridge_x=0.1, ridge_y=0.1, mask="causal", scale=0.5)
    return problem, nt.solve(problem), provenance


@pytest.fixture
def result(fitted, data, tmp_path):
    """Its folder, as if fitted to `data`."""
    problem, solution, provenance = fitted
    shutil.copy(provenance.source, data)
    provenance = replace(provenance, source=str(data))
    write_result(tmp_path / "result", problem, solution, provenance, seed=0, n_init=1)
    (tmp_path / "result" / "report.html").write_text("of the fit")
    return tmp_path / "result"


@pytest.fixture
def prove(monkeypatch):
    """In place of the proofs: gives `prove.certificate`, keeps the arguments in `prove.calls`."""

    def fake(*arguments, **settings):
        fake.calls.append((arguments, settings))
        return fake.certificate

    fake.calls = []
    fake.certificate = LOCAL
    monkeypatch.setattr(command, "prove", fake)
    return fake


def test_it_prints_writes_and_reports(newtention, result, prove):
    status, out, err = newtention("certify", result)
    assert (status, err) == (0, "")
    assert out == (
        f"{LOCAL.summary()}\n\nCertificate  {result / 'certificate.json'}\n"
        f"Report       {result / 'report.html'}\n"
    )
    problem, solution, document = load_result(result)
    assert read_certificate(result, document) == LOCAL
    page = (result / "report.html").read_text()
    assert "<h2>Certificate</h2>" in page
    assert LOCAL.reasons[0] in page
    assert not [p for p in result.iterdir() if p.name.startswith(".")]

    [((given, layer), settings)] = prove.calls
    assert torch.equal(layer.theta, solution.layer.theta)
    assert nt.loss(given, layer) == nt.loss(problem, solution.layer) == solution.loss
    assert (given.mask, given.scale) == ("causal", 0.5)
    assert settings == dict(precise=False, unfolding=None, epsilon=0.01, accuracy=1e-8)


@pytest.mark.parametrize(("ridge", "kind"), [(0.1, "local"), (300, "global")])
def test_real_proofs(newtention, data, tmp_path, ridge, kind):
    folder = tmp_path / "r"
    assert newtention("fit", data, "-o", folder, "--ridge", ridge)[0] == 0
    status, out, err = newtention("certify", folder, "--require", kind)
    assert (status, err) == (0, "")
    assert f"{kind.capitalize()} minimum: proved." in out
    problem, solution, document = load_result(folder)
    expected = nt.certify(problem, solution.X, solution.Y)
    assert read_certificate(folder, document) == expected
    assert "undefined" not in (folder / "report.html").read_text()
    if kind == "local":
        assert newtention("certify", folder, "--require", "global", "--no-report")[0] == 3


def test_a_factored_layer_is_not_certified(newtention, data, tmp_path):
    folder = tmp_path / "r"
    newtention("fit", data, "-o", folder, "--ranks", 2, "--max-iter", 3)
    status, out, _ = newtention("certify", folder)
    assert status == 0
    assert "Not certified: a factored layer" in out
    assert "Not certified: a factored layer" in (folder / "report.html").read_text()


def test_the_options_reach_the_proof(newtention, result, prove):
    options = ["--precise", "--no-unfolding", "--epsilon", 0.2, "--accuracy", 1e-3]
    assert newtention("certify", result, *options, "--no-report")[0] == 0
    [(_, settings)] = prove.calls
    assert settings == dict(precise=True, unfolding=False, epsilon=0.2, accuracy=1e-3)
    assert (result / "report.html").read_text() == "of the fit"
    record = json.loads((result / "certificate.json").read_text())
    assert record["settings"] == dict(unfolding=False, epsilon=0.2, accuracy=1e-3)


def test_json_is_the_file_and_complete(newtention, result, prove):
    prove.certificate = NOTHING
    status, out, err = newtention("certify", result, "--json")
    assert (status, err) == (0, "")
    record = json.loads(out, parse_constant=lambda name: pytest.fail(name))
    assert record == json.loads((result / "certificate.json").read_text())
    fit = read_result(result).document
    assert record["weights"] == open_arrays(result / "weights.safetensors").sha256()
    assert record["provenance"] == fit["provenance"]
    assert record["regularizer"] == fit["regularizer"]
    assert Certificate.from_dict(record["certificate"]).to_dict() == NOTHING.to_dict()


@pytest.mark.parametrize(
    ("certificate", "local", "everywhere"),
    [
        (LOCAL, 0, 3),
        (GLOBAL, 0, 0),
        (NOTHING, 3, 3),
        (ESTIMATED, 3, 3),
        (replace(GLOBAL, local_minimum="estimated"), 0, 0),
    ],
)
def test_require(newtention, result, prove, certificate, local, everywhere):
    prove.certificate = certificate
    for kind, expected in (("local", local), ("global", everywhere)):
        status, out, err = newtention("certify", result, "--no-report", "--require", kind)
        assert status == expected
        assert certificate.summary() in out
        if expected == 0:
            assert err == ""
        else:
            assert err.startswith(f"--require {kind} asks for a proved {kind} minimum")
            assert err.count("\n") == 1
        assert (result / "certificate.json").exists()
    assert newtention("certify", result, "--no-report")[0] == 0


def test_a_fit_without_a_report_stays_without(newtention, result, prove):
    (result / "report.html").unlink()
    status, out, _ = newtention("certify", result)
    assert status == 0
    assert out.endswith(f"none, as the fit made none; newtention report {result} makes one\n")
    assert not (result / "report.html").exists()


def test_a_fit_cut_short_is_named_before_the_verdict(newtention, data, tmp_path):
    folder, place = tmp_path / "r", tmp_path / "c.ckpt"
    fit = ("fit", data, "-o", folder, "--max-iter", 2, "--no-report", "--force")
    for options, again in (
        ((), f"with --layer {folder / 'weights.safetensors'} and another --out"),
        (("--checkpoint", place), f"it continues from {place}"),
    ):
        assert newtention(*fit, *options)[0] == 3
        out = newtention("certify", folder)[1]
        words = r"The fit had not converged \(iteration limit; its gradient is up to [0-9.e+-]+\)"
        assert re.match(words, out)
        assert again in out.splitlines()[0]
        assert out.index(again) < out.index("Local minimum: not certified.")
    assert newtention("certify", folder, "--json")[1].startswith("{")
    # What it says works.
    layer = folder / "weights.safetensors"
    assert newtention(*fit[:2], "-o", tmp_path / "s", "--layer", layer, "--ridge", 0.1)[0] == 0
    assert "not converged" not in newtention("certify", tmp_path / "s", "--no-report")[1]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (Status.EARLY_STOP, "The fit stopped early, where the validation loss was lowest (its"),
        (Status.STALLED, NOTHING.summary()),
    ],
)
def test_what_a_status_says_of_a_failed_proof(newtention, fitted, tmp_path, prove, status, words):
    prove.certificate = NOTHING
    problem, solution, provenance = fitted
    stopped = replace(solution, status=status)
    write_result(tmp_path / "r", problem, stopped, provenance, seed=0, n_init=1)
    assert newtention("certify", tmp_path / "r")[1].startswith(words)


def test_frozen_blocks_are_mentioned(newtention, data, tmp_path, prove):
    options = ["--freeze", "Y", "--max-iter", 2, "--no-report", "--method", "newton-cg"]
    newtention("fit", data, "-o", tmp_path / "r", "--ridge", 0.1, *options)
    out = newtention("certify", tmp_path / "r", "--no-report")[1]
    assert "The fit kept Y frozen; the certificate is about all weights." in out


def test_report_keeps_the_certificate(newtention, result, prove):
    newtention("certify", result, "--no-report")
    assert newtention("report", result)[0] == 0
    assert "Local minimum: proved." in (result / "report.html").read_text()
    (result / "certificate.json").unlink()
    assert newtention("report", result)[0] == 0
    assert "Certificate" not in (result / "report.html").read_text()


def test_a_new_fit_has_no_certificate(newtention, data, result, prove):
    assert newtention("certify", result)[0] == 0
    assert newtention("fit", data, "-o", result, "--ridge", 0.2, "--force")[0] == 0
    assert not (result / "certificate.json").exists()
    assert "Certificate" not in (result / "report.html").read_text()


@pytest.mark.parametrize("change", ["weights", "ridge", "data"])
def test_a_certificate_of_another_fit_is_refused(newtention, data, result, prove, change):
    """Weights alone do not identify it: with --max-iter 0 two problems have the same."""
    newtention("certify", result, "--no-report")
    kept = (result / "certificate.json").read_bytes()
    _, solution, document = load_result(result)
    ridge = 0.1
    if change == "weights":
        solution = replace(solution, layer=solution.start)
    if change == "ridge":
        ridge = 0.2
    if change == "data":
        np.savez(data, **arrays(seed=1))
    settings = dict(ridge_x=ridge, ridge_y=ridge, mask="causal", scale=0.5)
    problem, provenance = load_problem(data, **settings)
    other = write_result(result, problem, solution, provenance, force=True, seed=0, n_init=1)
    assert read_certificate(result, other) is None
    (result / "certificate.json").write_bytes(kept)
    assert read_certificate(result, document) == LOCAL
    with pytest.raises(ValueError, match="belongs to other weights or data"):
        read_certificate(result, other)


def test_the_report_leaves_out_what_is_not_valid(newtention, result, prove):
    newtention("certify", result, "--no-report")
    path = result / "certificate.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weights": "0"}))
    status, _, err = newtention("report", result)
    assert status == 0
    assert err.startswith("Warning: the report shows no certificate: ")
    assert f"newtention certify {result} writes it anew." in err
    assert err.count("\n") == 1
    assert "Certificate" not in (result / "report.html").read_text()
    assert newtention("certify", result)[::2] == (0, "")
    assert "Local minimum: proved." in (result / "report.html").read_text()


DAMAGE = {
    "not JSON": (lambda record: "{", "is damaged"),
    "not ours": (lambda record: json.dumps([1]), "was not written by Newtention"),
    "version": (lambda record: json.dumps(record | {"format_version": 9}), "format version 9"),
    "no content": (
        lambda record: json.dumps({k: v for k, v in record.items() if k != "certificate"}),
        "incomplete or damaged",
    ),
    "verdict": (
        lambda record: json.dumps(edited(record, global_minimum="sure")),
        "global_minimum is 'sure'",
    ),
    "number": (
        lambda record: json.dumps(edited(record, distance="<script>")),
        "distance is '<script>'",
    ),
    "field": (lambda record: json.dumps(edited(record, colour="red")), "colour"),
}


def edited(record, **changes):
    return record | {"certificate": record["certificate"] | changes}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_certificate_is_refused(newtention, result, prove, unchecked, case):
    damage, message = DAMAGE[case]
    newtention("certify", result, "--no-report")
    path = result / "certificate.json"
    path.write_text(damage(json.loads(path.read_text())))
    with pytest.raises(ValueError, match=re.escape(str(path))) as error:
        read_certificate(result, read_result(result).document)
    assert message in str(error.value)


def test_moved_and_changed_data(newtention, data, result, prove):
    moved = data.rename(data.with_name("moved.npz"))
    status, _, err = newtention("certify", result)
    assert status == 2
    assert "give their place with --source" in err
    assert newtention("certify", result, "--source", moved)[0] == 0
    assert "Local minimum: proved." in (result / "report.html").read_text()
    np.savez(data, **arrays(seed=2))
    status, _, err = newtention("certify", result)
    assert status == 2
    assert "has changed since" in err
    for name in ("certify", "report"):
        status, _, err = newtention(name, result, "--source", data)
        assert status == 2
        assert f"--source: {data} is not the file of this fit, which was at {data}: its" in err
        status, _, err = newtention(name, result, "--source", "nope.npz")
        assert status == 2
        assert "--source: there is no file nope.npz; expected the data of this fit" in err


def swap_weights(folder):
    (folder / "weights.safetensors").write_bytes((folder / "start.safetensors").read_bytes())


def test_weights_of_another_fit_are_refused(newtention, result, prove):
    swap_weights(result)
    status, _, err = newtention("certify", result)
    assert status == 2
    assert "does not belong to the result.json beside it" in err
    assert not prove.calls


MISTAKES = {
    "no folder": (["nowhere"], "There is no result folder"),
    "not a result": (["."], "is not a result folder"),
    "require": (["result", "--require", "both"], "'both'"),
    "epsilon": (["result", "--epsilon", "1"], "--epsilon must be in [0, 1); found 1"),
    "epsilon NaN": (["result", "--epsilon", "nan"], "--epsilon must be in [0, 1); found nan"),
    "accuracy": (["result", "--accuracy", "0"], "--accuracy must be in (0, 1); found 0"),
    "option": (["result", "--exact"], "--exact"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_gets_one_sentence(newtention, result, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    arguments, message = MISTAKES[case]
    status, _, err = newtention("certify", *arguments)
    assert status == 2
    assert err.startswith("Error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (result / "certificate.json").exists()


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ValueError("epsilon must be small."), "Error: --epsilon must be small.\n"),
        (TypeError("a layer with factors"), "Error: a layer with factors\n"),
        (MemoryError("pass unfolding=False."), "Error: pass --no-unfolding.\n"),
    ],
)
def test_a_refusal_leaves_the_folder_alone(newtention, result, monkeypatch, error, sentence):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(command, "prove", refuse)
    before = {p: p.read_bytes() for p in result.iterdir()}
    assert newtention("certify", result) == (2, "", sentence)
    assert {p: p.read_bytes() for p in result.iterdir()} == before


def test_bugs_and_interruptions(newtention, result, prove, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "make_report", stop)
    status, _, err = newtention("certify", result)
    assert status == 130
    assert f"The certificate is complete.  Report: newtention report {result}" in err
    (result / "certificate.json").unlink()
    monkeypatch.setattr(command, "prove", stop)
    assert newtention("certify", result)[0] == 130
    monkeypatch.setattr(command, "prove", lambda *_, **__: 1 / 0)
    status, _, err = newtention("certify", result)
    assert status == 1
    assert "bug in Newtention" in err
    assert not (result / "certificate.json").exists()


def test_help_names_everything(newtention, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out = newtention("certify", "--help")[1]
    flags = """--require --precise --unfolding --no-unfolding --epsilon --accuracy --source --json
        --no-report"""
    for word in (*flags.split(), "Usage: newtention certify", "Examples", "Exit status"):
        assert word in out
    status, out, _ = newtention("certify")
    assert status == 2
    assert "Usage: newtention certify" in out
    assert "certify" in newtention("--help")[1]
