"""Layers in files: round trips, plain arrays, real layers, damaged settings."""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

import newtention as nt
from newtention.io import load_problem, write_result

DATA = Path(__file__).parents[2] / "data"
KEY = "newtention_layer"


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def factored(biases=("Q", "K", "V", "O"), h=4, g=2, **settings):
    d1, d2, d3, e, f, p = 5, 6, 3, 4, 2, 7
    shapes = {"Q": (h, d1, e), "K": (g, d2, e), "V": (g, d3, f), "O": (h, f, p)}
    lengths = {"Q": (h, e), "K": (g, e), "V": (g, f), "O": (p,)}
    parts = {f"W_{n}": draw(*shape, seed=ord(n)) for n, shape in shapes.items()}
    parts |= {f"b_{n}": draw(*lengths[n], seed=ord(n)) for n in biases}
    return nt.FactoredAttention(**parts, **settings)


def bilinear(*heads):
    return nt.BilinearAttention(draw(*heads, 5, 6), draw(*heads, 3, 7))


LAYERS = {
    "all biases": factored(),
    "no biases": factored(biases=()),
    "value and output bias": factored(biases="VO"),
    "one group per head": factored(g=4),
    "one head": factored(h=1, g=1),
    "scale": factored(scale=1 / 3),
    "tiny scale": factored(scale=5e-324),
    "rotary": factored(rotary=nt.Rotary(1e5 / 3)),
    "rotary neighbours": factored(scale=0.5, rotary=nt.Rotary(100, "neighbours")),
    "rotary, pairs kept": factored(rotary=nt.Rotary(50.0, kept=[[0, 3], [1, 2]], width=8)),
    "bilinear": bilinear(),
    "bilinear, one head": bilinear(1),
    "bilinear, heads": bilinear(3),
}


def converted(layer, dtype, numpy):
    parts = {}
    for block in layer.parametrisation.blocks:
        t = torch.tensor(getattr(layer, block.name)).to(dtype)
        parts[block.name] = t.numpy() if numpy else t
    return dataclasses.replace(layer, **parts)


def problem(dtype=torch.float64, mask="causal"):
    arrays = (draw(8, 5, seed=1), draw(8, 6, seed=2), draw(8, 3, seed=3), np.zeros((8, 7)))
    return nt.AttentionProblem(*(torch.tensor(a).to(dtype) for a in arrays), mask=mask)


def assert_same(found, wanted):
    assert type(found) is type(wanted)
    assert found.parametrisation == wanted.parametrisation
    for block in wanted.parametrisation.blocks:
        a, b = getattr(found, block.name), torch.as_tensor(getattr(wanted, block.name))
        assert isinstance(a, torch.Tensor)
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_come_back_exactly(tmp_path, name, dtype, numpy):
    layer = converted(LAYERS[name], dtype, numpy)
    path = tmp_path / "layer.safetensors"
    nt.save_layer(path, layer)
    again = nt.load_layer(path)
    assert_same(again, layer)
    p = problem(dtype)
    assert torch.equal(nt.predict(p, again), nt.predict(p, layer))
    assert os.listdir(tmp_path) == ["layer.safetensors"]


def test_settings_stand_in_the_header(tmp_path):
    path = str(tmp_path / "layer.safetensors")
    nt.save_layer(path, factored(scale=0.3, rotary=nt.Rotary(7.0)))
    with safe_open(path, framework="pt") as file:
        settings = json.loads(file.metadata()[KEY])
    assert settings == {
        "format_version": 1,
        "kind": "factored",
        "scale": 0.3,
        "rotary": dataclasses.asdict(nt.Rotary(7.0)),
    }


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "layer.safetensors"
    nt.save_layer(path, factored())
    nt.save_layer(path, factored(scale=2.0))
    assert nt.load_layer(path).scale == 2.0

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        nt.save_layer(path, bilinear())
    assert_same(nt.load_layer(path), factored(scale=2.0))


def test_what_cannot_be_saved(tmp_path, unchecked):
    with pytest.raises(TypeError, match="BilinearAttention; found Rotary"):
        nt.save_layer(tmp_path / "a.safetensors", nt.Rotary())
    with pytest.raises(ValueError, match=r"a\.npz must end in \.safetensors"):
        nt.save_layer(tmp_path / "a.npz", bilinear())
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        nt.save_layer(tmp_path / "no" / "a.safetensors", bilinear())
    (tmp_path / "d.safetensors").mkdir()
    with pytest.raises(IsADirectoryError, match="is a directory"):
        nt.save_layer(tmp_path / "d.safetensors", bilinear())


def save(path, metadata=None, **arrays):
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        tensors = {n: torch.tensor(np.ascontiguousarray(a)) for n, a in arrays.items()}
        safetensors.torch.save_file(tensors, path, metadata=metadata)
    return path


def plain(layer=None):
    layer = factored() if layer is None else layer
    return {b.name: getattr(layer, b.name) for b in layer.parametrisation.blocks}


