"""The case table: problems of every shape and option, with the plain sequences the oracle takes.

Data are float32 numbers held in float64, so that the float32 problem has exactly the oracle's data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

import newtention as nt
from newtention import reference

WIDTHS = (3, 4, 2, 5)
"""d1, d2, d3, p: all different, so that no transposition goes unnoticed."""

SEED = 20230914


def randn(generator, *shape):
    return torch.randn(shape, generator=generator, dtype=torch.float32).double()


@dataclass(frozen=True, eq=False)
class Case:
    """One problem, in two forms, and a point.

    sequences: dicts as `reference.data_loss` takes them; "w" holds token weights.
    build: dtype -> the library's problem.
    regularizer: the library's, for `build`; penalty: the oracle's, (sequences, X, Y) -> number.
    """

    name: str
    sequences: list[dict[str, Tensor]]
    X: Tensor
    Y: Tensor
    scale: float
    penalty: Callable[[list, Tensor, Tensor], Tensor]
    build: Callable[[torch.dtype], nt.AttentionProblem]

    def problem(self, dtype=torch.float64):
        return self.build(dtype)

    def point(self, dtype=torch.float64):
        return self.X.to(dtype), self.Y.to(dtype)

    def oracle_loss(self, X, Y):
        return reference.data_loss(self.sequences, X, Y, self.scale) + self.penalty(
            self.sequences, X, Y
        )

    def oracle_outputs(self, X, Y):
        """Outputs of all sequences, rows concatenated."""
        return torch.cat(
            [
                reference.forward(
                    s["A1"], s["A2"], s["A3"], X, Y, self.scale, s.get("bias"), s.get("allowed")
                )
                for s in self.sequences
            ]
        )

    @cached_property
    def oracle(self):
        """(loss, gradient, Hessian) at the point."""
        return reference.derivatives(self.oracle_loss, self.X, self.Y)

    @cached_property
    def oracle_gauss_newton(self):
        """J^T diag(q) J plus the regulariser's Hessian, J the Jacobian of the outputs."""
        nx = self.X.numel()

        def split(theta):
            return theta[:nx].reshape(self.X.shape), theta[nx:].reshape(self.Y.shape)

        theta = reference.flat(self.X, self.Y)
        J = torch.func.jacrev(lambda t: self.oracle_outputs(*split(t)).reshape(-1))(theta)
        q = torch.cat([s.get("weight", torch.ones(len(s["B"])).double()) for s in self.sequences])
        rows = q.repeat_interleave(self.sequences[0]["B"].shape[1])
        penalty = torch.func.hessian(lambda t: self.penalty(self.sequences, *split(t)) + 0 * t[0])
        return J.T @ (rows[:, None] * J) + penalty(theta)


def no_penalty(sequences, X, Y):
    return 0.0 * X.sum()


