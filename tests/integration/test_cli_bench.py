"""`newtention bench`."""

import json

import pytest
import torch
from rich.console import Console

from newtention import sketch
from newtention.cli import bench

QUICK = ("bench", "sketches", "--rows", "16", "--columns", "2", "--draws", "10", "--epsilon", "0.9")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(bench, "SIZES", (8, 32))


def without_times(record):
    for kinds in record["cases"].values():
        for kind in kinds:
            for m in kind["measurements"]:
                assert m.pop("seconds") > 0
    return record


def test_table_chart_and_record(newtention, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / "new" / "folder"
    status, text, err = newtention(*QUICK, "--out", out)
    assert status == 0, err
    for word in (*sketch.KINDS, "MiniLM tokens", "LighterGlue", "one huge row", "identical rows"):
        assert word in text
    assert "256 rows of A1 (x) A2" in text
    assert f"{out / 'sketches.png'}" in text
    assert (out / "sketches.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((out / "sketches.json").read_text())
    assert (record["rows"], record["columns"], record["draws"]) == (16, 2, 10)
    for name, (A1, A2) in bench.cases(16, 2).items():
        kinds = record["cases"][name]
        assert [k["kind"] for k in kinds] == list(sketch.KINDS)
        for k in kinds:
            want = sketch.size_for(k["kind"], 0.9, 0.05, d1=2, d2=2, n1=16, n2=16)
            assert k["formula"] == want
            assert k["calibration"]["rate"] <= 0.05
            assert [m["size"] for m in k["measurements"]] == [8, 32]
        c = sketch.calibrate("leverage", A1, A2, 0.9, 0.05, draws=10)
        assert kinds[0]["calibration"]["size"] == c.size
    # Once more into the same folder, as JSON: the same but for the times.
    status, text, _ = newtention(*QUICK, "--out", out, "--json")
    assert status == 0
    assert without_times(json.loads(text)) == without_times(record)


@pytest.mark.parametrize("width", [None, 60, 200])
def test_figures_are_never_cut(newtention, monkeypatch, width):
    """In a pipe one wide table; on a terminal too narrow for it, two that fit."""
    monkeypatch.setenv("COLUMNS", "30" if width is None else str(width))
    if width is not None:
        monkeypatch.setattr(bench, "terminal", lambda: Console(width=width))
    out = newtention(*QUICK)[1]
    table = out[: out.index("LighterGlue")]
    heading = next(line for line in table.splitlines() if "formula" in line)
    assert ("e(32)" in heading) == (width != 60)
    assert "…" not in out
    for word in (*sketch.KINDS, "rate of failure", "e(8)", "e(32)", "ms(32)"):
        assert f" {word} " in table
    assert table.count("(0.00 to 0.31)") == len(sketch.KINDS)


def test_cases():
    for name, factors in bench.cases(64, 3).items():
        for A in factors:
            assert (A.shape, A.dtype) == ((64, 3), torch.float64), name
            assert int(torch.linalg.matrix_rank(A)) == 3, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--epsilon", 1.5), "--epsilon"),
        (("--delta", 0), "--delta"),
        (("--rows", 300), "--rows"),
        (("--rows", 16, "--columns", 9), "--columns"),
        (("--draws", 0), "--draws"),
    ],
)
def test_wrong_arguments(newtention, arguments, message):
    status, _, err = newtention("bench", "sketches", *arguments)
    assert status == 2
    assert message in err


def test_out_is_a_file(newtention, tmp_path):
    path = tmp_path / "taken"
    path.write_text("")
    status, _, err = newtention(*QUICK, "--out", path)
    assert status == 2
    assert "is a file; expected a folder" in err


@pytest.mark.parametrize("command", [("bench",), ("bench", "sketches")])
def test_help(newtention, command):
    status, out, _ = newtention(*command, "--help")
    assert status == 0
    assert "Usage: newtention bench" in out