def under(prefix, arrays):
    return {prefix + name: a for name, a in arrays.items()}


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_plain_arrays(tmp_path, suffix):
    """Arrays of other names are not even read: these would be refused."""
    others = {"mask": np.ones(3, bool), "tokens": np.full((2, 2), np.nan)}
    path = save(tmp_path / f"a{suffix}", **plain(), **others)
    assert_same(nt.load_layer(path), factored(scale=0.5))
    layer = factored(scale=3.0, rotary=nt.Rotary(9.0))
    assert_same(nt.load_layer(path, 4, 2, nt.Rotary(9.0), 3.0), layer)

    flat = {
        "to_q_W": plain()["W_Q"].transpose(1, 0, 2).reshape(5, 16),
        "to_k.weight": plain()["W_K"].transpose(1, 0, 2).reshape(6, 8).T,
        "Wv": plain()["W_V"].transpose(1, 0, 2).reshape(3, 4),
        "o_proj.weight": plain()["W_O"].reshape(8, 7).T,
    }
    path = save(tmp_path / f"b{suffix}", **under("a.b.", flat), **under("c.", flat), **others)
    layer = nt.load_layer(path, heads=4, kv_heads=2, prefix="a.b.")
    assert_same(layer, factored(biases=(), scale=0.5))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_plain_bilinear_arrays(tmp_path, suffix):
    for i, layer in enumerate((bilinear(), bilinear(1), bilinear(2))):
        path = save(tmp_path / f"{i}{suffix}", **under("l.", plain(layer)), **plain(layer))
        assert_same(nt.load_layer(path), layer)
        assert_same(nt.load_layer(path, prefix="l."), layer)
    # X and Y beside the weights of a factored layer are its data.
    path = save(tmp_path / f"both{suffix}", **plain(), X=draw(9, 5), Y=draw(9, 7))
    assert_same(nt.load_layer(path), factored(scale=0.5))


def test_the_weights_of_a_result_are_a_layer(tmp_path):
    data = save(tmp_path / "data.npz", hidden=draw(7, 3), output=draw(7, 2))
    p, provenance = load_problem(data, ridge_x=0.1, ridge_y=0.1)
    solution = nt.solve(p, max_iter=3)
    write_result(tmp_path / "fit", p, solution, provenance)
    layer = nt.load_layer(tmp_path / "fit" / "weights.safetensors")
    assert nt.loss(p, layer) == solution.loss


def test_half_precision_is_promoted(tmp_path):
    for dtype in (torch.float16, torch.bfloat16):
        tensors = {name: torch.tensor(a).to(dtype) for name, a in plain().items()}
        safetensors.torch.save_file(tensors, tmp_path / "half.safetensors")
        with pytest.warns(UserWarning, match=r"[Wb]_. is b?float16; computing in float32"):
            layer = nt.load_layer(tmp_path / "half.safetensors")
        assert torch.equal(layer.W_Q, tensors["W_Q"].float())


def relative_error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("name", "rotary", "mask"),
    [
        ("minilm_layer3", None, None),
        ("smollm2_layer14", nt.Rotary(100_000.0), "causal"),
    ],
)
def test_self_attention_of_real_models(name, rotary, mask):
    path = DATA / f"{name}.safetensors"
    arrays = safetensors.torch.load_file(path)
    layer = nt.load_layer(path, rotary=rotary)
    hidden, output = arrays["hidden"].double(), arrays["output"].double()
    p = nt.AttentionProblem.from_ragged(hidden, output, offsets=arrays["offsets"], mask=mask)
    assert relative_error(nt.predict(p, layer), output) <= 5e-6
    wrong = dataclasses.replace(layer, scale=0.9 * layer.scale)
    assert relative_error(nt.predict(p, wrong), output) > 1e-3


@pytest.mark.parametrize("place", [0, 2, 5])
def test_cross_attention_of_a_real_model(place):
    path, prefix = DATA / "lighterglue_cross.safetensors", f"layer{place}."
    arrays = safetensors.torch.load_file(path)
    layer = nt.load_layer(path, heads=1, prefix=prefix)
    assert torch.equal(layer.W_Q, layer.W_K)
    for queries, keys, outputs in (("X0", "X1", "O0"), ("X1", "X0", "O1")):
        q, k, o = (arrays[prefix + n].double() for n in (queries, keys, outputs))
        p = nt.AttentionProblem(q, k, k, o)
        assert relative_error(nt.predict(p, layer), o) <= 5e-6


def settings(**changes):
    good = {"format_version": 1, "kind": "factored", "scale": 0.5, "rotary": None}
    return json.dumps({k: v for k, v in (good | changes).items() if v is not ...})


