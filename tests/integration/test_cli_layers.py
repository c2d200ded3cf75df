"""The command line on real layers: starts, held-out data, checkpoints, what a folder rebuilds."""

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import newtention as nt
from newtention.cli import progress as progress_module
from newtention.cli.progress import Display, Lines, Watch, duration
from newtention.cli.report import provenance_rows
from newtention.io import ArrayNames, load_problem, load_result, read_result
from newtention.solution import TABLE_HEADER

COMMAND = [sys.executable, "-c", "from newtention.cli.main import main; main()"]
DATA = Path(__file__).parents[2] / "data"
OFFSETS = np.array([0, 9, 16, 24, 35, 44])


def weights(seed=0, heads=2, groups=2, d=6, e=4, p=5, bias=True):
    """Blocks of a layer, W_Q and so on, as NumPy arrays."""
    rng = np.random.default_rng(seed)
    shapes = dict(W_Q=(heads, d, e), W_K=(groups, d, e), W_V=(groups, d, e), W_O=(heads, e, p))
    blocks = {name: rng.normal(size=shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    if bias:
        shapes = dict(b_Q=(heads, e), b_K=(groups, e), b_V=(groups, e), b_O=(p,))
        blocks |= {name: 0.3 * rng.normal(size=shape) for name, shape in shapes.items()}
    return blocks


def arrays(seed=0, layer=None):
    """Tokens, and the outputs of a layer with some noise."""
    rng = np.random.default_rng(seed)
    tokens = rng.normal(size=(OFFSETS[-1], 6))
    blank = nt.AttentionProblem.from_ragged(tokens, np.zeros((len(tokens), 5)), offsets=OFFSETS)
    layer = nt.FactoredAttention.from_arrays(weights(seed=3)) if layer is None else layer
    targets = nt.predict(blank, layer) + 0.05 * rng.normal(size=(len(tokens), 5))
    return dict(tokens=tokens, targets=targets, offsets=OFFSETS)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Tokens, targets and a layer in one file, the layer another one than made the targets."""
    path = tmp_path_factory.mktemp("source") / "source.npz"
    np.savez(path, **arrays(), **weights())
    return path


def same(a, b):
    """Whether two layers are the same bit for bit."""
    return a.parametrisation == b.parametrisation and torch.equal(a.theta, b.theta)


def test_a_layer_beside_the_tokens(newtention, source, tmp_path):
    folder = tmp_path / "r"
    status, out, err = newtention(
        "fit", source, "-o", folder, "--layer", "source", "--ranks", "3,2", "--max-iter", 2
    )
    assert (status, err) == (3, "")
    unknowns = 2 * 6 * 3 * 2 + 2 * 3 * 2 + 2 * 6 * 2 + 2 * 2 + 2 * 2 * 5 + 5
    assert f"44 queries, {unknowns} unknowns, float64." in out
    assert f"Layer {source}: 2 heads, queries and keys 4 wide, values 4, logits times 0.5;" in out
    assert "the fit begins with 2 heads, queries and keys 3 wide, values 2." in out
    assert (folder / "report.html").exists()

    problem, _ = load_problem(source)
    start = nt.load_layer(source)
    expected = nt.solve(problem, start=start, max_iter=2, options=nt.Options(ranks=(3, 2)))
    layer = nt.load_layer(folder / "weights.safetensors")
    assert same(layer, expected.layer)
    rebuilt, saved, document = load_result(folder)
    assert same(saved.layer, layer)
    assert nt.loss(rebuilt, saved.layer) == pytest.approx(saved.loss, rel=1e-12)
    assert document["ranks"] == [3, 2]
    assert document["layer"]["source"] == document["provenance"]["source"] == str(source)
    assert document["layer"]["sha256"] == document["provenance"]["sha256"]
    assert (document["validation"], document["checkpoint"]) == (None, None)

    assert newtention("report", folder)[0] == 0
    page = (folder / "report.html").read_text()
    assert "layer to begin from" in page
    status, out, _ = newtention("predict", folder)
    assert status == 0
    assert f"Relative loss  {saved.relative_loss:.6g}" in out
    outputs = load_file(folder / "predictions.safetensors")["predictions"]
    assert torch.equal(outputs, nt.predict(rebuilt, layer))


def test_flat_weights_groups_rotary_causal(newtention, source, tmp_path):
    """(in, out) weights of all heads under a prefix; what the fit computes is what solve does."""
    blocks = weights(seed=5, heads=4, groups=2, bias=False)
    flat = {n: np.concatenate(list(w), 1) for n, w in blocks.items() if n != "W_O"}
    flat["W_O"] = np.concatenate(list(blocks["W_O"]), 0)
    path = tmp_path / "weights.safetensors"
    save_file({f"block.{n}": torch.tensor(w) for n, w in flat.items()}, path)
    options = ["--layer", path, "--layer-prefix", "block.", "--layer-heads", 4, "--kv-heads", 2]
    options += ["--rope-base", 100, "--rope-pairing", "neighbours", "--logit-scale", 0.3]
    options += ["--mask", "causal", "--heads", 2, "--ranks", 2, "--freeze", "W_V,W_K"]
    options += ["--curvature", "full", "--max-iter", 2, "--no-report"]
    folder = tmp_path / "r"
    status, out, err = newtention("fit", source, "-o", folder, *options)
    assert (status, err) == (3, "")
    assert "4 heads (2 for keys and values)" in out
    assert "rotary positions with base 100" in out

    problem, _ = load_problem(source, mask="causal")
    layer = nt.FactoredAttention(
        **{n: torch.tensor(w) for n, w in blocks.items()},
        scale=0.3,
        rotary=nt.Rotary(100, "neighbours"),
    )
    start = nt.truncate(problem, nt.keep_heads(problem, layer, 2), 2)
    chosen = nt.Options(freeze=["W_V", "W_K"], curvature="full")
    expected = nt.solve(problem, start=start, max_iter=2, options=chosen)
    rebuilt, saved, document = load_result(folder)
    assert same(saved.layer, expected.layer)
    assert torch.equal(saved.layer.W_K, start.W_K)
    assert torch.equal(saved.layer.W_V, start.W_V)
    assert not torch.equal(saved.layer.W_Q, start.W_Q)
    assert nt.loss(rebuilt, saved.layer) == pytest.approx(saved.loss, rel=1e-12)
    record = document["layer"]
    assert (record["rope_base"], record["rope_pairing"]) == (100, "neighbours")
    assert (record["prefix"], record["logit_scale"]) == ("block.", 0.3)
    assert (document["freeze"], document["curvature"]) == (["W_V", "W_K"], "full")
    assert "W_V, W_K" in provenance_rows(document)["frozen blocks"]
    status, out, _ = newtention("predict", folder)
    assert f"Relative loss  {saved.relative_loss:.6g}" in out


def test_a_saved_layer_brings_its_settings(newtention, source, tmp_path):
    layer = nt.FactoredAttention.from_arrays(weights(), scale=0.7, rotary=nt.Rotary(50))
    path = tmp_path / "layer.safetensors"
    nt.save_layer(path, layer)
    fit = ["fit", source, "-o", tmp_path / "r", "--layer", path, "--no-report", "--max-iter", 0]
    assert newtention(*fit)[0] == 3
    found = read_result(tmp_path / "r").solution.layer
    assert (found.scale, found.rotary) == (0.7, nt.Rotary(50))
    status, _, err = newtention(*fit, "--force", "--rope-base", 60)
    assert status == 2
    assert "the file says rotary=" in err


@pytest.mark.parametrize("isotropic", [False, True])
def test_proximity_is_rebuilt_from_the_folder(newtention, source, tmp_path, isotropic):
    folder = tmp_path / "r"
    options = ["--layer", "source", "--ranks", 3, "--proximity", 0.4, "--max-iter", 2]
    status, _, err = newtention(
        "fit", source, "-o", folder, *options, *["--isotropic"] * isotropic, "--no-report"
    )
    assert (status, err) == (3, "")
    problem, _ = load_problem(source)
    reference = nt.truncate(problem, nt.load_layer(source), 3)
    near = problem.with_regularizer(nt.Proximity(reference, 0.4, isotropic))
    expected = nt.solve(near, start=reference, max_iter=2)
    rebuilt, saved, document = load_result(folder)
    assert same(saved.layer, expected.layer)
    assert saved.penalty > 0
    assert saved.penalty == expected.penalty
    assert nt.loss(rebuilt, saved.layer) == pytest.approx(saved.loss, rel=1e-12)
    assert same(nt.load_layer(folder / "reference.safetensors"), reference)
    assert "proximity 0.4" in provenance_rows(document)["regulariser"]
    assert newtention("report", folder)[0] == 0
    # A later fit without it leaves no reference behind.
    again = ["--layer", "source", "--max-iter", 0, "--no-report", "--force"]
    assert newtention("fit", source, "-o", folder, *again)[0] == 3
    assert not (folder / "reference.safetensors").exists()
    load_result(folder)


def test_a_bilinear_layer(newtention, source, tmp_path):
    rng = np.random.default_rng(1)
    layer = nt.BilinearAttention(rng.normal(size=(2, 6, 6)) / 6, rng.normal(size=(2, 6, 5)) / 3)
    path = tmp_path / "layer.safetensors"
    nt.save_layer(path, layer)
    fit = ["fit", source, "-o", tmp_path / "r", "--layer", path, "--no-report"]
    status, out, _ = newtention(*fit, "--max-iter", 3, "--proximity", 0.2)
    assert status == 3
    assert "2 heads, X 6 x 6 and Y 6 x 5." in out
    rebuilt, saved, _ = load_result(tmp_path / "r")
    assert saved.method == "newton"
    assert nt.loss(rebuilt, saved.layer) == pytest.approx(saved.loss, rel=1e-12)
    assert saved.penalty > 0
    status, _, err = newtention(*fit, "--force", "--ranks", 2)
    assert status == 2
    assert "the layer is bilinear, X and Y, which --ranks" in err
    status, _, err = newtention(*fit, "--force", "--proximity", 0.2, "--isotropic")
    assert status == 2
    assert "isotropic" in err


def test_a_random_layer(newtention, source, tmp_path):
    folder = tmp_path / "r"
    options = ["--ranks", "2,3", "--heads", 2, "--n-init", 2, "--max-iter", 2, "--no-report"]
    options += ["--max-seconds", "inf"]
    status, out, _ = newtention("fit", source, "-o", folder, *options)
    assert status == 3
    problem, _ = load_problem(source)
    asked = nt.Options(heads=2, ranks=(2, 3))
    expected = nt.solve(problem, n_init=2, max_iter=2, options=asked)
    assert same(read_result(folder).solution.layer, expected.layer)
    assert f" {expected.layer.parametrisation.size} unknowns" in out


def test_half_precision_weights(newtention, source, tmp_path):
    path = tmp_path / "half.safetensors"
    save_file({n: torch.tensor(w).half() for n, w in weights().items()}, path)
    fit = ["fit", source, "-o", tmp_path / "r", "--layer", path, "--no-report", "--max-iter", 0]
    status, _, err = newtention(*fit)
    assert status == 3
    assert err == f"Warning: {path}: the weights are float16; computing in float64.\n"
    layer = read_result(tmp_path / "r").solution.layer
    assert layer.W_Q.dtype == torch.float64
    assert torch.equal(layer.W_Q, torch.tensor(weights()["W_Q"]).half().double())


# Held-out data


def split(content, chosen):
    """Sequences of ragged arrays, cut out with NumPy."""
    pieces = [slice(OFFSETS[i], OFFSETS[i + 1]) for i in chosen]
    cut = {n: np.concatenate([content[n][s] for s in pieces]) for n in ("tokens", "targets")}
    return cut | dict(offsets=np.cumsum([0, *(s.stop - s.start for s in pieces)]))


def test_a_share_is_held_out(newtention, source, tmp_path):
    folder = tmp_path / "r"
    options = ["--layer", "source", "--ranks", 3, "--max-iter", 3, "--validation-share", 0.5]
    status, out, _ = newtention("fit", source, "-o", folder, *options)
    assert status == 3
    assert f"Held out: every second sequence of {source}; 2 sequence(s), 18 queries." in out
    rows = [line for line in out.splitlines() if line.startswith("   0 ")]
    assert f"{TABLE_HEADER}  held out" in out.splitlines()

    content = arrays()
    tensors = [
        {n: torch.tensor(a) for n, a in split(content, s).items()} for s in ([0, 2, 4], [1, 3])
    ]
    fitted, held = (
        nt.AttentionProblem.from_ragged(t["tokens"], t["targets"], offsets=t["offsets"])
        for t in tensors
    )
    expected = nt.solve(
        fitted,
        start=nt.load_layer(source),
        max_iter=3,
        validation=held,
        options=nt.Options(ranks=3),
    )
    rebuilt, saved, document = load_result(folder)
    assert same(saved.layer, expected.layer)
    assert saved.validation_loss == expected.validation_loss
    outputs = nt.predict(held, saved.layer)
    B = tensors[1]["targets"]
    assert saved.validation_loss == pytest.approx(
        float((outputs - B).square().sum() / B.square().sum())
    )
    assert f"{saved.history[0].validation:.5f}" in rows[0].split()
    assert nt.loss(rebuilt, saved.layer) == pytest.approx(saved.loss, rel=1e-12)
    assert (document["sequences"], document["queries"]) == (3, 26)
    assert document["validation"]["every"] == document["provenance"]["hold_out"] == 2
    assert document["validation"]["sequences"] == 2
    assert "one sequence in 2" in provenance_rows(document)["held out"]
    # Predictions are for all sequences of the file; those held out are told apart.
    status, out, _ = newtention("predict", folder)
    assert status == 0
    whole, first, second, _ = out.splitlines()
    relative = nt.loss(fitted, saved.layer) / (0.5 * tensors[0]["targets"].square().sum())
    assert whole.endswith(f" on {source}: 5 sequence(s), 44 queries")
    assert first == f"  fitted       {relative:.6g} on 3 sequence(s), 26 queries"
    held_loss = f"{saved.validation_loss:.6g}"
    assert second == f"  held out     {held_loss} on 2 sequence(s), 18 queries"
    assert load_file(folder / "predictions.safetensors")["predictions"].shape == (44, 5)
    assert newtention("report", folder)[0] == 0


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("kind", ["padded", "ragged", "crossed offsets"])
def test_sequences_of_every_layout_are_cut(tmp_path, kind, held_out):
    """Outputs of the part are the rows of the whole."""
    rng = np.random.default_rng(0)
    chosen = [1, 3] if held_out else [0, 2, 4]
    if kind == "padded":
        content = dict(
            queries=rng.normal(size=(5, 4, 3)),
            keys=rng.normal(size=(5, 6, 2)),
            targets=rng.normal(size=(5, 4, 3)),
            lengths=np.array([4, 2, 3, 1, 4]),
            key_lengths=np.array([6, 1, 5, 2, 3]),
        )
    else:
        content = dict(queries=rng.normal(size=(44, 3)), targets=rng.normal(size=(44, 3)))
        content |= dict(offsets=OFFSETS)
    if kind == "ragged":
        content |= dict(values=rng.normal(size=(44, 2)))
    if kind == "crossed offsets":
        content |= dict(keys=rng.normal(size=(15, 2)), key_offsets=np.array([0, 2, 5, 9, 11, 15]))
    path = tmp_path / "data.npz"
    np.savez(path, **content)
    whole, _ = load_problem(path)
    part, origin = load_problem(path, hold_out=2, held_out=held_out)
    assert origin.hold_out == 2
    d1, d2, d3, p = whole.widths
    X, Y = torch.tensor(rng.normal(size=(d1, d2))), torch.tensor(rng.normal(size=(d3, p)))
    outputs, found = nt.predict(whole, X, Y), nt.predict(part, X, Y)
    if kind == "padded":
        for place, i in enumerate(chosen):
            torch.testing.assert_close(found[place], outputs[i], rtol=1e-12, atol=1e-13)
    else:
        rows = np.concatenate([np.arange(OFFSETS[i], OFFSETS[i + 1]) for i in chosen])
        torch.testing.assert_close(found, outputs[rows], rtol=1e-12, atol=1e-13)
        energy = 0.5 * (content["targets"][rows] ** 2).sum()
        assert float(part.target_energy()) == pytest.approx(energy)


def test_a_validation_file_ends_the_fit_early(newtention, source, tmp_path):
    other = tmp_path / "held.npz"
    np.savez(other, **arrays(seed=8))
    folder = tmp_path / "r"
    options = ["--layer", "source", "--validation", other, "--patience", 2, "--no-report"]
    status, out, _ = newtention("fit", source, "-o", folder, *options)
    assert status == 3
    assert "the validation loss no longer falls" in out
    assert f"Held out: {other}; 5 sequence(s), 44 queries." in out
    saved = read_result(folder)
    losses = saved.solution.history.column("validation")
    assert saved.solution.validation_loss == min(losses)
    assert len(losses) == losses.index(min(losses)) + 3  # two more iterations
    assert saved.document["patience"] == 2
    held, origin = load_problem(other)
    outputs = nt.predict(held, saved.solution.layer)
    B = torch.tensor(arrays(seed=8)["targets"])
    relative = float((outputs - B).square().sum() / B.square().sum())
    assert relative == pytest.approx(saved.solution.validation_loss)
    assert saved.document["validation"]["sha256"] == origin.sha256
    status, out, _ = newtention("predict", folder, "--source", other, "-o", tmp_path / "p.npz")
    assert out.startswith(f"Relative loss  {relative:.6g} on {other}: 5 sequence(s), 44 queries\n")
    out = newtention("predict", folder)[1].splitlines()
    assert out[0].endswith(f" on {source}: 5 sequence(s), 44 queries")
    assert out[1] == f"  held out     {relative:.6g} on {other}, by the fit"


# Checkpoints


def command(*arguments):
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def after_iteration(process, number):
    """Read the table until this iteration."""
    for line in process.stdout:
        if line.startswith(f"{number:>4} "):
            return
    raise AssertionError(process.communicate()[1])


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """A fit that takes some seconds, and its uninterrupted result."""
    folder = tmp_path_factory.mktemp("slow")
    rng = np.random.default_rng(2)
    tokens, d = rng.normal(size=(12, 60, 16)), 16
    blocks = weights(seed=4, heads=4, groups=4, d=d, e=4, p=d)
    np.savez(folder / "s.npz", tokens=tokens, targets=np.tanh(tokens[..., ::-1]), **blocks)
    fit = ["fit", folder / "s.npz", "--layer", "source", "--ranks", 3, "--validation-share", 0.25]
    fit += ["--patience", 100, "--tol", 1e-300, "--max-iter", 12, "--no-report"]
    with command(*fit, "-o", folder / "whole") as process:
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (3, "")
    return fit, folder / "whole"


def bits(folder):
    """The fitted weights; the order of a file's metadata is not fixed."""
    return {
        name: t.numpy().tobytes() for name, t in load_file(folder / "weights.safetensors").items()
    }


def without_times(folder):
    solution = read_result(folder).solution
    return [replace(record, seconds=0.0) for record in solution.history], solution.status


@pytest.mark.full
def test_a_killed_fit_continues(slow, tmp_path):
    fit, whole = slow
    arguments = [*fit, "-o", tmp_path / "r", "--checkpoint", tmp_path / "r" / "state.ckpt"]
    with command(*arguments) as process:
        after_iteration(process, 3)
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert (tmp_path / "r/state.ckpt").exists()
    assert not (tmp_path / "r/result.json").exists()
    with command(*arguments) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (3, "")
    document = read_result(tmp_path / "r").document
    assert document["continued_at"] >= 3
    place = tmp_path / "r/state.ckpt"
    assert f"Continuing at iteration {document['continued_at']} from {place}" in out.splitlines()
    assert document["checkpoint"] == str(place)
    assert bits(tmp_path / "r") == bits(whole)
    assert without_times(tmp_path / "r") == without_times(whole)


def test_ctrl_c_keeps_result_and_checkpoint(slow, tmp_path):
    fit, whole = slow
    arguments = [*fit, "-o", tmp_path / "r", "--checkpoint", tmp_path / "state.ckpt"]
    with command(*arguments) as process:
        after_iteration(process, 2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (3, "")
    assert "To go on   the same command with --force" in out
    rebuilt, saved, document = load_result(tmp_path / "r")
    assert document["status"] == "interrupted"
    assert nt.loss(rebuilt, saved.layer) == pytest.approx(saved.loss, rel=1e-12)
    with command(*arguments) as process:
        assert "--force replaces it" in process.communicate(timeout=120)[1]
    with command(*arguments, "--force") as process:
        process.communicate(timeout=120)
    assert bits(tmp_path / "r") == bits(whole)
    assert without_times(tmp_path / "r") == without_times(whole)


def test_json_keeps_quiet_about_a_checkpoint(newtention, source, tmp_path):
    fit = ["fit", source, "-o", tmp_path / "r", "--layer", "source", "--no-report", "--json"]
    fit += ["--checkpoint", tmp_path / "c"]
    assert json.loads(newtention(*fit, "--max-iter", 1)[1])["continued_at"] is None
    status, out, err = newtention(*fit, "--max-iter", 2, "--force")
    assert (status, err) == (3, "")
    assert json.loads(out)["continued_at"] == 1


# Mistakes


def fit_of(source, folder, *options):
    return ["fit", source, "-o", folder / "r", "--no-report", "--max-iter", 1, *options]


def layer_file(folder, **changed):
    path = folder / "layer.safetensors"
    save_file({n: torch.tensor(w) for n, w in (weights() | changed).items()}, path)
    return path


def narrow(folder):
    return layer_file(folder, **weights(d=3))


def odd(folder):
    return layer_file(folder, **weights(e=3))


def flat(folder):
    return layer_file(folder, W_Q=np.concatenate(list(weights()["W_Q"]), 1))


def held(folder, **changed):
    np.savez(folder / "h.npz", **{n: a for n, a in (arrays() | changed).items() if a is not None})
    return folder / "h.npz"


def garbage(folder):
    (folder / "c").write_bytes(b"not a checkpoint")
    return folder / "c"


def packed(folder):
    path = folder / "packed.safetensors"
    module = torch.nn.MultiheadAttention(4, 2)
    save_file({f"attn.{name}": w for name, w in module.state_dict().items()}, path)
    return path


L = ("--layer", "source")
MISTAKES = {
    "ranks": ([*L, "--ranks", 5], "--ranks must lie between 1 and the layer's width"),
    "three ranks": ([*L, "--ranks", "1,2,3"], "--ranks must be a number of at least 1, or two"),
    "no rank": ([*L, "--ranks", "few"], "found 'few'"),
    "rank 0": ([*L, "--ranks", "0"], "found '0'"),
    "heads": ([*L, "--heads", 3], "--heads must lie between 1 and the layer's 2"),
    "layer widths": (
        ["--layer", narrow],
        "layer's widths of queries, keys, values and outputs must be",
    ),
    "no layer": (["--layer", "x.npz"], "There is no file x.npz"),
    "no head axis": (["--layer", flat], "give the number of query heads, --layer-heads."),
    "prefix": ([*L, "--layer-prefix", "a."], "prefix 'a.': There is no array for W_Q"),
    "prefix alone": (["--layer-prefix", "a."], "give its file with --layer"),
    "odd width": (["--layer", odd, "--rope-base", 10], "Rotary positions need an even head width"),
    "odd ranks": ([*L, "--ranks", 3, "--rope-base", 10], "must be even for the queries and keys"),
    "rope": ([*L, "--rope-base", 0.5], "--rope-base must be a finite number above 1"),
    "pairing": ([*L, "--rope-pairing", "halves"], "--rope-pairing goes with --rope-base"),
    "logit scale": ([*L, "--logit-scale", 0], "--logit-scale must be a positive finite number"),
    "freeze": ([*L, "--freeze", "W_Q,W_X"], "--freeze must name blocks of the layer, W_Q, b_Q"),
    "newton": ([*L, "--method", "newton"], "--method newton is for layers of X and Y; this one"),
    "newton ranks": (
        ["--ranks", 2, "--method", "newton"],
        "this one has W_Q, W_K, W_V and W_O.  Use --method newton-cg.",
    ),
    "sketched frozen": (
        ["--freeze", "X", "--method", "sketched"],
        "--method sketched does not go with --freeze.  Use --method newton-cg.",
    ),
    "packed": (
        ["--layer", packed],
        "'attn.in_proj_weight' holds W_Q, W_K and W_V of torch.nn.MultiheadAttention in one array; "
        "convert the module with newtention.FactoredAttention.from_torch and write it with "
        "newtention.save_layer.",
    ),
    "proximity": (["--proximity", 1], "name its file with --layer"),
    "two penalties": ([*L, "--proximity", 1, "--ridge", 1], "exclude each other"),
    "isotropic": ([*L, "--isotropic"], "--isotropic goes with --proximity"),
    "patience": ([*L, "--patience", 3], "--patience goes with --validation"),
    "share": ([*L, "--validation-share", 0.7], "above 0 and at most 0.5; found 0.7"),
    "small share": ([*L, "--validation-share", 0.1], "too few to hold out one in 10"),
    "held twice": (
        [*L, "--validation-share", 0.2, "--validation", held],
        "--validation and --validation-share exclude each other",
    ),
    "held widths": (
        [*L, "--validation", lambda f: held(f, tokens=np.ones((44, 7)))],
        "The queries of",
    ),
    "no targets": (
        [*L, "--validation", lambda f: held(f, targets=None)],
        "has no array 'targets' (targets)",
    ),
    "garbage": ([*L, "--checkpoint", garbage], "damaged or of another kind"),
    "foreign": ([*L, "--checkpoint", layer_file], "was not written by Newtention"),
    "no place": ([*L, "--checkpoint", lambda f: f / "no" / "c"], "There is no folder"),
    "same name": (
        [*L, "--checkpoint", lambda f: f / "r" / "weights.safetensors"],
        "is for the result itself",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_gets_one_sentence(newtention, unchecked, source, tmp_path, case):
    options, message = MISTAKES[case]
    built = [option(tmp_path) if callable(option) else option for option in options]
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    status, out, err = newtention(*fit_of(source, tmp_path, *built))
    assert status == 2
    assert err.startswith("Error: ")
    assert message in err
    assert not out or "--method" not in message
    assert err.count("\n") == 1
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_checkpoints_of_other_fits_are_refused(newtention, source, tmp_path):
    place = tmp_path / "c"
    base = [*L, "--checkpoint", place]
    assert newtention(*fit_of(source, tmp_path, *base))[0] == 3
    kept = place.read_bytes()
    weights_before = bits(tmp_path / "r")
    for other in (["--ranks", 2], ["--ridge", 0.1], ["--seed", 0, "--scale", 2], ["--tol", 1e-3]):
        status, _, err = newtention(*fit_of(source, tmp_path, *base, *other), "--force")
        assert status == 2
        assert "belongs to another run" in err
        assert err.count("\n") == 1
    place.write_bytes(kept[: len(kept) // 2])
    status, _, err = newtention(*fit_of(source, tmp_path, *base), "--force")
    assert status == 2
    assert "is damaged" in err
    assert place.read_bytes() == kept[: len(kept) // 2]
    assert bits(tmp_path / "r") == weights_before


def test_a_reference_of_another_fit_is_noticed(newtention, source, tmp_path):
    options = [*L, "--ranks", 3, "--proximity", 0.4]
    assert newtention(*fit_of(source, tmp_path, *options))[0] == 3
    reference = tmp_path / "r" / "reference.safetensors"
    layer = nt.load_layer(reference)
    nt.save_layer(reference, layer.with_theta(2 * layer.theta))
    status, _, err = newtention("report", tmp_path / "r")
    assert status == 2
    assert "does not belong to the result.json beside it" in err


# The display


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still; set `clock.now`."""

    class Clock:
        now = 0.0

    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: Clock.now)
    return Clock


@pytest.fixture(scope="module")
def snapshots(source):
    """What a callback saw: a fit with held-out data, and two starts, one after another."""
    seen = []
    problem, _ = load_problem(source, hold_out=2)
    held_out, _ = load_problem(source, hold_out=2, held_out=True)
    start = nt.truncate(problem, nt.load_layer(source), 3)
    nt.solve(problem, start=start, max_iter=2, validation=held_out, callback=seen.append)
    two = []
    options = nt.Options(ranks=2)
    nt.solve(problem, n_init=2, max_iter=2, options=options, callback=two.append)
    return seen, two


def test_time_left(clock, snapshots):
    seen, _ = snapshots
    limited = [replace(p, max_iter=30, max_seconds=100.0) for p in seen]
    watch = Watch()
    assert watch.left() == ""
    clock.now = 10.0
    watch.note(limited[0])
    assert watch.left() == "at most 2 min left"  # 90 s
    clock.now = 11.0
    watch.note(limited[1])  # one second an iteration, 29 more
    assert watch.left() == "at most about 29 s left"
    clock.now = 15.0
    assert watch.left() == "at most about 25 s left"
    clock.now = 90.0
    watch.note(limited[1])
    assert watch.left() == "at most 10 s left"
    watch.note(seen[-1])  # ended
    assert watch.left() == ""
    assert [duration(s) for s in (3.4, 150, 9000)] == ["3 s", "2 min", "2.5 h"]


def test_starts_that_run_one_after_another(clock, snapshots, capsys):
    """The start shown is the one that runs, and the iterations of those to come count."""
    _, two = snapshots
    lines = Lines()
    for p in two:
        lines(p)
    caption, header = capsys.readouterr().out.splitlines()[:2]
    assert caption == "2 starts, one after the other: the table begins again with each."
    assert header == TABLE_HEADER
    watch = Watch()
    assert any(record is None for record in two[0].records)
    for number, p in enumerate(two):
        clock.now = 2.0 * number
        record = watch.note(p)
        running = 0 if p.records[1] is None else 1
        assert record is p.records[running]
        assert record.iteration == p.iteration
        if number in (1, 2):
            after = {1: 1 + 3, 2: 3}[number]  # max_iter + 1 records of the second start
            assert watch.left() == f"at most about {2 * after} s left for all starts"


def test_display_and_lines_show_the_validation_loss(snapshots, capsys):
    seen, _ = snapshots
    screen, table = io.StringIO(), TABLE_HEADER + "  held out"
    with Display(Console(file=screen, force_terminal=True, width=110)) as display:
        for p in seen:
            display(p)
        shown = [str(line) for line in display.render().renderables]
    last = seen[-1].records[0]
    assert shown[1].startswith(f"validation {last.validation:.6g}   lowest ")
    assert shown[3] == table
    assert shown[-2].split()[-1] == f"{last.validation:.5f}"
    assert int(shown[-2].split()[8]) == last.inner
    lines = Lines()
    for p in seen:
        lines(p)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == table
    assert [line.split()[10] for line in printed[1:]] == [
        f"{p.records[0].validation:.5f}" for p in seen
    ]


# Whole layers of real models


@pytest.mark.parametrize(
    "name", ["minilm", pytest.param("smollm2", marks=pytest.mark.full), "lighterglue"]
)
def test_whole_layers(newtention, tmp_path, name):
    files = {"minilm": "minilm_layer3", "smollm2": "smollm2_layer14"}
    path = DATA / f"{files.get(name, 'lighterglue_cross')}.safetensors"
    options = [*L, "--dtype", "float32", "--max-iter", 1]
    names = ArrayNames()
    if name == "minilm":
        options += ["--ranks", 16, "--validation-share", 0.2]
    elif name == "smollm2":
        options += ["--mask", "causal", "--rope-base", 100000, "--ranks", 32, "--no-report"]
    else:
        options += ["--layer-prefix", "layer2.", "--layer-heads", 1, "--ranks", 48]
        names = ArrayNames("layer2.X0", "layer2.O0", "layer2.X1", "layer2.X1")
        for role in ("queries", "targets", "keys", "values"):
            options += [f"--{role}", getattr(names, role)]
    folder = tmp_path / "r"
    status, _, err = newtention("fit", path, "-o", folder, *options)
    assert (status, err) == (3, "")
    rebuilt, saved, document = load_result(folder)
    assert saved.iterations == 1
    assert saved.history[1].loss < saved.history[0].loss
    assert nt.loss(rebuilt, saved.layer) == pytest.approx(saved.loss, rel=1e-4)
    # The layer as given reproduces the outputs, so that the settings must have been right.
    record = document["layer"]
    given = nt.load_layer(
        path,
        heads=record["layer_heads"],
        rotary=nt.Rotary(record["rope_base"]) if record["rope_base"] else None,
        prefix=record["prefix"],
    )
    assert nt.loss(rebuilt, given) / float(rebuilt.target_energy()) < 1e-3
    status, out, _ = newtention("predict", folder, "-o", tmp_path / "p.npz")
    assert status == 0
    outputs = np.load(tmp_path / "p.npz")["predictions"]
    targets = load_file(path)[document["provenance"]["arrays"]["targets"]].numpy()
    relative = ((outputs - targets) ** 2).sum() / (targets**2).sum()
    assert float(out.split()[2]) == pytest.approx(relative, rel=1e-3)
    if name != "minilm":
        assert relative == pytest.approx(saved.relative_loss, rel=1e-3)
