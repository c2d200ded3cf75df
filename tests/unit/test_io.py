"""Reading sources, writing and reading result folders."""

import json
import os
import warnings
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch

import newtention as nt
from newtention.io import (
    ArrayNames,
    Provenance,
    load_problem,
    load_result,
    open_arrays,
    prepare_folder,
    read_result,
    reload_problem,
    write_array,
    write_result,
)


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def save(path, **arrays):
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        tensors = {k: torch.as_tensor(np.ascontiguousarray(a)) for k, a in arrays.items()}
        safetensors.torch.save_file(tensors, path)
    return path


RAGGED = dict(tokens=draw(9, 3), head_output=draw(9, 2), offsets=np.array([0, 4, 9]))
SINGLE = dict(hidden=draw(7, 3), output=draw(7, 2))
CROSS = dict(queries=draw(5, 3), keys=draw(8, 4), values=draw(8, 2), targets=draw(5, 2))
PADDED = dict(queries=draw(2, 5, 3), targets=draw(2, 5, 2), lengths=np.array([5, 3]))
CROSS_RAGGED = dict(
    queries=draw(5, 3),
    targets=draw(5, 2),
    offsets=np.array([0, 2, 5]),
    keys=draw(9, 4),
    key_offsets=np.array([0, 6, 9]),
)
CROSS_PADDED = dict(
    queries=draw(2, 5, 3),
    targets=draw(2, 5, 2),
    lengths=np.array([5, 3]),
    keys=draw(2, 6, 4),
    key_lengths=np.array([6, 2]),
)
R, S, C, P, K, Q = RAGGED, SINGLE, CROSS, PADDED, CROSS_RAGGED, CROSS_PADDED
DIRECT = {
    "ragged": lambda **kw: nt.AttentionProblem.from_ragged(
        R["tokens"], R["head_output"], offsets=R["offsets"], **kw
    ),
    "single": lambda **kw: nt.AttentionProblem(
        S["hidden"], S["hidden"], S["hidden"], S["output"], **kw
    ),
    "cross": lambda **kw: nt.AttentionProblem(
        C["queries"], C["keys"], C["values"], C["targets"], **kw
    ),
    "padded": lambda **kw: nt.AttentionProblem(
        P["queries"], P["queries"], P["queries"], P["targets"], lengths=P["lengths"], **kw
    ),
    "cross ragged": lambda **kw: nt.AttentionProblem.from_ragged(
        K["queries"],
        K["targets"],
        offsets=K["offsets"],
        keys=K["keys"],
        key_offsets=K["key_offsets"],
        **kw,
    ),
    "cross padded": lambda **kw: nt.AttentionProblem(
        Q["queries"],
        Q["keys"],
        Q["keys"],
        Q["targets"],
        lengths=Q["lengths"],
        key_lengths=Q["key_lengths"],
        **kw,
    ),
}
ARRAYS = dict(zip(DIRECT, (R, S, C, P, K, Q), strict=True))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("layout", DIRECT)
def test_every_layout_gives_the_problem_built_by_hand(tmp_path, layout, suffix):
    path = save(tmp_path / f"data{suffix}", **ARRAYS[layout])
    problem, provenance = load_problem(path, scale=0.5, ridge_x=0.1, ridge_y=0.2)
    direct = DIRECT[layout](scale=0.5, regularizer=nt.Ridge(0.1, 0.2))
    d1, d2, d3, p = direct.widths
    X, Y = draw(d1, d2, seed=1), draw(d3, p, seed=2)
    assert problem.widths == direct.widths
    assert nt.loss(problem, torch.tensor(X), torch.tensor(Y)) == nt.loss(direct, X, Y)
    again, same = reload_problem(Provenance.from_dict(provenance.to_dict()))
    assert same == provenance
    assert nt.loss(again, torch.tensor(X), torch.tensor(Y)) == nt.loss(direct, X, Y)


def test_the_packaged_example_loads():
    problem, provenance = load_problem("example:minilm-head", mask="causal")
    assert problem.widths == (32, 32, 32, 32)
    assert problem.mask == "causal"
    assert problem.chunks[0].A1 is problem.chunks[0].A2
    assert provenance.source == "example:minilm-head"
    assert provenance.arrays.given() == {
        "queries": "tokens",
        "targets": "head_output",
        "offsets": "offsets",
    }


