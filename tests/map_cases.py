"""Fits of attention maps made from the case table, with plain sequences for the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

import newtention as nt
from newtention import reference
from tests.cases import BY_NAME, SEED, Case, randn

NAMES = [
    "one sequence",
    "more queries than keys",
    "self-attention",
    "padded",
    "padded self-attention",
    "ragged",
    "ragged self-attention",
    "boolean mask, padded",
    "boolean masks, ragged",
    "causal, tall",
    "causal, padded",
    "forbidding bias",
    "bias per sequence, padded",
    "forbidding bias and mask, ragged",
    "scale, ragged, causal",
    "query weights, padded",
    "ridge",
    "token weights, masked",
    "proximity, padded",
    "saturated",
    "rank-deficient tokens",
    "duplicate tokens",
    "one key",
    "one query",
    "width one",
]
NEAR = 0.4
"""Strength of Proximity."""


@dataclass(frozen=True, eq=False)
class MapCase:
    """A case's tokens, masks and biases with maps as targets; B is no map where noise is added."""

    case: Case
    targets: tuple[Tensor, ...]
    layout: str

    @property
    def name(self):
        return self.case.name

    @property
    def X(self):
        return self.case.X

    @property
    def kind(self):
        return next((k for k in ("ridge", "token weights", "proximity") if k in self.name), None)

    def problem(self, dtype=torch.float64):
        """The library's problem, garbage in what must not count."""
        sequences, g = self.case.sequences, torch.Generator().manual_seed(1)
        longest = [max(len(s[k]) for s in sequences) + (self.layout == "padded") for k in A12]

        def stacked(parts, shape, fill=None):
            out = 3 * randn(g, len(parts), *shape) if fill is None else fill(len(parts), *shape)
            for row, part in zip(out, parts, strict=True):
                row[tuple(map(slice, part.shape))] = part
            return out.to(dtype) if out.is_floating_point() else out

        def column(name):
            return [s[name] for s in sequences]

        options = {"scale": self.case.scale, "regularizer": self.regularizer(dtype)}
        weights = column("weight") if "weight" in sequences[0] else None
        biases = column("bias") if "bias" in sequences[0] else None
        masks = column("allowed")
        shared = all(s["A1"] is s["A2"] for s in sequences)
        if self.layout == "ragged":
            rows = [pad(t, (0, longest[1] - t.shape[1]), value=5.0) for t in self.targets]
            ns, ms = (torch.tensor([0, *map(len, column(k))]).cumsum(0) for k in A12)
            A1, A2, B = (torch.cat(t).to(dtype) for t in (column("A1"), column("A2"), rows))
            return nt.AttentionProblem.from_ragged_maps(
                A2 if shared else A1,
                B,
                offsets=ns,
                **({} if shared else {"keys": A2, "key_offsets": ms}),
                mask=masks,
                bias=None if biases is None else [b.to(dtype) for b in biases],
                query_weights=None if weights is None else torch.cat(weights).to(dtype),
                **options,
            )
        if self.layout == "single":
            A1, A2, B = (t[0].to(dtype) for t in (column("A1"), column("A2"), self.targets))
            return nt.AttentionProblem.from_maps(
                A2 if shared else A1,
                A2,
                B,
                mask=masks[0],
                bias=None if biases is None else biases[0].to(dtype),
                query_weights=None if weights is None else weights[0].to(dtype),
                **options,
            )
        n, m = longest
        d1, d2 = self.X.shape
        A2 = stacked(column("A2"), (m, d2))
        return nt.AttentionProblem.from_maps(
            A2 if shared else stacked(column("A1"), (n, d1)),
            A2,
            stacked(self.targets, (n, m)),
            lengths=[len(s["A1"]) for s in sequences],
            key_lengths=[len(s["A2"]) for s in sequences],
            mask=stacked(masks, (n, m), lambda *k: torch.zeros(k, dtype=torch.bool)),
            bias=None if biases is None else stacked(biases, (n, m)),
            query_weights=None if weights is None else stacked(weights, (n,), torch.ones),
            **options,
        )

    def regularizer(self, dtype):
        if self.kind == "ridge":
            return nt.Ridge(x=0.3)
        if self.kind == "proximity":
            return nt.Proximity(nt.MapAttention(self.centre.to(dtype)), NEAR)
        if self.kind == "token weights":
            longest = max(len(s["w"]) for s in self.case.sequences) + 1
            w = torch.ones(len(self.case.sequences), longest, dtype=dtype)
            for row, s in zip(w, self.case.sequences, strict=True):
                row[: len(s["w"])] = s["w"]
            return nt.TokenWeights(w)
        return None

    @property
    def centre(self):
        return 0.5 * self.X.flip(0)

    def maps(self, X):
        """The oracle's map of every sequence: its attention with the identity as values."""
        result = []
        for s in self.case.sequences:
            eye = torch.eye(len(s["A2"])).double()
            settings = (self.case.scale, s.get("bias"), s["allowed"])
            result.append(reference.forward(s["A1"], s["A2"], eye, X, eye, *settings))
        return result

    def loss(self, X):
        total = self.penalty(X)
        for s, P, B in zip(self.case.sequences, self.maps(X), self.targets, strict=True):
            q = s.get("weight", torch.ones(len(B)).double())
            total = total + 0.5 * (q * (P - B).square().sum(1)).sum()
        return total

    def penalty(self, X):
        nothing, sequences = X.new_zeros(1, 1), self.case.sequences
        without = [{**s, "A3": s["A3"][:, :1]} for s in sequences]
        if self.kind == "ridge":
            return reference.ridge(X, nothing, 0.3, 0.0)
        if self.kind == "token weights":
            return reference.token_weights(without, X, nothing)
        if self.kind == "proximity":
            return reference.proximity(without, X, nothing, self.centre, nothing, NEAR)
        return 0.0 * X.sum()

    @cached_property
    def oracle(self):
        """(loss, gradient, Hessian) at X."""
        gradient = torch.func.grad(self.loss)
        H = torch.func.jacfwd(gradient)(self.X)
        return self.loss(self.X), gradient(self.X), H.reshape(self.X.numel(), -1)

    @cached_property
    def oracle_gauss_newton(self):
        jacobians = torch.func.jacrev(self.maps)(self.X)
        total = torch.func.hessian(self.penalty)(self.X).reshape(self.X.numel(), -1)
        for s, J in zip(self.case.sequences, jacobians, strict=True):
            q = s.get("weight", torch.ones(len(J)).double())
            flat = J.reshape(*J.shape[:2], -1)
            total = total + torch.einsum("j,jka,jkb->ab", q, flat, flat)
        return total


A12 = ("A1", "A2")


def make_map(name, noise=0.1):
    """Targets of other weights, and noise on the allowed pairs that keeps the row sums."""
    case = BY_NAME[name]
    several = "ragged" if "ragged" in name else "padded"
    layout = "single" if len(case.sequences) == 1 else several
    draft = MapCase(case, (), layout)
    g = torch.Generator().manual_seed(SEED + 1)
    planted = case.X + 0.3 * randn(g, *case.X.shape)
    targets = []
    for s, P in zip(case.sequences, draft.maps(planted), strict=True):
        other = randn(g, *P.shape).masked_fill(~s["allowed"], -torch.inf).softmax(1)
        targets.append(((1 - noise) * P + noise * other).float().double())
    return MapCase(case, tuple(targets), layout)


MAP_CASES = [make_map(name) for name in NAMES]
