"""Each benchmark runs at toy size and returns plain data that tables and charts can read."""

import importlib
import json

import numpy as np
import pytest
import torch

pytest.importorskip("torchmin", reason="the benchmarks' rivals are not installed")

KEYS = {
    "hessian": {"cases", "aim"},
    "batch": {"cases"},
    "symmetric": {"cases"},
    "products": {"n", "d", "cost", "sequences", "length", "fixed_length"},
    "growth": {"d", "dtype", "lengths", "limits", "methods"},
    "global_quality": {"cases", "budget", "members"},
    "methods": {"cases", "limit", "samples"},
    "preconditioners": {"budgets", "cases"},
    "certificates": {"gtol", "threads", "summary", "cost", "problems"},
    "paper": {"regime", "contraction", "time"},
    "path": {"cases", "wrong", "keypoints"},
}


LONG = ("certificates", "growth", "paper")
"""Seconds each, and their parts are tested below or with what they measure."""


@pytest.mark.parametrize(
    "name", [n if n not in LONG else pytest.param(n, marks=pytest.mark.full) for n in KEYS]
)
def test_benchmark_runs_at_toy_size(name, tmp_path):
    module = importlib.import_module(f"benchmarks.{name}")
    charts = importlib.import_module("benchmarks.charts")
    data = json.loads(json.dumps(module.run("toy"), allow_nan=False))
    assert data.keys() == KEYS[name]
    assert module.report(data)
    chart = tmp_path / "chart.png"
    charts.CHARTS[name](data).savefig(chart)
    assert chart.stat().st_size > 0


@pytest.mark.parametrize(
    "name", ["sketches", "softmax", "svm", pytest.param("maps", marks=pytest.mark.full)]
)
def test_benchmark_without_a_chart_runs_at_toy_size(name):
    module = importlib.import_module(f"benchmarks.{name}")
    data = json.loads(json.dumps(module.run("toy"), allow_nan=False))
    assert module.report(data).count("\n") >= 1


def test_choices_run_at_toy_size():
    from benchmarks import choices

    data = choices.run("toy")
    assert all(0 < losses[0] < 1 for variants in data.values() for losses in variants.values())
    assert "packaged head" in choices.report(data)


def test_all_ways_to_a_product_agree():
    pytest.importorskip("curvlinops")
    from benchmarks.product_peers import METHODS, plain_output, random_point

    point = random_point("layer", 1, 9, 3, torch.float64)
    (chunk,) = point.problem.chunks

    def output(theta):
        return plain_output(point.layer, theta, chunk.A1[0, 0])

    def loss(theta):
        return 0.5 * (output(theta) - chunk.B[0, 0]).square().sum()

    J = torch.func.jacrev(output)(point.theta[0]).flatten(0, 1)
    want = {
        "full": torch.func.hessian(loss)(point.theta[0]).sum(1),
        "gauss-newton": (J.T @ J).sum(1),
    }
    for name, method in METHODS.items():
        found = method.build(point)()
        assert (found - want[method.kind]).norm() <= 1e-12 * want[method.kind].norm(), name


def test_a_product_beyond_the_limits_is_a_result(tmp_path, monkeypatch):
    from benchmarks import growth

    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    case = ("double backward", 30_000, 4, "float64")  # attention weights of 6.7 GiB
    record = growth.measure(*case, growth.Limits(gib=4), tmp_path)
    assert record["outcome"] == growth.NO_MEMORY
    record = growth.measure(*case, growth.Limits(seconds=0.1), tmp_path)
    assert record["outcome"] == growth.NO_TIME
    assert record["seconds"] is None


def test_a_wrong_product_is_seen(tmp_path):
    from benchmarks import growth

    ours, other = "newtention, Hessian", "double backward"
    np.save(growth._file(tmp_path, ours), np.ones(3))
    np.save(growth._file(tmp_path, other), np.array([1, 1, 1 + 1e-7]))
    assert growth._difference(other, [ours, other], tmp_path, "float32") < 1e-7
    with pytest.raises(AssertionError, match="double backward"):
        growth._difference(other, [ours, other], tmp_path, "float64")


def test_threads_must_be_capped(monkeypatch):
    from benchmarks import environment

    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    with pytest.raises(SystemExit, match="OPENBLAS_NUM_THREADS"):
        environment.set_threads()


def test_alternate_repeats_the_fast_and_spares_the_slow():
    import time

    from benchmarks.harness import alternate, ratios, spread

    samples = alternate(
        {"fast": lambda: None, "slow": lambda: time.sleep(0.02)}, repeats=5, patience=0.01
    )
    assert {name: len(times) for name, times in samples.items()} == {"fast": 5, "slow": 3}
    assert ratios({"a": [1.0, 2.0], "b": [2.0, 6.0]}, "a") == {"b": spread([2.0, 3.0])}