def test_names_may_be_given_or_left_out(tmp_path):
    path = save(tmp_path / "a.npz", **CROSS_RAGGED, other=draw(5, 1))
    problem, provenance = load_problem(path, ArrayNames(targets="other"))
    assert problem.widths == (3, 4, 4, 1)
    assert provenance.arrays.keys == "keys"
    problem, provenance = load_problem(path, ArrayNames(keys="none", key_offsets="none"))
    assert problem.widths == (3, 3, 3, 2)
    assert provenance.arrays.keys is None
    problem, _ = load_problem(path, ArrayNames(keys="none", key_offsets="none", offsets="none"))
    assert problem.layout.queries == (5,)


def test_data_are_converted(tmp_path):
    exact = {k: v.astype(np.float16) for k, v in SINGLE.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        problem, _ = load_problem(save(tmp_path / "half.npz", **exact))
        assert problem.like.dtype == torch.float64
        problem, _ = load_problem(save(tmp_path / "big.npz", **SINGLE), dtype="float32")
        assert problem.like.dtype == torch.float32
    tensors = {k: torch.tensor(v).bfloat16() for k, v in SINGLE.items()}
    safetensors.torch.save_file(tensors, tmp_path / "b.safetensors")
    problem, _ = load_problem(tmp_path / "b.safetensors")
    assert torch.equal(problem.chunks[0].B[0, 0], tensors["output"].double())
    integers = SINGLE | dict(hidden=np.round(9 * SINGLE["hidden"]).astype(">i4"))
    with pytest.warns(UserWarning, match=r"'hidden' \(queries\) holds integers; "):
        problem, _ = load_problem(save(tmp_path / "int.npz", **integers))
    assert torch.equal(problem.chunks[0].A1[0, 0], torch.tensor(integers["hidden"].astype(float)))


def with_nan(a):
    a = a.copy()
    a[1, 1] = np.nan
    return a


BAD = {
    "NaN": (
        SINGLE | dict(hidden=with_nan(SINGLE["hidden"])),
        {},
        r"'hidden' \(queries\).*\(1, 1\)",
    ),
    "no queries": (dict(x=draw(2, 2)), {}, r"no array named 'queries' or 'tokens'.*'x' \(2 x 2"),
    "no such array": (SINGLE, dict(keys="k"), r"no array 'k' \(keys\); it holds 'hidden'"),
    "ambiguous": (SINGLE | dict(tokens=draw(7, 3)), {}, "'tokens' and 'hidden'.*--queries"),
    "rows": (SINGLE | dict(output=draw(6, 2)), {}, r"'output' \(targets\).*7 x 3.*found 6 x 2"),
    "values' rows": (CROSS | dict(values=draw(7, 2)), {}, "one row per row of 'keys'"),
    "4-D": (SINGLE | dict(hidden=draw(1, 2, 2, 2)), {}, "2-D .* or 3-D .*found 1 x 2 x 2 x 2"),
    "axes": (SINGLE | dict(output=draw(1, 7, 2)), {}, "must be 2-D like the queries"),
    "empty": (SINGLE | dict(output=np.zeros((7, 0))), {}, "not empty; found 7 x 0"),
    "offsets": (RAGGED | dict(offsets=np.array([0, 8])), {}, r"\(offsets\).*number of rows, 9"),
    "lengths": (PADDED | dict(lengths=np.array([5, 6])), {}, r"\(lengths\)\[1\].*found 6"),
    "key offsets": (
        {k: v for k, v in CROSS_RAGGED.items() if k != "key_offsets"},
        {},
        "name them with --key-offsets",
    ),
    "only key offsets": (
        {k: v for k, v in CROSS_RAGGED.items() if k != "offsets"},
        {},
        "name them with --offsets",
    ),
    "sequences": (CROSS_PADDED | dict(keys=draw(3, 6, 4)), {}, "2 sequences like the queries"),
    "offsets of padded": (
        PADDED | dict(o=np.array([0, 1])),
        dict(offsets="o"),
        "offsets do not go with queries of shape 2 x 5 x 3",
    ),
    "lengths of 2-D": (SINGLE | dict(o=np.array([0, 1])), dict(lengths="o"), "lengths do not go"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arrays_are_named(tmp_path, case):
    arrays, names, message = BAD[case]
    path = save(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message) as caught:
        load_problem(path, ArrayNames(**names))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.ones((7, 3), bool), "real numbers; found bool"),
        (np.ones((7, 3), complex), "real numbers; found complex"),
        (np.full((7, 3), "x"), "real numbers; found str"),
        (np.full((7, 3), None), "pickled Python objects"),
    ],
)
def test_arrays_of_other_kinds_are_refused(tmp_path, array, found):
    path = tmp_path / "a.npz"
    np.savez(path, hidden=array, output=SINGLE["output"], allow_pickle=True)
    with pytest.raises(TypeError, match=found):
        load_problem(path)