def make(
    name,
    sizes,
    layout,
    *,
    heads=None,
    widths=WIDTHS,
    shared=False,
    mask=None,
    bias=None,
    scale=1.0,
    weights=False,
    regularizer=None,
    tokens="gaussian",
    size=0.5,
    seed=SEED,
):
    """Draw a case.

    sizes: (n, m) of each sequence; layout: "single", "padded" or "ragged".
    heads: None for 2-D weights.  shared: A1, A2 and A3 are one array.
    mask: None, "causal", "boolean" (one array per sequence) or "common" (one 2-D array for all).
    bias: None, "common" (2-D for all), "one" (per sequence), "heads" (per sequence and head), or
        any of them + " forbidding" for entries of minus infinity.
    weights: query weights, some of them zero.
    regularizer: None, "ridge", "tokens" or "proximity".
    tokens: "gaussian", "deficient" (rank 1), "duplicate".
    size: standard deviation of X; numbers far above 1 saturate the softmax.
    """
    g = torch.Generator().manual_seed(seed)
    d1, d2, d3, p = widths
    h = heads or 1
    count = len(sizes)
    longest_n, longest_m = (max(s[k] for s in sizes) for k in (0, 1))

    def rows(n, d):
        if tokens == "deficient":
            # Small integers keep the rank exact.
            return torch.randint(-3, 4, (n, 1), generator=g) * torch.arange(1.0, d + 1).double()
        x = randn(g, n, d)
        return x[torch.arange(n) // 2 * 2] if tokens == "duplicate" else x

    def booleans(n, m):
        allowed = torch.rand(n, m, generator=g) < 0.6
        allowed[:, 0] = True
        return allowed

    sequences, given_masks, given_biases = [], [], []
    common_mask = booleans(longest_n, longest_m)
    kind, _, forbidding = (bias or "").partition(" ")
    common_bias = randn(g, longest_n, longest_m)
    forbidden = ~booleans(longest_n, longest_m)
    for n, m in sizes:
        A2 = rows(m, d2)
        s = {"A2": A2, "A1": A2 if shared else rows(n, d1), "A3": A2 if shared else rows(m, d3)}
        s["B"] = randn(g, n, p)
        allowed = torch.ones(n, m, dtype=torch.bool)
        if mask == "causal":
            allowed = allowed.tril()
        elif mask in ("boolean", "common"):
            own = common_mask[:n, :m] if mask == "common" else booleans(n, m)
            given_masks.append(own)
            allowed = own
        if kind:
            lead = (h,) if kind == "heads" else ()
            b = common_bias[:n, :m] if kind == "common" else randn(g, *lead, n, m)
            b = b.masked_fill(forbidden[:n, :m], -torch.inf) if forbidding else b.clone()
            given_biases.append(b)
            s["bias"] = b.masked_fill(torch.isinf(b), 0.0)
            allowed = allowed & ~torch.isinf(b[0] if kind == "heads" else b)
        s["allowed"] = allowed
        if weights:
            s["weight"] = torch.randint(0, 4, (n,), generator=g).double() / 2
            s["weight"][0] = 1.5
        s["w"] = randn(g, m)
        sequences.append(s)
    lead = () if heads is None else (h,)
    X, Y = size * randn(g, *lead, d1, d2), randn(g, *lead, d3, p)
    X = X.float().double()
    X0, Y0 = randn(g, *lead, d1, d2), randn(g, *lead, d3, p)

    def pad(parts, *shape, fill=None):
        """Stack with garbage in the padding: nothing may depend on it."""
        out = 3.0 * randn(g, len(parts), *shape) if fill is None else fill(len(parts), *shape)
        for row, part in zip(out, parts, strict=True):
            row[tuple(slice(k) for k in part.shape)] = part
        return out

    def column(name):
        return [s[name] for s in sequences]

    def build(dtype):
        def to(t):
            return t.to(dtype)

        reg = {
            None: lambda: None,
            "ridge": lambda: nt.Ridge(x=0.3, y=0.7),
            "tokens": lambda: nt.TokenWeights(arranged_w()),
            "proximity": lambda: nt.Proximity((X0, Y0), strength=0.4),
        }[regularizer]()
        options = {"scale": scale, "regularizer": reg}
        if mask == "causal":
            options["mask"] = "causal"
        if layout == "padded":
            n, m = longest_n + 1, longest_m + 1
            args = {
                "A1": pad(column("A1"), n, d1),
                "A2": pad(column("A2"), m, d2),
                "A3": pad(column("A3"), m, d3),
                "B": pad(column("B"), n, p),
            }
            args = {k: to(v) for k, v in args.items()}
            if shared:
                args["A1"] = args["A3"] = args["A2"]
            options["lengths"] = [a for a, _ in sizes]
            options["key_lengths"] = [b for _, b in sizes]
            if weights:
                options["query_weights"] = to(pad(column("weight"), n, fill=torch.ones))
            if mask == "common":
                options["mask"] = pad([common_mask], n, m, fill=falses)[0]
            elif given_masks:
                options["mask"] = pad(given_masks, n, m, fill=falses)
            if kind == "common":
                whole = (
                    common_bias.masked_fill(forbidden, -torch.inf) if forbidding else common_bias
                )
                options["bias"] = to(pad([whole], n, m)[0])
            elif kind == "heads":
                options["bias"] = to(pad(given_biases, h, n, m))
            elif kind:
                options["bias"] = to(pad(given_biases, n, m))
            return nt.AttentionProblem(**args, **options)
        if weights:
            options["query_weights"] = to(torch.cat(column("weight")))
        if layout == "single":
            if given_masks:
                options["mask"] = given_masks[0]
            if given_biases:
                options["bias"] = to(given_biases[0])
            A1, A2, A3, B = (to(sequences[0][k]) for k in ("A1", "A2", "A3", "B"))
            if shared:
                A1 = A3 = A2
            return nt.AttentionProblem(A1, A2, A3, B, **options)
        if given_masks:
            options["mask"] = given_masks
        if given_biases:
            options["bias"] = [to(b) for b in given_biases]
        A1, A2, A3, B = (to(torch.cat(column(k))) for k in ("A1", "A2", "A3", "B"))
        ns, ms = (torch.tensor([0, *(s[k] for s in sizes)]).cumsum(0) for k in (0, 1))
        if shared:
            return nt.AttentionProblem.from_ragged(A2, B, offsets=ns, **options)
        return nt.AttentionProblem.from_ragged(
            A1, B, offsets=ns, keys=A2, values=A3, key_offsets=ms, **options
        )

    def arranged_w():
        if layout == "padded":
            return pad(column("w"), longest_m + 1)
        return torch.cat(column("w"))

    penalty = {
        None: no_penalty,
        "ridge": lambda _, X, Y: reference.ridge(X, Y, 0.3, 0.7),
        "tokens": reference.token_weights,
        "proximity": lambda seqs, X, Y: reference.proximity(seqs, X, Y, X0, Y0, 0.4),
    }[regularizer]
    assert layout != "single" or count == 1
    return Case(name, sequences, X, Y, scale, penalty, build)


def falses(*shape):
    return torch.zeros(shape, dtype=torch.bool)


ONE = [(7, 9)]
"""Keys outnumber queries, so a causal mask is rectangular."""
TALL = [(9, 5)]
SQUARE = [(8, 8)]
SEVERAL = [(5, 7), (2, 3), (6, 8), (6, 8), (1, 1)]
"""Lengths that need several buckets, one of them shared by two sequences."""
EQUAL = [(6, 6), (3, 3), (6, 6), (1, 1), (5, 5)]
SAME = (4, 4, 4, 3)

SATURATED_CASES = {"saturated", "saturated heads"}

CASES = [
    make("one sequence", ONE, "single"),
    make("more queries than keys", TALL, "single"),
    make("self-attention", SQUARE, "single", widths=SAME, shared=True),
    make("padded", SEVERAL, "padded"),
    make("padded self-attention", EQUAL, "padded", widths=SAME, shared=True),
    make("ragged", SEVERAL, "ragged"),
    make("ragged self-attention", EQUAL, "ragged", widths=SAME, shared=True),
    make("boolean mask", ONE, "single", mask="boolean"),
    make("boolean mask, padded", SEVERAL, "padded", mask="boolean"),
    make("one mask for all, padded", SEVERAL, "padded", mask="common"),
    make("boolean masks, ragged", SEVERAL, "ragged", mask="boolean"),
    make("causal, wide", ONE, "single", mask="causal"),
    make("causal, tall", TALL, "single", mask="causal"),
    make("causal, padded", SEVERAL, "padded", mask="causal"),
    make("causal self-attention, ragged", EQUAL, "ragged", widths=SAME, shared=True, mask="causal"),
    make("bias", ONE, "single", bias="one"),
    make("bias per head", ONE, "single", heads=2, bias="heads"),
    make("forbidding bias", ONE, "single", bias="one forbidding"),
    make("forbidding bias per head, causal", SEVERAL, "padded", heads=2, bias="heads forbidding",
         mask="causal"),
    make("forbidding bias and mask, ragged", SEVERAL, "ragged", bias="one forbidding",
         mask="boolean"),
    make("one bias for all, padded", SEVERAL, "padded", bias="common"),
    make("one forbidding bias for all, padded", SEVERAL, "padded", bias="common forbidding"),
    make("bias per sequence, padded", SEVERAL, "padded", bias="one"),
    make("bias per head, ragged", SEVERAL, "ragged", heads=3, bias="heads", scale=0.7),
    make("scale", ONE, "single", scale=0.37),
    make("scale, ragged, causal", SEVERAL, "ragged", scale=2.5, mask="causal"),
    make("query weights", ONE, "single", weights=True),
    make("query weights, padded", SEVERAL, "padded", weights=True, scale=0.5),
    make("query weights, ragged", SEVERAL, "ragged", weights=True, heads=2),
    make("one head, 3-D", ONE, "single", heads=1),
    make("two heads", ONE, "single", heads=2),
    make("three heads, padded", SEVERAL, "padded", heads=3, weights=True),
    make("two heads, self-attention", EQUAL, "ragged", heads=2, widths=SAME, shared=True),
    make("ridge", ONE, "single", regularizer="ridge"),
    make("ridge, heads", SEVERAL, "ragged", heads=2, regularizer="ridge"),
    make("token weights", ONE, "single", regularizer="tokens", scale=0.6, weights=True),
    make("token weights, masked", SEVERAL, "padded", regularizer="tokens", mask="causal"),
    make("token weights, heads", SEVERAL, "ragged", heads=2, regularizer="tokens"),
    make("proximity", ONE, "single", regularizer="proximity", weights=True),
    make("proximity, padded", SEVERAL, "padded", regularizer="proximity", scale=0.6),
    make("proximity, heads", SEVERAL, "ragged", heads=2, regularizer="proximity"),
    make("saturated", ONE, "single", size=150.0),
    make("saturated heads", SEVERAL, "ragged", heads=2, size=150.0),
    make("rank-deficient tokens", ONE, "single", tokens="deficient", size=0.02),
    make("duplicate tokens", SQUARE, "single", tokens="duplicate"),
    make("one key", [(6, 1)], "single"),
    make("one query", [(1, 6)], "single"),
    make("width one", ONE, "single", widths=(1, 1, 1, 1)),
]  # fmt: skip

BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES)

STACK = [
    make("stack 0", ONE, "single", seed=1),
    make("stack 1", SEVERAL, "ragged", regularizer="ridge", seed=2),
    make("stack 2", SEVERAL, "padded", regularizer="tokens", mask="causal", seed=3),
    make("stack 3", ONE, "single", regularizer="proximity", weights=True, seed=4),
    make("stack 4", ONE, "single", seed=5),
    make("stack 5", ONE, "single", mask="boolean", scale=0.3, seed=6),
    make("stack 6", TALL, "single", bias="one forbidding", seed=7),
]
"""Independent problems of equal widths that differ in everything else; 0 and 4 share a chunk."""


def without(case, *options):
    """The case with parts of its oracle removed: what a library that forgot them would compute."""
    sequences = [{k: v for k, v in s.items() if k not in options} for s in case.sequences]
    penalty = no_penalty if "penalty" in options else case.penalty
    scale = 1.0 if "scale" in options else case.scale
    return replace(case, sequences=sequences, penalty=penalty, scale=scale)
