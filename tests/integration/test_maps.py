"""Multiple softmax regression from end to end: planted maps, both methods, the command line."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch

import newtention as nt
from newtention import Status, planning
from newtention.examples import MAPS
from newtention.io import open_arrays, read_result
from newtention.regression import softmax_regression
from newtention.regression.maps import multiple_softmax_regression
from tests.checks import require_close
from tests.pages import DOCS, block, run_example

pytestmark = pytest.mark.usefixtures("unchecked")
METHODS = pytest.mark.parametrize("method", ["newton", "newton-cg"])


def randn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def planted(n=40, m=30, d1=4, d2=5, size=1.0, seed=0, allowed=None):
    """Tokens, the map of an X, and that X."""
    A1, A2, X = randn(seed, n, d1), randn(seed + 1, m, d2), size * randn(seed + 2, d1, d2)
    S = A1 @ X @ A2.T
    return A1, A2, (S if allowed is None else S.masked_fill(~allowed, -torch.inf)).softmax(1), X


@METHODS
@pytest.mark.parametrize("size", [0.3, 1.0, 3.0])
def test_planted_map_is_recovered(method, size):
    A1, A2, B, X = planted(size=size)
    solution = multiple_softmax_regression(A1, A2, B, method=method)
    assert solution.success
    assert solution.method == method
    require_close("map", nt.predict(nt.AttentionProblem.from_maps(A1, A2, B), solution.X), B, 1e-8)
    require_close("X", solution.X, X, 1e-6)
    with pytest.raises(AttributeError, match="attention maps has no Y"):
        _ = solution.Y


@METHODS
def test_x_is_found_up_to_the_shift_of_the_softmax(method):
    """A constant column in the keys: X + w u^T gives the same map."""
    A1, A2, _, X = planted()
    A2 = torch.cat([A2[:, :4], torch.ones(30, 1).double()], 1)
    B = (A1 @ X @ A2.T).softmax(1)
    solution = multiple_softmax_regression(A1, A2, B, method=method)
    assert solution.success
    centred = [(A1 @ Z @ A2.T) for Z in (solution.X, X)]
    found, true = (S - S.mean(1, keepdim=True) for S in centred)
    require_close("centred logits", found, true, 1e-6)
    require_close("X but for the shift", solution.X[:, :4], X[:, :4], 1e-6)


@METHODS
def test_padded_causal_weighted_sequences(method):
    s, n, m = 4, 9, 9
    A, X = randn(0, s, n, 4), randn(1, 4, 4)
    lengths = [9, 5, 1, 7]
    allowed = torch.ones(n, m, dtype=torch.bool).tril()
    B = (0.7 * A @ X @ A.mT).masked_fill(~allowed, -torch.inf).softmax(-1)
    for i, k in enumerate(lengths):
        B[i, k:], B[i, :, k:] = 7.0, 5.0
    solution = multiple_softmax_regression(
        A, A, B, lengths=lengths, mask="causal", scale=0.7, query_weights=torch.rand(s, n).double(),
        method=method,
    )  # fmt: skip
    assert solution.success
    require_close("X", solution.X, X, 1e-6)


def test_noisy_map_ends_at_a_minimum_from_every_start_and_with_either_method():
    A1, A2, B, _ = planted(n=60)
    B = 0.8 * B + 0.2 * randn(9, *B.shape).softmax(1)
    problem = nt.AttentionProblem.from_maps(A1, A2, B, regularizer=nt.Ridge(x=1e-3))
    runs = [nt.solve(problem, method=m, n_init=4) for m in ("newton", "newton-cg")]
    assert all(run.success for run in runs)
    assert math.isclose(runs[0].loss, runs[1].loss, rel_tol=1e-9)
    assert len(runs[0].start_losses) == 4
    gradient = nt.gradient(problem, runs[0].X)
    assert float(gradient.norm()) < 1e-9
    values = torch.linalg.eigvalsh(nt.hessian(problem, runs[0].X).to_dense())
    assert values[0] > 0
    assert nt.check_derivatives(problem, runs[0].layer).passed
    spectrum = nt.spectrum(problem, runs[0].X, k=2)
    require_close("spectrum", spectrum.smallest, values[:2], 1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_one_row_is_softmax_regression(seed):
    A, x = randn(seed, 200, 6), randn(seed + 10, 6)
    b = 0.9 * (A @ x).softmax(0) + 0.1 * randn(seed + 20, 200).softmax(0)
    one = softmax_regression(A, b, ridge=1e-4)
    row = multiple_softmax_regression(
        torch.ones(1, 1).double(), A, b[None], ridge=1e-4, method="newton"
    )
    assert row.success
    require_close("x", row.X[0], one.x, 1e-8)
    assert math.isclose(row.loss, one.loss, rel_tol=1e-12)


def test_saturated_targets():
    """One key per row: the infimum lies at infinity, a ridge holds X."""
    A1, A2, B, _ = planted(size=50.0)
    hard = torch.nn.functional.one_hot(B.argmax(1), 30).double()
    solution = multiple_softmax_regression(A1, A2, hard, ridge=1e-6)
    assert solution.status in (Status.CONVERGED, Status.ITERATION_LIMIT)
    assert torch.isfinite(solution.X).all()
    assert solution.relative_loss < 1e-2


def test_start_with_logits_of_hundreds():
    A1, A2, B, X = planted()
    start = 500 * X / (A1 @ X @ A2.T).abs().max()
    for method in ("newton", "newton-cg"):
        solution = multiple_softmax_regression(A1, A2, B, start=start, method=method, max_iter=20)
        assert math.isfinite(solution.loss)
        assert solution.loss <= solution.history[0].loss


def test_float32_and_numpy():
    A1, A2, B, X = planted()
    solution = multiple_softmax_regression(*(t.float().numpy() for t in (A1, A2, B)))
    assert solution.success
    assert isinstance(solution.X, np.ndarray)
    assert solution.X.dtype == np.float32
    require_close("X", solution.X, X, 1e-3)


def test_batch_equals_singles():
    problems = [nt.AttentionProblem.from_maps(*planted(n=20 + k, seed=k)[:3]) for k in range(4)]
    together = nt.solve_many(problems)
    for problem, one in zip(problems, together, strict=True):
        alone = nt.solve(problem)
        assert one.iterations == alone.iterations
        require_close("X", one.X, alone.X, 1e-9)


@METHODS
def test_checkpoint_continues_bit_for_bit(method, tmp_path):
    A1, A2, B, _ = planted(size=3.0)
    settings = {"method": method, "n_init": 2, "seed": 3}
    whole = multiple_softmax_regression(A1, A2, B, **settings, max_iter=6)
    place = tmp_path / "run.ckpt"
    multiple_softmax_regression(A1, A2, B, **settings, max_iter=2, checkpoint=place)
    resumed = multiple_softmax_regression(A1, A2, B, **settings, max_iter=6, checkpoint=place)
    assert torch.equal(resumed.X, whole.X)
    assert [r.loss for r in resumed.history] == [r.loss for r in whole.history]


def test_callback_sees_the_point_and_may_stop(capsys):
    seen = []

    def stop(progress):
        seen.append(progress.X)
        with pytest.raises(AttributeError, match="MapAttention has no X and Y"):
            _ = progress.Y
        if progress.iteration == 2:
            raise StopIteration

    A1, A2, B, _ = planted()
    solution = multiple_softmax_regression(A1, A2, B, callback=stop, verbose=True)
    assert solution.status is Status.STOPPED
    assert torch.equal(seen[-1], solution.X)
    assert torch.equal(seen[0], torch.zeros(4, 5).double())
    assert "iter" in capsys.readouterr().out


def test_validation_and_earlier_solutions():
    A1, A2, B, X = planted(n=80)
    train, held = (nt.AttentionProblem.from_maps(A1[r], A2, B[r]) for r in
                   (slice(60), slice(60, 80)))  # fmt: skip
    solution = nt.solve(train, validation=held)
    assert solution.validation_loss < 1e-12
    again = nt.solve(train, start=solution)
    assert again.iterations <= 1
    start = nt.solve(train, start=nt.MapAttention(X))
    assert start.iterations == 0
    with pytest.raises(ValueError, match="validation must have"):
        nt.solve(train, validation=nt.AttentionProblem(A1, A2, A2, B))


def test_wrong_options_are_refused():
    A1, A2, B, X = planted()
    problem = nt.AttentionProblem.from_maps(A1, A2, B)
    for options in (nt.Options(heads=2), nt.Options(ranks=2)):
        with pytest.raises(ValueError, match="attention maps"):
            nt.solve(problem, options=options)
    for start, message in (
        ((X, torch.eye(5)), "Y must be left out"),
        (X.T, "X must be 4 x 5"),
        (nt.BilinearAttention(X, torch.eye(5).double()), "MapAttention"),
    ):
        with pytest.raises(ValueError, match=message):
            nt.solve(problem, start=start)
    with pytest.raises(ValueError, match="Ridge"):
        multiple_softmax_regression(A1, A2, B, ridge=-1.0)
    for method in ("paper", "sketched"):
        with pytest.raises(ValueError, match=f'method="{method}"'):
            nt.solve(problem, method=method)
    with pytest.raises(ValueError, match="MapAttention"):
        nt.truncate(problem, nt.FactoredAttention(*([torch.eye(4)[None]] * 4)), ranks=2)


def test_memory_is_refused_before_it_is_taken(monkeypatch):
    A1, A2, B, _ = planted()
    monkeypatch.setattr("newtention.memory.available_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(planning, "available_bytes", lambda device: 1 << 20)
    with pytest.raises(MemoryError, match="newton-cg"):
        multiple_softmax_regression(A1, A2, B, method="newton")


def test_wide_maps_go_to_conjugate_gradients():
    A1, A2, B, _ = planted(n=200, m=150, d1=64, d2=64, size=0.02)
    solution = multiple_softmax_regression(A1, A2, B, max_iter=30)
    assert solution.method == "newton-cg"
    assert solution.relative_loss < 1e-6


def test_scipy_gets_the_same_functions():
    from scipy.optimize import minimize

    A1, A2, B, X = planted()
    s = nt.to_scipy(nt.AttentionProblem.from_maps(A1, A2, B), start=X + 0.1)
    found = minimize(s.fun, s.x0, jac=s.jac, hess=s.hess, method="trust-exact")
    require_close("X", found.x.reshape(4, 5), X, 1e-3)


def test_certificate():
    A1, A2, B, X = planted()
    certificate = nt.certify(nt.AttentionProblem.from_maps(A1, A2, B), X)
    assert certificate.local_minimum == "proved"
    assert certificate.global_minimum == "not certified"
    assert "on X would do" in str(certificate)


def test_saved_layer(tmp_path):
    layer = nt.MapAttention(randn(0, 3, 4))
    nt.save_layer(tmp_path / "map.safetensors", layer)
    loaded = nt.load_layer(tmp_path / "map.safetensors")
    assert isinstance(loaded, nt.MapAttention)
    assert torch.equal(loaded.X, layer.X)
    with pytest.raises(ValueError, match="takes no heads"):
        nt.load_layer(tmp_path / "map.safetensors", heads=2)


def single(path, **more):
    A1, A2, B, X = planted()
    np.savez(path, queries=A1, keys=A2, targets=B, **more)
    return X


def test_fit_predict_report_and_certify_on_the_command_line(newtention, tmp_path):
    data, folder = tmp_path / "maps.npz", tmp_path / "r"
    X = single(data, values=np.ones(3))
    fit = ("fit", data, "--out", folder, "--kind", "attention-map")
    status, out, err = newtention(*fit)
    assert (status, err) == (0, "")
    assert "20 unknowns" in out
    saved = read_result(folder)
    require_close("X", saved.solution.X, X, 1e-6)
    assert saved.provenance.kind == "attention-map"
    page = (folder / "report.html").read_text()
    assert "numerical rank of <i>X</i>" in page
    assert "that of <i>Y</i>" not in page
    status, out, _ = newtention("predict", folder)
    assert status == 0
    assert "40 x 30" in out
    np.savez(tmp_path / "other.npz", queries=np.ones((3, 4)), keys=np.ones((2, 5)))
    other = ("--source", tmp_path / "other.npz", "--out", tmp_path / "p.npz")
    assert newtention("predict", folder, *other)[::2] == (0, "")
    assert np.allclose(np.load(tmp_path / "p.npz")["predictions"], 0.5)
    status, out, _ = newtention("certify", folder, "--require", "local")
    assert status == 0
    assert out.startswith("Local minimum: proved.")
    assert json.loads((folder / "certificate.json").read_text())["certificate"]["unknowns"] == 20
    assert "Local minimum: proved" in (folder / "report.html").read_text().replace("</b>", "")
    status, out, err = newtention("certify", folder, "--require", "global", "--json", "--no-report")
    assert status == 3
    assert json.loads(out)["certificate"]["global_minimum"] == "not certified"
    assert "--require global asks for a proved global minimum" in err
    assert newtention(*fit, "--force", "--ridge", 0.1, "--json", "--no-report")[0] == 0
    assert read_result(folder).document["regularizer"] == {"name": "ridge", "x": 0.1, "y": 0.0}


def test_ragged_maps_on_the_command_line(newtention, tmp_path):
    A, X, offsets = randn(0, 20, 3), randn(1, 3, 3), [0, 4, 9, 12, 20]
    B = torch.zeros(20, 8).double()
    for i, k in pairwise(offsets):
        B[i:k, : k - i] = (A[i:k] @ X @ A[i:k].T).softmax(1)
    np.savez(tmp_path / "d.npz", tokens=A, targets=B, offsets=offsets)
    fit = ("fit", tmp_path / "d.npz", "-o", tmp_path / "r", "--kind", "attention-map")
    status, _, err = newtention(*fit, "--validation-share", 0.5)
    assert (status, err) == (0, "")
    result = read_result(tmp_path / "r")
    assert result.solution.validation_loss < 1e-12
    require_close("X", result.solution.X, X, 1e-6)
    certify = ("certify", tmp_path / "r", "--require", "local", "--no-report")
    assert newtention(*certify)[0] == 0
    again = ("--force", "--mask", "causal", "--scale", 0.5, "--ridge", 100)
    assert newtention(*fit, *again, "--no-report")[0] == 0
    status, out, _ = newtention("certify", tmp_path / "r", "--require", "global", "--no-report")
    assert status == 0
    assert "It is the only stationary point of the loss: the global minimum." in out


def test_softmax_on_the_command_line(newtention, tmp_path):
    A, x = randn(0, 50, 4), randn(1, 4)
    np.savez(tmp_path / "s.npz", A=A, b=(A @ x).softmax(0))
    folder = tmp_path / "r"
    fit = ("fit", tmp_path / "s.npz", "--out", folder, "--kind", "softmax")
    status, out, err = newtention(*fit)
    assert (status, err) == (0, "")
    assert str(folder / "softmax.json") in out
    require_close("x", open_arrays(folder / "softmax.safetensors").read("x"), x, 1e-8)
    status, out, _ = newtention(*fit, "--force", "--json", "--ridge", 0.1)
    assert json.loads(out) == json.loads((folder / "softmax.json").read_text())
    assert newtention(*fit)[0] == 2
    assert newtention(*fit, "--force", "--max-iter", 0)[0] == 3
    status, _, err = newtention(*fit, "--force", "--targets", "c")
    assert status == 2
    assert "has no array 'c'" in err


def test_the_packaged_maps_are_those_of_the_packaged_head():
    """Its X explains them from tokens of reduced width, but for what the reduction left out."""
    file = open_arrays(MAPS)
    maps, offsets = file.read("maps").double(), file.read("offsets")
    tokens = open_arrays("example:minilm-head").read("tokens")[: offsets[-1]].double()
    require_close("sums", maps.sum(1), torch.ones(len(maps)).double(), 1e-6)
    problem = nt.AttentionProblem.from_ragged_maps(tokens, maps, offsets=offsets)
    energy = 0.5 * float(maps.square().sum())
    assert nt.loss(problem, file.read("X").double()) < 0.03 * energy
    assert nt.loss(problem, torch.zeros(32, 32).double()) > 0.9 * energy


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("attention-map", ("--ranks", 2)),
        ("attention-map", ("--heads", 2)),
        ("attention-map", ("--ridge-y", 1)),
        ("attention-map", ("--values", "keys")),
        ("softmax", ("--mask", "causal")),
        ("softmax", ("--freeze", "X")),
        ("softmax", ("--checkpoint", "c")),
    ],
)
def test_options_of_other_kinds_are_refused(newtention, tmp_path, kind, options):
    single(tmp_path / "d.npz")
    fit = ("fit", tmp_path / "d.npz", "--out", tmp_path / "r", "--kind", kind)
    status, _, err = newtention(*fit, *options)
    assert status == 2
    assert f"{options[0]} does not go with --kind {kind}" in err
    assert not (tmp_path / "r").exists()


def test_the_page_prints_what_it_says():
    page = DOCS / "attention-map.md"
    _, printed = run_example(page)
    assert printed == block(page, "text")