def test_numbers_beyond_float32_are_refused(tmp_path):
    path = save(tmp_path / "a.npz", **SINGLE | dict(output=1e300 * SINGLE["output"]))
    with pytest.raises(ValueError, match=r"'output' \(targets\) holds numbers beyond"):
        load_problem(path, dtype="float32")


@pytest.mark.parametrize(
    "settings",
    [dict(mask="block"), dict(scale=0.0), dict(ridge_x=-1.0), dict(dtype="int8")],
)
def test_settings_out_of_range_are_refused(tmp_path, settings):
    path = save(tmp_path / "a.npz", **SINGLE)
    with pytest.raises(ValueError, match=next(iter(settings)).removesuffix("_x")[:5] + "|Ridge"):
        load_problem(path, **settings)


def test_files_of_other_kinds(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no file"):
        open_arrays(tmp_path / "a.npz")
    with pytest.raises(IsADirectoryError, match="is a directory"):
        open_arrays(tmp_path)
    with pytest.raises(ValueError, match=r"There is no example 'x'.*example:minilm-head"):
        open_arrays("example:x")
    for name, message in {
        "a.csv": "must end in .safetensors or .npz; found '.csv'",
        "a.npz": "not a readable NumPy .npz archive",
        "a.safetensors": "not a readable safetensors file",
    }.items():
        (tmp_path / name).write_text("hello, I am text\n" * 9)
        with pytest.raises(ValueError, match=message):
            open_arrays(tmp_path / name)


@pytest.mark.parametrize("keep", [0, 4, 100, -10])
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_truncated_files(tmp_path, suffix, keep):
    path = save(tmp_path / f"a{suffix}", **SINGLE)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="not a readable"):
        open_arrays(path)


def test_damaged_member_of_an_archive(tmp_path):
    path = save(tmp_path / "a.npz", hidden=draw(9000, 3), output=draw(9000, 2))
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("hidden.npy").header_offset
    content[start + 100_000] ^= 255
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="'hidden' cannot be read"):
        load_problem(path)


@pytest.fixture
def fitted(tmp_path):
    path = save(tmp_path / "data.npz", **RAGGED)
    problem, provenance = load_problem(path, ridge_x=0.1, ridge_y=0.1)
    solution = nt.solve(problem, n_init=2)
    folder = tmp_path / "result"
    document = write_result(folder, problem, solution, provenance, seed=0, n_init=2)
    return path, folder, problem, solution, document


def test_a_result_comes_back_whole(fitted):
    path, folder, problem, solution, document = fitted
    again, saved, read = load_result(folder)
    assert read == document
    for got, want in ((saved.layer, solution.layer), (saved.start, solution.start)):
        assert type(got) is type(want) is nt.BilinearAttention
        assert torch.equal(got.X, want.X)
        assert torch.equal(got.Y, want.Y)
    for name in ("loss", "status", "tol", "seconds", "start_losses", "iterations", "relative_loss"):
        assert getattr(saved, name) == getattr(solution, name)
    assert saved.history == solution.history
    assert nt.loss(again, saved.X, saved.Y) == nt.loss(problem, solution.X, solution.Y)
    assert read["provenance"]["source"] == str(path)
    assert read["regularizer"] == {"name": "ridge", "x": 0.1, "y": 0.1}
    assert {"newtention", "torch", "numpy", "python"} == set(read["versions"])
    assert sorted(os.listdir(folder)) == ["result.json", "start.safetensors", "weights.safetensors"]


