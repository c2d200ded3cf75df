"""Bad input: one test each, with the sentence the user reads; awkward but good input computes."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import newtention as nt
from tests.checks import require_close, require_finite

# The tests' type checker would speak before the library does.
pytestmark = pytest.mark.usefixtures("unchecked")

N, M, D1, D2, D3, P = 6, 7, 3, 4, 2, 5


def arrays(seed=0, kind="torch", lead=()):
    rng = np.random.default_rng(seed)
    shapes = {"A1": (N, D1), "A2": (M, D2), "A3": (M, D3), "B": (N, P)}
    made = {name: rng.standard_normal((*lead, *shape)) for name, shape in shapes.items()}
    return made if kind == "numpy" else {k: torch.from_numpy(v) for k, v in made.items()}


def problem(change=None, kind="torch", lead=(), **options):
    given = arrays(kind=kind, lead=lead) | (change or {})
    return nt.AttentionProblem(**given, **options)


def refused(error, match, change=None, lead=(), **options):
    with pytest.raises(error, match=match):
        problem(change, lead=lead, **options)


def ragged(**options):
    rng = np.random.default_rng(0)
    given = {"queries": rng.standard_normal((6, 3)), "targets": rng.standard_normal((6, 2))}
    return nt.AttentionProblem.from_ragged(**(given | {"offsets": [0, 2, 6]} | options))


def weights(seed=0):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(D1, D2, generator=g, dtype=torch.float64),
        torch.randn(D3, P, generator=g, dtype=torch.float64),
    )


# Shapes


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("A1", (N,)),
        ("A1", (1, 1, N, D1)),
        ("A1", ()),
        ("A2", (M,)),
        ("A2", (2, M, D2)),
        ("A3", (M + 1, D3)),
        ("A3", (M,)),
        ("B", (N + 1, P)),
        ("B", (N,)),
        ("B", (1, N, P)),
    ],
)
def test_wrong_shape(name, shape):
    refused(ValueError, f"{name} must be", {name: torch.zeros(shape).double()})


@pytest.mark.parametrize("name", ["A1", "A2", "A3", "B"])
def test_unequal_numbers_of_sequences(name):
    given = arrays(lead=(3,))
    refused(ValueError, "must be", {name: given[name][:2]}, lead=(3,))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("A1", (0, D1)), ("A1", (N, 0)), ("A2", (M, 0)), ("A3", (M, 0)), ("B", (N, 0))],
)
def test_empty_axis(name, shape):
    change = {name: torch.zeros(shape).double()}
    if name == "A1" and shape[0] == 0:
        change["B"] = torch.zeros(0, P).double()
    refused(ValueError, "must not be empty", change)


def test_no_keys():
    change = {"A2": torch.zeros(0, D2).double(), "A3": torch.zeros(0, D3).double()}
    refused(ValueError, "A2 must not be empty", change)


def test_no_sequences():
    change = {k: torch.zeros(0, *v.shape).double() for k, v in arrays().items()}
    refused(ValueError, "must not be empty", change)


# Numbers


@pytest.mark.parametrize("name", ["A1", "A2", "A3", "B"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_not_finite(name, value, kind):
    bad = arrays(kind=kind)[name].copy() if kind == "numpy" else arrays()[name].clone()
    bad[1, 0] = value
    with pytest.raises(ValueError, match=rf"{name} must hold finite.*\(1, 0\)"):
        problem({name: bad}, kind=kind)


@pytest.mark.parametrize("make", [lambda a: a.to(torch.complex128), lambda a: a.numpy() + 0j])
def test_complex(make):
    given = {k: make(v) for k, v in arrays().items()}
    refused(TypeError, "real numbers", given)


def test_booleans_and_text():
    refused(TypeError, "numbers", {"A1": torch.ones(N, D1, dtype=torch.bool)})
    with pytest.raises(TypeError, match="real numbers"):
        problem({"A1": np.full((N, D1), "1")}, kind="numpy")
    with pytest.raises(TypeError, match="real numbers"):
        problem({"A1": np.full((N, D1), None)}, kind="numpy")


def test_rows_of_different_lengths():
    with pytest.raises(TypeError, match="rows differ"):
        problem({"A1": [[1.0, 2.0, 3.0], [1.0]]}, kind="numpy")


def test_sparse():
    refused(TypeError, "dense", {"A1": arrays()["A1"].to_sparse()})


def test_torch_and_numpy_mixed():
    refused(TypeError, "torch tensor but", {"B": arrays(kind="numpy")["B"]})
    with pytest.raises(TypeError, match="torch tensor but"):
        problem({"A1": arrays()["A1"]}, kind="numpy")


def test_float32_and_float64_mixed():
    refused(TypeError, "one floating type", {"B": arrays()["B"].float()})
    with pytest.raises(TypeError, match="one floating type"):
        problem({"A1": arrays(kind="numpy")["A1"].astype(np.float32)}, kind="numpy")


# Promotion


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision(half):
    given = {k: v.to(half) for k, v in arrays().items()}
    with pytest.warns(UserWarning, match="computing in float32"):
        made = nt.AttentionProblem(**given)
    solution = nt.solve(made, max_iter=3)
    assert solution.X.dtype == torch.float32
    want = nt.AttentionProblem(**{k: v.float() for k, v in given.items()})
    assert nt.solve(want, max_iter=3).loss == solution.loss


def test_numpy_half_precision():
    given = {k: v.astype(np.float16) for k, v in arrays(kind="numpy").items()}
    with pytest.warns(UserWarning, match="computing in float32"):
        made = nt.AttentionProblem(**given)
    X = nt.solve(made, max_iter=1).X
    assert isinstance(X, np.ndarray)
    assert X.dtype == np.float32


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.uint16, np.uint32])
def test_integers(dtype):
    rng = np.random.default_rng(0)
    given = {k: rng.integers(0, 4, v.shape).astype(dtype) for k, v in arrays().items()}
    with pytest.warns(UserWarning, match="computing in float64"):
        made = nt.AttentionProblem(**given)
    assert nt.solve(made, max_iter=1).X.dtype == np.float64


def test_integers_beside_float32():
    given = {k: v.float() for k, v in arrays().items()} | {"B": torch.ones(N, P, dtype=torch.int64)}
    with pytest.warns(UserWarning, match="B holds integers; computing in float32"):
        made = nt.AttentionProblem(**given)
    assert made.like.dtype == torch.float32


def test_promotion_warns_at_the_caller():
    """In a process of its own: the tests' type checker adds frames."""
    code = """
import warnings, torch, newtention as nt
half, whole = torch.ones(3, 2).half(), torch.ones(3, 2).int()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    nt.AttentionProblem(half, half, half, half)
    nt.AttentionProblem.from_ragged(half, half, offsets=[0, 3])
    nt.AttentionProblem(whole, whole, whole, whole)
print([(w.filename, w.lineno) for w in caught])
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[('<string>', 6), ('<string>', 7), ('<string>', 8)]"


def test_long_double_and_byte_order():
    plain = arrays(kind="numpy")
    want = nt.loss(problem(kind="numpy"), *weights())
    for dtype in (np.longdouble, ">f8", "<f8"):
        made = nt.AttentionProblem(**{k: v.astype(dtype) for k, v in plain.items()})
        assert made.like.dtype == torch.float64
        require_close(str(dtype), nt.loss(made, *weights()), want, 1e-15)


# Memory layouts


def layouts(a):
    """The same numbers in awkward memory."""
    wide = np.zeros((2 * a.shape[0], 3 * a.shape[1]))
    wide[::2, ::3] = a
    frozen = a.copy()
    frozen.flags.writeable = False
    backwards = a[::-1, ::-1].copy()
    return {
        "strided": wide[::2, ::3],
        "fortran": np.asfortranarray(a),
        "read-only": frozen,
        "negative strides": backwards[::-1, ::-1],
        "lists": a.tolist(),
    }


@pytest.mark.parametrize("layout", ["strided", "fortran", "read-only", "negative strides", "lists"])
def test_numpy_layouts(layout):
    given = {k: layouts(v)[layout] for k, v in arrays(kind="numpy").items()}
    X, Y = (layouts(w.numpy())[layout] for w in weights())
    made = nt.AttentionProblem(**given)
    plain = problem(kind="numpy")
    assert nt.loss(made, X, Y) == nt.loss(plain, *weights())
    for got, want in zip(nt.gradient(made, X, Y), nt.gradient(plain, *weights()), strict=True):
        assert isinstance(got, np.ndarray)
        require_close(layout, got, want, 1e-15)
    assert (
        nt.solve(made, start=X, max_iter=2).loss == nt.solve(plain, weights()[0], max_iter=2).loss
    )


def test_torch_layouts():
    given = {k: v.T.contiguous().T for k, v in arrays().items()}
    X, Y = (w.T.contiguous().T for w in weights())
    assert not X.is_contiguous()
    require_close("loss", nt.loss(nt.AttentionProblem(**given), X, Y),
                  nt.loss(problem(), *weights()), 1e-15)  # fmt: skip


def test_inputs_are_left_alone():
    given = arrays(kind="numpy")
    copies = {k: v.copy() for k, v in given.items()}
    nt.solve(nt.AttentionProblem(**given, regularizer=nt.Ridge(1.0, 1.0)), n_init=2, max_iter=3)
    assert all(np.array_equal(given[k], copies[k]) for k in given)


# Masks and biases


def empty_row(*shape):
    mask = torch.ones(shape, dtype=torch.bool)
    mask[..., 3, :] = False
    return mask


def test_query_without_keys():
    refused(ValueError, "query 3 of sequence 0", mask=empty_row(N, M))


def test_query_without_keys_in_a_batch():
    mask = torch.ones(2, N, M, dtype=torch.bool)
    mask[1, 3] = False
    refused(ValueError, "query 3 of sequence 1", lead=(2,), mask=mask)
    refused(ValueError, "query 3 of sequence 0", lead=(2,), mask=empty_row(N, M))


def test_query_whose_only_keys_are_padding():
    """The mask allows keys, but none among the real ones."""
    mask = torch.ones(2, N, M, dtype=torch.bool)
    mask[1, 3, :4] = False
    refused(ValueError, "query 3 of sequence 1", lead=(2,), mask=mask, lengths=[N, N],
            key_lengths=[M, 4])  # fmt: skip


def test_query_without_keys_under_a_bias():
    bias = torch.zeros(N, M)
    bias[3] = -torch.inf
    refused(ValueError, "query 3", bias=bias)
    bias = torch.zeros(N, M)
    bias[3, :4] = -torch.inf
    refused(ValueError, "query 3", bias=bias, mask="causal")
    mask = torch.ones(N, M, dtype=torch.bool)
    mask[3, 4:] = False
    refused(ValueError, "query 3", bias=bias, mask=mask)


def test_query_without_keys_in_ragged_data():
    masks = [np.ones((2, 2), bool), np.ones((4, 4), bool)]
    masks[1][2] = False
    with pytest.raises(ValueError, match="query 2 of sequence 1"):
        ragged(mask=masks)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.uint8])
def test_mask_of_numbers(dtype):
    refused(TypeError, "mask must be boolean", mask=torch.ones(N, M, dtype=dtype))


def test_mask_shape():
    refused(ValueError, "mask must be", mask=torch.ones(M, N, dtype=torch.bool))
    refused(ValueError, "mask must be", lead=(2,), mask=torch.ones(3, N, M, dtype=torch.bool))
    refused(ValueError, "mask must be", mask=torch.ones(1, N, M, dtype=torch.bool))


def test_mask_word():
    refused(ValueError, "causal", mask="casual")
    with pytest.raises(ValueError, match="causal"):
        ragged(mask="full")


def test_mask_of_ragged_data_is_a_list():
    with pytest.raises(ValueError, match="list of 2"):
        ragged(mask=np.ones((6, 6), bool))
    with pytest.raises(ValueError, match="list of 2"):
        ragged(mask=[np.ones((2, 2), bool)])
    with pytest.raises(ValueError, match=r"mask\[1\] must be 4 x 4"):
        ragged(mask=[np.ones((2, 2), bool)] * 2)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bias_not_finite(value):
    bias = np.zeros((N, M))
    bias[0, 0] = value
    refused(ValueError, "bias must hold", bias=bias)


def test_bias_shape():
    refused(ValueError, "bias must be", bias=np.zeros((M, N)))
    refused(ValueError, "bias must be", lead=(2,), bias=np.zeros((3, N, M)))
    with pytest.raises(ValueError, match=r"bias\[1\] must be"):
        ragged(bias=[np.zeros((2, 2))] * 2)


def test_bias_forbids_alike_in_all_heads():
    bias = np.zeros((2, N, M))
    bias[0, 0, 0] = -np.inf
    refused(ValueError, "same pairs in every head", bias=bias)


def test_bias_heads():
    made = problem(bias=np.zeros((2, N, M)))
    X, Y = weights()
    with pytest.raises(ValueError, match="2 head"):
        nt.loss(made, X, Y)
    with pytest.raises(ValueError, match="2 head"):
        nt.solve(made, start=X)
    assert nt.solve(made, max_iter=1).X.shape == (2, D1, D2)


def test_bias_heads_differ_between_sequences():
    biases = [np.zeros((2, 2, 2)), np.zeros((3, 4, 4))]
    with pytest.raises(ValueError, match="heads"):
        ragged(bias=biases)


def test_bias_of_complex_numbers():
    refused(TypeError, "bias", bias=np.zeros((N, M)) + 0j)
    refused(TypeError, "bias", bias=torch.zeros(N, M, dtype=torch.complex64))


# Lengths and offsets


@pytest.mark.parametrize(
    ("lengths", "match"),
    [
        ([N, 0], "between 1 and"),
        ([N, N + 1], "between 1 and"),
        ([N, -1], "between 1 and"),
        ([N], "2 integers"),
        ([[N, N]], "2 integers"),
    ],
)
def test_lengths(lengths, match):
    refused(ValueError, match, lead=(2,), lengths=lengths, key_lengths=[M, M])
    refused(ValueError, match.replace("N", "M"), lead=(2,), lengths=[N, N],
            key_lengths=[k + M - N if k == N + 1 else k for k in lengths]
            if isinstance(lengths[0], int) else lengths)  # fmt: skip


@pytest.mark.parametrize("lengths", [[6.0, 6.0], [True, True]])
def test_lengths_are_integers(lengths):
    refused(TypeError, "must hold integers", lead=(2,), lengths=lengths, key_lengths=[M, M])


def test_lengths_without_key_lengths():
    refused(ValueError, "key_lengths= must be given", lead=(2,), lengths=[N, N])


def test_lengths_of_one_sequence():
    refused(ValueError, "3-D", lengths=[N])
    refused(ValueError, "3-D", key_lengths=[M])


@pytest.mark.parametrize(
    ("offsets", "match"),
    [
        ([1, 2, 6], "start at 0"),
        ([0, 2, 5], "end at the number of rows"),
        ([0, 2, 7], "end at the number of rows"),
        ([0, 4, 2, 6], "increase strictly"),
        ([0, 2, 2, 6], "increase strictly"),
        ([0], "at least two"),
        ([], "at least two|integers"),
        ([[0, 6]], "at least two"),
    ],
)
def test_offsets(offsets, match):
    error = (ValueError, TypeError) if not offsets else ValueError
    with pytest.raises(error, match=match):
        ragged(offsets=offsets)


def test_offsets_are_integers():
    with pytest.raises(TypeError, match="offsets must hold integers"):
        ragged(offsets=[0.0, 6.0])


def test_key_offsets():
    keys = np.ones((5, 3))
    with pytest.raises(ValueError, match="key_offsets= must be given"):
        ragged(keys=keys)
    with pytest.raises(ValueError, match="as many sequences"):
        ragged(keys=keys, key_offsets=[0, 5])
    with pytest.raises(ValueError, match="key_offsets must start"):
        ragged(keys=keys, key_offsets=[0, 2, 6])
    with pytest.raises(ValueError, match="values must be"):
        ragged(keys=keys, values=np.ones((4, 2)), key_offsets=[0, 2, 5])
    with pytest.raises(ValueError, match="targets must be"):
        ragged(targets=np.ones((5, 2)))
    with pytest.raises(ValueError, match="queries must be"):
        ragged(queries=np.ones((2, 3, 3)))


# Query weights, scale, regularisers


def test_query_weights():
    w = torch.ones(N)
    refused(ValueError, "query_weights must be", query_weights=torch.ones(N + 1))
    refused(ValueError, "at least 0.*query 2", query_weights=w.index_fill(0, torch.tensor(2), -1))
    refused(ValueError, "not all be 0", query_weights=0 * w)
    refused(ValueError, "finite", query_weights=w / 0)
    refused(ValueError, "finite", query_weights=w * torch.nan)
    with pytest.raises(ValueError, match="query_weights must be"):
        ragged(query_weights=np.ones(5))


def test_padded_query_weights_do_not_count():
    """All real queries have weight 0; only padding has some."""
    q = torch.zeros(2, N)
    q[:, -1] = 1.0
    refused(ValueError, "not all be 0", lead=(2,), query_weights=q, lengths=[N - 1, N - 1],
            key_lengths=[M, M])  # fmt: skip


@pytest.mark.parametrize("scale", [0, -1, np.nan, np.inf])
def test_scale(scale):
    refused(ValueError, "scale must be", scale=scale)
    with pytest.raises(ValueError, match="scale must be"):
        ragged(scale=scale)


@pytest.mark.parametrize("value", [-1e-9, np.nan, np.inf])
def test_strengths(value):
    with pytest.raises(ValueError, match=r"Ridge\(x=\)"):
        nt.Ridge(x=value)
    with pytest.raises(ValueError, match=r"Ridge\(y=\)"):
        nt.Ridge(y=value)
    with pytest.raises(ValueError, match=r"Proximity\(strength=\)"):
        nt.Proximity(weights(), strength=value)


def test_token_weights():
    refused(ValueError, r"TokenWeights\(w\) must be 7", regularizer=nt.TokenWeights(np.ones(N)))
    refused(ValueError, r"TokenWeights\(w\).*finite",
            regularizer=nt.TokenWeights(np.full(M, np.nan)))  # fmt: skip
    refused(ValueError, r"TokenWeights\(w\) must be 2 x 7", lead=(2,),
            regularizer=nt.TokenWeights(np.ones(M)))  # fmt: skip
    with pytest.raises(ValueError, match=r"TokenWeights\(w\)"):
        ragged(regularizer=nt.TokenWeights(np.ones(5)))


def test_proximity():
    X, Y = weights()
    for reference in (X, (X,)):
        with pytest.raises(TypeError, match="pair"):
            nt.Proximity(reference)
    for reference, match in (
        ((X.T, Y), r"reference\[0\]"),
        ((X, Y.T), r"reference\[1\]"),
        ((X, Y.expand(2, -1, -1)), r"reference\[1\]"),
        ((X[0], Y), r"reference\[0\]"),
        ((X[None, None], Y), r"reference\[0\]"),
    ):
        refused(ValueError, match, regularizer=nt.Proximity(reference))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_proximity_not_finite(value):
    X, Y = weights()
    refused(ValueError, "finite", regularizer=nt.Proximity((X * value, Y)))
    refused(ValueError, "finite", regularizer=nt.Proximity((X, Y * value)))


def test_proximity_heads():
    made = problem(regularizer=nt.Proximity([w.expand(2, -1, -1) for w in weights()]))
    with pytest.raises(ValueError, match="2 head"):
        nt.loss(made, *weights())


def test_not_a_regularizer():
    refused(TypeError, "Ridge, TokenWeights or Proximity", regularizer=0.1)
    refused(TypeError, "Ridge, TokenWeights or Proximity", regularizer=nt.Ridge)


# Weights


@pytest.mark.parametrize(
    ("x", "y", "match"),
    [
        ((D2, D1), (D3, P), "X must be"),
        ((D1,), (D3, P), "X must be"),
        ((1, 1, D1, D2), (D3, P), "X must be"),
        ((D1, D2), (P, D3), "Y must be"),
        ((D1, D2), (2, D3, P), "1 head.*2"),
        ((2, D1, D2), (D3, P), "2 head.*1"),
    ],
)
def test_weight_shapes(x, y, match):
    X, Y = torch.ones(x).double(), torch.ones(y).double()
    for call in (nt.loss, nt.gradient, nt.hessian, nt.predict, nt.check_derivatives):
        with pytest.raises(ValueError, match=match):
            call(problem(), X, Y)
    with pytest.raises(ValueError, match=match):
        nt.solve(problem(), start=(X, Y))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_not_finite(value):
    X, Y = weights()
    with pytest.raises(ValueError, match="X must hold finite"):
        nt.loss(problem(), X * value, Y)
    with pytest.raises(ValueError, match="Y must hold finite"):
        nt.solve(problem(), start=(X, Y * value))
    with pytest.raises(ValueError, match="X must hold finite"):
        nt.solve(problem(), start=X * value)


def test_hessian_kind():
    with pytest.raises(ValueError, match="gauss-newton"):
        nt.hessian(problem(), *weights(), kind="gauss")


# Settings of solve


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "adam"}, "method"),
        ({"tol": 0}, "tol"),
        ({"tol": -1e-3}, "tol"),
        ({"tol": np.nan}, "tol"),
        ({"tol": np.inf}, "tol"),
        ({"max_iter": -1}, "max_iter"),
        ({"max_iter": 2.5}, "max_iter"),
        ({"max_seconds": -1}, "max_seconds"),
        ({"max_seconds": np.nan}, "max_seconds"),
        ({"n_init": 0}, "n_init"),
        ({"n_init": 1.5}, "n_init"),
        ({"n_init": True}, "n_init"),
        ({"seed": -1}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"start": "svd"}, "start"),
        ({"start": (1, 2, 3)}, "start"),
    ],
)
def test_settings(options, match):
    with pytest.raises(ValueError, match=match):
        nt.solve(problem(), **options)
    if "start" not in options:
        with pytest.raises(ValueError, match=match):
            nt.solve_many([problem()], **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"heads": 0}, "heads"),
        ({"heads": 1.0}, "heads"),
        ({"start_scale": 0}, "start_scale"),
        ({"start_scale": np.nan}, "start_scale"),
        ({"start_scale": np.inf}, "start_scale"),
        ({"gauss_newton_iterations": -1}, "gauss_newton_iterations"),
    ],
)
def test_options(options, match):
    with pytest.raises(ValueError, match=match):
        nt.Options(**options)


def test_numpy_integers_are_integers():
    solution = nt.solve(problem(), max_iter=np.int64(1), n_init=np.int32(2), seed=np.uint8(3))
    assert solution.loss == nt.solve(problem(), max_iter=1, n_init=2, seed=3).loss


def test_solve_many():
    with pytest.raises(ValueError, match="at least one"):
        nt.solve_many([])
    with pytest.raises(ValueError, match="2 entries"):
        nt.solve_many([problem()] * 2, starts=[None])
    narrow = nt.AttentionProblem(*(a[:, :2] for a in arrays().values()))
    with pytest.raises(ValueError, match="equal widths"):
        nt.solve_many([problem(), narrow])
    single = nt.AttentionProblem(*(a.float() for a in arrays().values()))
    with pytest.raises(ValueError, match="dtype"):
        nt.solve_many([problem(), single])
    X, Y = weights()
    two = (X.expand(2, -1, -1), Y.expand(2, -1, -1))
    with pytest.raises(ValueError, match="number of heads"):
        nt.solve_many([problem()] * 2, starts=[(X, Y), two])


# Data that are awkward but right: an answer without NaN, and a status


@pytest.mark.parametrize(
    "change",
    [
        {"A1": torch.zeros(N, D1)},
        {"A2": torch.zeros(M, D2)},
        {"A3": torch.zeros(M, D3)},
        {"B": torch.zeros(N, P)},
        {"A1": torch.ones(N, D1), "A2": torch.ones(M, D2)},
        {"A3": torch.ones(M, D3)},
        {"A1": torch.ones(1, D1), "B": torch.ones(1, P)},
        {"A2": torch.ones(1, D2), "A3": torch.ones(1, D3)},
        {name: torch.ones(1, 1) for name in ("A1", "A2", "A3", "B")},
        {"A2": torch.ones(M, 1) @ torch.ones(1, D2), "B": torch.arange(N * P).view(N, P) / 7.0},
        {"A1": torch.arange(N * D1).view(N, D1) - 8.0},
    ],
    ids=[
        "zero queries",
        "zero keys",
        "zero values",
        "zero targets",
        "equal tokens",
        "equal values",
        "one query",
        "one key",
        "all of size one",
        "duplicate keys",
        "rank two queries",
    ],
)
@pytest.mark.parametrize("regularizer", [None, nt.Ridge(0.1, 0.1)], ids=["plain", "ridge"])
def test_degenerate_data(change, regularizer):
    made = problem({k: v.double() for k, v in change.items()}, regularizer=regularizer)
    solution = nt.solve(made, n_init=2, max_iter=60)
    require_finite("weights", solution.X, solution.Y)
    require_finite("loss", solution.loss, solution.relative_loss, *solution.start_losses)
    for record in solution.history:
        require_finite("record", record.loss, record.gradient, record.decrement, record.damping)
    start = nt.loss(made, solution.start.X, solution.start.Y)
    energy = float(made.target_energy())
    # A loss of exactly 0 may become the square of a rounding error.
    assert solution.loss <= start * (1 + 1e-12) + 1e-28 * energy
    assert nt.loss(made, solution.X, solution.Y) == solution.loss
    require_finite("gradient", *nt.gradient(made, solution.X, solution.Y))
    assert "nan" not in solution.summary()


@pytest.mark.parametrize("factor", [1e-150, 1e-30, 1e30, 1e100])
@pytest.mark.parametrize("name", ["A1", "A2", "A3", "B"])
def test_units_of_the_data(name, factor):
    """Huge and tiny units of one array: the same fit, or at least no NaN."""
    made = problem({name: arrays()[name] * factor})
    solution = nt.solve(made, max_iter=30)
    require_finite("weights", solution.X, solution.Y)
    require_finite("relative loss", solution.relative_loss)
    assert solution.relative_loss <= 1.0
