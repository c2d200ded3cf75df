"""`newtention svm`, by its exit statuses, its output and what it writes."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import newtention as nt


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    A1, A2 = rng.normal(size=(30, 4)), rng.normal(size=(20, 5))
    selected = (A1 @ rng.normal(size=(4, 5)) @ A2.T).argmax(1)
    return dict(queries=A1, keys=A2, selected=selected, hopeless=rng.integers(0, 20, 30))


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, **arrays())
    return path


def test_it_solves_prints_and_writes(newtention, data, tmp_path):
    out = tmp_path / "svm"
    status, text, err = newtention("svm", data, "--out", out)
    assert status == 0
    assert "Solving" in err or err == ""
    a = arrays()
    expected = nt.attention_svm(a["queries"], a["keys"], a["selected"])
    assert text == (
        f"{expected.summary()}\n\nResult  {out / 'svm.json'}\nArrays  {out / 'svm.safetensors'}\n"
    )
    stored = load_file(out / "svm.safetensors")
    assert set(stored) == {"X", "support", "duals"}
    assert np.abs(stored["X"] - expected.X).max() < 1e-12
    assert (stored["support"] == expected.support).all()
    document = json.loads((out / "svm.json").read_text())
    assert (document["format"], document["status"]) == ("newtention-svm", "SOLVED")
    assert document["arrays"] == {"queries": "queries", "keys": "keys", "selected": "selected"}
    assert document["margin"] == pytest.approx(expected.margin)
    assert sorted(p.name for p in out.iterdir()) == ["svm.json", "svm.safetensors"]


def test_options_arrive(newtention, data, tmp_path):
    out = tmp_path / "svm"
    a = arrays()
    status, text, _ = newtention(
        *("svm", data, "-o", out, "--norm", "nuclear", "--soft", "2", "--selected", "hopeless"),
        *("--tol", "1e-6", "--json"),
    )
    document = json.loads(text)
    assert status == 0
    expected = nt.attention_svm(a["queries"], a["keys"], a["hopeless"], "nuclear", soft=2.0)
    assert document["objective"] == pytest.approx(expected.objective, rel=1e-5)
    assert (document["norm"], document["soft"], document["tol"]) == ("nuclear", 2.0, 1e-6)
    assert load_file(out / "svm.safetensors")["slack"].shape == (30,)


def test_self_attention_and_causal_masks(newtention, tmp_path):
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(12, 3))
    logits = np.where(np.tri(12) > 0, tokens @ rng.normal(size=(3, 3)) @ tokens.T, -np.inf)
    path = tmp_path / "tokens.safetensors"
    save_file({"tokens": tokens, "chosen": logits.argmax(1)}, path)
    out = tmp_path / "svm"
    status, *_ = newtention("svm", path, "--out", out, "--selected", "chosen", "--mask", "causal")
    assert status == 0
    expected = nt.attention_svm(tokens, tokens, logits.argmax(1), mask="causal")
    assert np.abs(load_file(out / "svm.safetensors")["X"] - expected.X).max() < 1e-12


def test_impossible_wishes_are_a_verdict(newtention, data, tmp_path):
    out = tmp_path / "svm"
    status, text, _ = newtention("svm", data, "--out", out, "--selected", "hopeless")
    assert status == 0
    assert text.startswith("Infeasible: no X gives every selected key the largest logit.")
    stored = load_file(out / "svm.safetensors")
    assert set(stored) == {"conflict_pairs", "conflict_selected", "conflict_weights"}
    document = json.loads((out / "svm.json").read_text())
    assert document["conflict"]["pairs"] == stored["conflict_pairs"].tolist()
    status, _, err = newtention(
        "svm", data, "-o", out, "--selected", "hopeless", "--require-separable", "--force"
    )
    assert status == 3
    assert "--require-separable asks for" in err


def test_a_result_is_replaced_only_by_force(newtention, data, tmp_path):
    out = tmp_path / "svm"
    assert newtention("svm", data, "-o", out)[0] == 0
    status, _, err = newtention("svm", data, "-o", out, "--soft", "1")
    assert (status, err) == (2, f"Error: {out} already holds a result; --force replaces it.\n")
    assert newtention("svm", data, "-o", out, "--soft", "1", "--force")[0] == 0
    assert json.loads((out / "svm.json").read_text())["soft"] == 1.0


def test_folders_of_others_are_left_alone(newtention, data, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("")
    for force in ([], ["--force"]):
        status, _, err = newtention("svm", data, "-o", other, *force)
        assert status == 2
        assert "thesis.tex" in err
    (other / "thesis.tex").rename(other / "result.json")
    status, _, err = newtention("svm", data, "-o", other, "--force")
    assert (status, "holds the result of a fit" in err) == (2, True)
    assert [p.name for p in other.iterdir()] == ["result.json"]


def several(**changes):
    return {**arrays(), **changes}


BAD = [
    (arrays(), ["--selected", "choice"], "has no array 'choice' (selected keys); name it with"),
    (arrays(), ["--queries", "q"], "has no array 'q' (queries)"),
    (arrays(), ["--selected", "keys"], "data.npz: array 'keys' must"),
    (arrays(), ["--soft", "-1"], "--soft must be positive and finite; found -1.0"),
    (arrays(), ["--tol", "3"], "--tol must be between 0 and 1; found 3.0"),
    (arrays(), ["--norm", "spectral"], "Invalid value for '--norm'"),
    (several(selected=np.full(30, 20)), [], "data.npz: selected[0] must be the index of a key"),
    (several(selected=np.arange(29)), [], "data.npz: selected must be 30"),
    (several(queries=np.full((30, 4), np.nan)), [], "'queries' (queries) must hold finite"),
    (several(offsets=np.array([0, 9, 30]), key_offsets=np.array([0, 1, 20])), [], "of sequence 0"),
    (several(offsets=np.array([0, 10, 30])), [], "key offsets"),
    (several(queries=np.zeros((2, 15, 4)), keys=np.zeros((2, 10, 5))), [], "selected must be 2 x"),
]  # fmt: skip


def test_several_sequences(newtention, tmp_path):
    rng = np.random.default_rng(0)
    queries, keys, X = rng.normal(size=(2, 6, 3)), rng.normal(size=(2, 5, 3)), np.eye(3)
    selected = (queries @ X @ keys.mT).argmax(-1)
    expected = nt.attention_svm(queries, keys, selected)
    batch = {"queries": queries, "keys": keys, "selected": selected}
    flat = {name: a.reshape(-1, *a.shape[2:]) for name, a in batch.items()}
    ragged = flat | {"first": np.array([0, 6, 12]), "key_offsets": np.array([0, 5, 10])}
    for content, options in ((batch, ()), (ragged, ("--offsets", "first"))):
        np.savez(tmp_path / "d.npz", **content)
        out = tmp_path / "svm"
        status, text, _ = newtention("svm", tmp_path / "d.npz", "-o", out, "--force", *options)
        assert status == 0
        assert text.startswith("Solved")
        document = json.loads((out / "svm.json").read_text())
        assert [document[name] for name in ("sequences", "queries", "keys")] == [2, 12, 10]
        found = load_file(out / "svm.safetensors")
        np.testing.assert_allclose(found["X"], expected.X, rtol=1e-9, atol=1e-12)
        assert np.array_equal(found["support"], expected.support)


@pytest.mark.parametrize(("content", "options", "words"), BAD, ids=[words for *_, words in BAD])
def test_mistakes_end_with_a_sentence(newtention, tmp_path, content, options, words):
    path, out = tmp_path / "data.npz", tmp_path / "svm"
    np.savez(path, **content)
    status, text, err = newtention("svm", path, "--out", out, *options)
    assert (status, text) == (2, "")
    assert words in err
    assert not out.exists()


def test_a_width_that_the_nuclear_norm_cannot_take(newtention, tmp_path):
    path = tmp_path / "wide.npz"
    tokens = np.random.default_rng(0).normal(size=(40, 40))
    np.savez(path, tokens=tokens, selected=np.arange(40))
    status, _, err = newtention("svm", path, "-o", tmp_path / "svm", "--norm", "nuclear")
    assert status == 2
    assert "--norm nuclear needs d1 + d2 of at most 64" in err


def test_missing_files_are_named(newtention, tmp_path):
    status, _, err = newtention("svm", tmp_path / "none.npz", "--out", tmp_path / "svm")
    assert (status, "There is no file" in err) == (2, True)


def test_stopped_short_is_status_3(newtention, data, tmp_path):
    status, text, _ = newtention("svm", data, "-o", tmp_path / "svm", "--tol", "1e-300")
    assert status == 3
    assert text.startswith("Stopped at the accuracy of the solver")