def test_changed_or_moved_data_are_noticed(fitted, tmp_path):
    path, folder, _, solution, _ = fitted
    moved = path.rename(tmp_path / "moved.npz")
    with pytest.raises(FileNotFoundError, match="--source"):
        load_result(folder)
    assert torch.equal(load_result(folder, moved)[1].X, solution.X)
    save(path, **RAGGED | dict(tokens=draw(9, 3, seed=5)))
    with pytest.raises(ValueError, match="not the file of this fit, or has changed since"):
        load_result(folder)


def test_damaged_results(fitted):
    folder = fitted[1]
    result, weights = folder / "result.json", folder / "weights.safetensors"
    good = result.read_text()
    for text, message in {
        "{": "is damaged",
        "[]": "not written by Newtention",
        good.replace('"format_version": 1', '"format_version": 2'): "format version 2",
        good.replace('"loss"', '"lost"'): "incomplete or damaged.*'loss'",
        good.replace('"status": "', '"status": "x'): "incomplete or damaged",
    }.items():
        result.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_result(folder)
    result.write_text(good)
    weights.write_bytes((folder / "start.safetensors").read_bytes())
    with pytest.raises(ValueError, match="does not belong"):
        read_result(folder)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"weights\.safetensors"):
        read_result(folder)
    result.unlink()
    with pytest.raises(FileNotFoundError, match="not a result folder"):
        read_result(folder)


def test_history_without_numbers_survives_json(fitted, tmp_path):
    _, _, problem, solution, document = fitted
    rows = [replace(record, change=float("nan")) for record in solution.history]
    changed = replace(solution, history=nt.History(rows))
    provenance = Provenance.from_dict(document["provenance"])
    write_result(tmp_path / "new", problem, changed, provenance)
    json.loads((tmp_path / "new/result.json").read_text(), parse_constant=pytest.fail)
    assert np.isnan(read_result(tmp_path / "new").solution.history[0].change)


def test_folders_are_protected(fitted, tmp_path):
    _, folder, problem, solution, document = fitted
    with pytest.raises(FileExistsError, match="--force"):
        prepare_folder(folder)
    (folder / "report.html").write_text("old")
    (folder / "notes.txt").write_text("mine")
    write_result(
        folder, problem, solution, Provenance.from_dict(document["provenance"]), force=True
    )
    assert not (folder / "report.html").exists()
    assert (folder / "notes.txt").read_text() == "mine"

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    assert prepare_folder(foreign) is False
    (foreign / "result.json").write_text('{"format": "other"}')
    with pytest.raises(FileExistsError, match=r"'result\.json'.*no result of Newtention"):
        prepare_folder(foreign, force=True)
    with pytest.raises(FileExistsError, match="is a file"):
        prepare_folder(foreign / "result.json")
    with pytest.raises(OSError, match=r"cannot be written to .*Not a directory"):
        prepare_folder(foreign / "result.json" / "x")
    assert prepare_folder(tmp_path / "a" / "b") is True


def test_a_failed_write_leaves_the_old_result(fitted, monkeypatch):
    _, folder, problem, solution, document = fitted
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_result(
            folder, problem, solution, Provenance.from_dict(document["provenance"]), force=True
        )
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_write_array(tmp_path):
    array = torch.tensor(draw(3, 2))
    for name in ("a.npz", "a.safetensors"):
        write_array(tmp_path / name, "predictions", array)
        assert torch.equal(open_arrays(tmp_path / name).read("predictions"), array)
        with pytest.raises(FileExistsError, match="--force"):
            write_array(tmp_path / name, "predictions", array)
        write_array(tmp_path / name, "predictions", array, force=True)
    with pytest.raises(ValueError, match="must end in"):
        write_array(tmp_path / "a.txt", "predictions", array)
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        write_array(tmp_path / "no" / "a.npz", "predictions", array)
