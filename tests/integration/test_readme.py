"""The README's Python examples run as they stand."""

import re
from pathlib import Path

import pytest
import torch

EXAMPLES = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[2] / "README.md").read_text(), re.S
)


def run(example):
    torch.manual_seed(0)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    return names


def test_four_examples():
    assert len(EXAMPLES) == 4


def test_planted_layer(capsys):
    names = run(EXAMPLES[0])
    assert "Converged" in capsys.readouterr().out
    assert abs(names["solution"].X - names["X"]).max() < 1e-13
    assert abs(names["solution"].Y - names["Y"]).max() < 1e-13


@pytest.mark.usefixtures("unchecked")
def test_truncated_layer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run(EXAMPLES[1])
    solution, nt = names["solution"], names["nt"]
    first = solution.history[0]
    assert solution.validation_loss < first.validation
    assert solution.layer.W_Q.shape == (4, 64, 8)
    saved = nt.load_layer(tmp_path / "small.safetensors")
    assert torch.equal(saved.theta, solution.layer.theta)
    assert names["operator"].shape == (16640, 16640)


def test_selected_keys(capsys):
    names = run(EXAMPLES[2])
    assert names["svm"].success
    assert capsys.readouterr().out.rstrip().endswith("True")


def test_softmax_regressions(capsys):
    names = run(EXAMPLES[3])
    assert abs(names["fit"].x - names["x"]).max() < 1e-10
    assert abs(names["found"].X - names["X"]).max() < 1e-10
    assert "Local minimum: proved." in capsys.readouterr().out