ROTARY = dataclasses.asdict(nt.Rotary())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be a JSON object; found '{'"),
        ("[1]", "must be a JSON object"),
        (settings(format_version=2), "format version 2; this version of Newtention reads 1"),
        (settings(format_version=...), "format version None"),
        (settings(kind="linear"), "kind must be bilinear or factored"),
        (settings(kind=["factored"]), "kind must be bilinear or factored"),
        (settings(scale=...), "scale must be a number; found None"),
        (settings(scale=True), "scale must be a number; found True"),
        (settings(scale=float("nan")), "scale must be a positive finite number; found nan"),
        (settings(rotary=...), "rotary settings are missing"),
        (settings(rotary=[]), "rotary settings are missing or no JSON object"),
        (settings(rotary=ROTARY | {"twist": 1}), "have twist, which this version"),
        (settings(rotary=ROTARY | {"base": "x"}), "rotary settings are damaged"),
        (settings(rotary=ROTARY | {"base": 0.5}), r"Rotary\(base=\) must be"),
        (settings(rotary=ROTARY | {"pairing": "thirds"}), r"Rotary\(pairing=\) must be"),
        (settings(rotary=ROTARY | {"kept": 3, "width": 8}), r"rotary .*damaged|Rotary\(kept=\)"),
        (settings(kind="bilinear"), "there is no array 'X'; found 'W_K'"),
    ],
)
def test_damaged_settings(tmp_path, unchecked, text, message):
    path = save(tmp_path / "a.safetensors", {KEY: text}, **plain(factored(biases=())))
    with pytest.raises(ValueError, match=message) as caught:
        nt.load_layer(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_settings_are_not_contradicted(tmp_path):
    path = tmp_path / "a.safetensors"
    layer = factored(scale=0.3, rotary=nt.Rotary(9.0))
    nt.save_layer(path, layer)
    again = nt.load_layer(path, heads=4, kv_heads=2, scale=0.3, rotary=nt.Rotary(9.0))
    assert_same(again, layer)
    for change, message in {
        "scale": (0.4, r"says scale=0\.3; found scale=0\.4"),
        "rotary": (nt.Rotary(8.0), r"says rotary=Rotary\(base=9\.0.*found rotary=Rotary\(base=8"),
        "heads": (3, "heads is 3, but 'W_Q' is 4 x 5 x 4"),
        "kv_heads": (4, "kv_heads is 4, but 'W_K'"),
    }.items():
        with pytest.raises(ValueError, match=message[1]):
            nt.load_layer(path, **{change: message[0]})
    nt.save_layer(path, bilinear())
    with pytest.raises(ValueError, match="holds a bilinear layer, X and Y, which takes no scale"):
        nt.load_layer(path, scale=1.0)


def test_metadata_of_other_programs_are_ignored(tmp_path):
    path = save(tmp_path / "a.safetensors", {"format": "pt", "scale": "?"}, **plain())
    assert_same(nt.load_layer(path), factored(scale=0.5))


def test_errors_name_the_file_and_where_to_look(tmp_path):
    arrays = under("layers.0.attn.", plain()) | under("layers.1.attn.self.", {"query.weight": 1.0})
    path = save(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=r"under prefix='layers\.0\.attn\.', 'layers\.1\.attn\.'"):
        nt.load_layer(path)
    with pytest.raises(ValueError, match=r"a\.npz, prefix 'layers\.7\.': .*found no arrays"):
        nt.load_layer(path, prefix="layers.7.")
    assert_same(nt.load_layer(path, prefix="layers.0.attn."), factored(scale=0.5))

    path = save(tmp_path / "b.npz", **plain() | {"Wq": draw(4, 5, 4)})
    with pytest.raises(ValueError, match=r"b\.npz: 'W_Q' and 'Wq' are both W_Q"):
        nt.load_layer(path)
    path = save(tmp_path / "c.npz", **plain() | {"W_Q": plain()["W_Q"].astype(np.float32)})
    with pytest.raises(TypeError, match=r"c\.npz: All arrays must have one floating type"):
        nt.load_layer(path)
    path = save(tmp_path / "d.npz", **plain() | {"W_Q": np.full((4, 5, 4), "x")})
    with pytest.raises(TypeError, match="'W_Q' must hold real numbers; found str"):
        nt.load_layer(path)
    path = save(tmp_path / "e.npz", **plain() | {"W_O": np.full((4, 2, 7), np.nan)})
    with pytest.raises(ValueError, match=r"e\.npz: W_O must hold finite numbers"):
        nt.load_layer(path)
    path = save(tmp_path / "f.npz", tokens=draw(3, 2))
    with pytest.raises(ValueError, match=r"f\.npz: There is no array for W_Q .*'tokens' \(3 x 2"):
        nt.load_layer(path)
    path = save(tmp_path / "g.npz", X=draw(3, 2), Y=draw(2, 3, 2))
    with pytest.raises(ValueError, match=r"g\.npz: X and Y must have the same heads"):
        nt.load_layer(path)
    with pytest.raises(FileNotFoundError, match="There is no file"):
        nt.load_layer(tmp_path / "none.npz")
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="must end in"):
        nt.load_layer(tmp_path / "a.bin")
