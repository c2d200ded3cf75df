"""The README's Python examples run as they stand."""

import re
from pathlib import Path

import torch

EXAMPLES = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[2] / "README.md").read_text(), re.S
)


def test_examples(capsys):
    torch.manual_seed(0)
    names = {}
    assert len(EXAMPLES) == 2
    for example in EXAMPLES:
        exec(compile(example, "README.md", "exec"), names)
    assert "Converged" in capsys.readouterr().out
    assert abs(names["solution"].X - names["X"]).max() < 1e-13
    assert abs(names["solution"].Y - names["Y"]).max() < 1e-13
    assert names["operator"].shape == (16640, 16640)
