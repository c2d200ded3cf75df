"""Conformance checks against the autograd oracle.  Every check raises; none returns a verdict.

The function under test is an argument, so that tests can pass a wrong one and see the check raise.
"""

from __future__ import annotations

import math

import numpy as np
import torch

import newtention as nt
from newtention import reference
from newtention.derivatives.products import hessian_product
from newtention.layers import Bilinear
from newtention.weights import as_weights
from tests.cases import SATURATED_CASES
from tests.tolerances import EXACT, SATURATED


def tolerance(case, dtype):
    return (SATURATED if case.name in SATURATED_CASES else EXACT)[dtype]


def require_close(what, got, want, tol, scale=None):
    """Raise unless got and want agree, entry by entry, to tol times the largest entry of want.

    scale replaces that entry where want may vanish by cancellation.
    """
    got, want = (torch.as_tensor(np.asarray(t)).double() for t in (got, want))
    if got.shape != want.shape:
        raise AssertionError(f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    size = float(want.abs().max()) if scale is None else float(scale)
    error = float((got - want).abs().max()) if got.numel() else 0.0
    # Negated, so that NaN fails.
    if not error <= tol * size + math.ulp(0.0):
        worst = np.unravel_index(int((got - want).abs().argmax()), got.shape)
        raise AssertionError(
            f"{what}: error {error:.3e} against size {size:.3e} and tolerance {tol:.0e}; at "
            f"{tuple(int(i) for i in worst)} found {float(got[worst]):.9g}, "
            f"expected {float(want[worst]):.9g}"
        )


def require_finite(what, *arrays):
    for array in arrays:
        if not bool(torch.isfinite(torch.as_tensor(array)).all()):
            raise AssertionError(f"{what} is not finite: {array}")


def check_loss(case, dtype=torch.float64, loss=nt.loss):
    got = loss(case.problem(dtype), *case.point(dtype))
    if not isinstance(got, float):
        raise AssertionError(f"{case.name}: loss is {type(got).__name__}, expected float")
    require_close(f"{case.name}: loss", got, case.oracle[0], tolerance(case, dtype))


def check_gradient(case, dtype=torch.float64, gradient=nt.gradient):
    X, Y = case.point(dtype)
    GX, GY = gradient(case.problem(dtype), X, Y)
    if (GX.shape, GY.shape, GX.dtype) != (X.shape, Y.shape, dtype):
        raise AssertionError(f"{case.name}: gradient {GX.dtype} {GX.shape}, {GY.shape}")
    nx = X.numel()
    want = case.oracle[1]
    # The part of a block can vanish (one key), so the whole gradient gives the scale.
    scale = want.abs().max()
    tol = tolerance(case, dtype)
    require_close(f"{case.name}: gradient in X", GX.flatten(), want[:nx], tol, scale)
    require_close(f"{case.name}: gradient in Y", GY.flatten(), want[nx:], tol, scale)


def check_hessian(case, kind="full", dtype=torch.float64, hessian=nt.hessian):
    X, Y = case.point(dtype)
    H = hessian(case.problem(dtype), X, Y, kind=kind)
    want = case.oracle[2] if kind == "full" else case.oracle_gauss_newton
    nx, scale, tol = X.numel(), want.abs().max(), tolerance(case, dtype)
    for block, got, part in (
        ("xx", H.xx, want[:nx, :nx]),
        ("xy", H.xy, want[:nx, nx:]),
        ("yy", H.yy, want[nx:, nx:]),
        ("dense", H.to_dense(), want),
    ):
        require_close(f"{case.name}: {kind} Hessian {block}", got, part, tol, scale)


def product_xy(problem, X, Y, dX, dY, kind="full"):
    """`hessian_product` on weights and directions in blocks, one direction per problem."""
    layer = Bilinear(X.shape[1], *problem.widths)
    directions = layer.pack(dX, dY)[:, None]
    return layer.unpack(hessian_product(problem, layer, layer.pack(X, Y), directions, kind)[:, 0])


def check_product(case, kind="full", dtype=torch.float64, product=product_xy):
    """Products with every unit vector and one random direction, against the oracle's Hessian."""
    w = as_weights(case.problem(dtype), *case.point(dtype))
    want = case.oracle[2] if kind == "full" else case.oracle_gauss_newton
    g = torch.Generator().manual_seed(1)
    n = len(want)
    directions = torch.cat([torch.eye(n), torch.randn(1, n, generator=g)]).double()
    # As many copies of the problem as directions: one product of a batch.
    k = len(directions)
    copies = w.problem.take(torch.zeros(k, dtype=torch.int64))
    dX, dY = w.layer.unpack(directions.to(dtype))
    X, Y = (t.expand(k, -1, -1, -1) for t in w.bilinear[1:])
    got = w.layer.pack(*product(copies, X, Y, dX, dY, kind))
    scale = want.abs().max() * directions.abs().sum(1).max() / 3
    require_close(
        f"{case.name}: {kind} Hessian product",
        got,
        directions @ want,
        tolerance(case, dtype),
        scale,
    )


def check_predictions(case, dtype=torch.float64, predict=nt.predict):
    """Outputs of the real rows, in the layout of the targets; zeros in padded rows."""
    problem = case.problem(dtype)
    got = predict(problem, *case.point(dtype))
    if got.ndim == 3:
        lengths = [len(s["A1"]) for s in case.sequences]
        for i, n in enumerate(lengths):
            if bool(got[i, n:].any()):
                raise AssertionError(f"{case.name}: padded outputs of sequence {i} are not zero")
        got = torch.cat([got[i, :n] for i, n in enumerate(lengths)])
    want = case.oracle_outputs(case.X, case.Y)
    require_close(f"{case.name}: outputs", got, want, tolerance(case, dtype))


def check_attention_weights(case, dtype=torch.float64, weights=nt.attention_weights):
    """Against the oracle with the identity as values; forbidden pairs exactly zero."""
    problem = case.problem(dtype)
    X, Y = case.point(dtype)
    heads = case.X if case.X.ndim == 3 else case.X[None]
    for i, s in enumerate(case.sequences):
        got = weights(problem, X, Y, sequence=i)
        m = len(s["A2"])
        eye = torch.eye(m).double()
        bias = s.get("bias")
        want = []
        for h in range(len(heads)):
            b = bias[h] if bias is not None and bias.ndim == 3 else bias
            want.append(
                reference.forward(s["A1"], s["A2"], eye, heads[h], eye, case.scale, b, s["allowed"])
            )
        want = torch.stack(want) if case.X.ndim == 3 else want[0]
        require_close(f"{case.name}: attention weights {i}", got, want, tolerance(case, dtype))
        if bool(got[~s["allowed"].expand_as(got)].any()):
            raise AssertionError(f"{case.name}: a forbidden pair of sequence {i} has weight")


def check_scipy(case, to_scipy=nt.to_scipy):
    """Value, gradient, Hessian and products on the flat vector."""
    s = to_scipy(case.problem(), start=case.point())
    theta = reference.flat(case.X, case.Y).numpy()
    require_close(f"{case.name}: x0", s.x0, theta, 0.0)
    value, gradient, H = case.oracle
    tol = tolerance(case, torch.float64)
    direction = np.random.default_rng(0).standard_normal(len(theta))
    require_close(f"{case.name}: fun", s.fun(theta), value, tol)
    require_close(f"{case.name}: jac", s.jac(theta), gradient, tol)
    require_close(f"{case.name}: hess", s.hess(theta), H, tol)
    Hd = H.numpy() @ direction
    require_close(f"{case.name}: hessp", s.hessp(theta, direction), Hd, tol, H.abs().max() * 10)
    for array in (s.x0, s.jac(theta), s.hess(theta)):
        if array.dtype != np.float64:
            raise AssertionError(f"{case.name}: scipy gets {array.dtype}, expected float64")


def check_finite_differences(problem, X, Y, directions=5):
    report = nt.check_derivatives(problem, X, Y, directions=directions)
    if not report.passed:
        raise AssertionError(f"finite differences: {report}")
