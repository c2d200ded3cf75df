"""Which key every query of a layer selects, by how much, and the attention SVM behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import one_hot

from newtention.attention import attention_logits
from newtention.chunks import Chunk, map_rows
from newtention.derivatives.linearised import forward_elements
from newtention.display import Displayed, Table
from newtention.inputs import as_batch_masks, as_tensors, require_shape, shape_text
from newtention.layers import AttentionMap, Bilinear
from newtention.masks import Mask
from newtention.notation import Array, ArrayLike
from newtention.problem import AttentionProblem
from newtention.svm import AttentionSVM
from newtention.svm.sequences import as_selection
from newtention.svm.solve import svm_of
from newtention.weights import Point, Weights, as_weights

_ONE_MAP = (
    "needs one head given by its X, since heads act through the sum of their outputs, which does "
    "not say what each of them selects; found "
)


@dataclass(frozen=True, eq=False)
class SelectedTokens(Displayed):
    """The key of the largest logit for every query.

    Shapes are those of `newtention.predict` without its last axis: (n,), (s, n) or (N,), after a
    head axis if the weights have one.

    keys: the key, among those that the query may attend to; the first of several equal ones; -1 in
        padded rows.
    weights: its attention weight.
    margins: its lead over the runner-up, a difference of logits; infinite where it is the only key,
        0 where the lead is no larger than the rounding of the logits.
    relative_margins: margins / ||X||_F, of the head's own X (0 for 0 / 0); None for a factored
        layer, which has none.
    X: the query/key map, None for a factored layer.
    """

    keys: Array
    weights: Array
    margins: Array
    relative_margins: Array | None
    X: Array | None
    _problem: AttentionProblem = field(repr=False)

    @property
    def tied(self) -> Array:
        """Queries whose selection is arbitrary: two keys have the largest logit, to rounding."""
        return (self.margins == 0) & (self.keys >= 0)

    def svm(self) -> AttentionSVM:
        """The attention SVM of this selection: the shortest X that makes it with margin 1.

        One X for all sequences.  The scale is counted and forbidden pairs are left out; a finite
        bias is not seen, since it loses all influence as X grows.  Tarzanagh et al. (arXiv
        2308.16898) call the direction of its X locally optimal if each selected key scores higher
        than the keys of its support pairs; scores belong to their loss, and are not looked at here.
        See docs/regularisation-path.md.

        Raises:
            ValueError: several heads, or a factored layer.
        """
        return self._svm

    @property
    def angle(self) -> float | None:
        """Degrees between X and the solution of `svm`; None if that has none, or 0, or X is 0."""
        return None if self.X is None else angle_between(self.X, self.svm().X)

    def _facts(self) -> dict[str, str]:
        keys, weights, margins = map(torch.as_tensor, (self.keys, self.weights, self.margins))
        real = keys >= 0
        return {
            "Selections": f"{int(real.sum())}, arranged {shape_text(keys.shape)}",
            "Different keys": str(len(keys[real].unique())),
            "Smallest margin": f"{float(margins[real].min()):.4g}",
            "Smallest weight": f"{float(weights[real].min()):.4g}",
            "Tied": str(int(torch.as_tensor(self.tied).sum())),
        }

    def _table(self) -> Table:
        return Table("SelectedTokens", [*self._facts().items()])

    def __repr__(self) -> str:
        """One line."""
        facts = self._facts()
        return (
            f"SelectedTokens({facts['Selections']}; {facts['Different keys']} different keys, "
            f"smallest margin {facts['Smallest margin']}, {facts['Tied']} tied)"
        )

    @cached_property
    def _svm(self) -> AttentionSVM:
        if self.X is None:
            raise ValueError(f"svm {_ONE_MAP}a factored layer.")
        if self.X.ndim == 3 and len(self.X) > 1:
            raise ValueError(f"svm {_ONE_MAP}{len(self.X)} heads.")
        return svm_of(self._problem, self.keys[0] if self.X.ndim == 3 else self.keys)


def selected_tokens(
    problem: AttentionProblem, X: Point, Y: ArrayLike | None = None
) -> SelectedTokens:
    """Per query the key with the largest logit among the allowed ones.

    Args:
        problem: one problem.
        X: query/key map (d1, d2) or (h, d1, d2), a layer, or a Solution.
        Y: not used; accepted so that ``selected_tokens(problem, *weights)`` works.

    Returns:
        Keys, attention weights and margins, one of each per query and head.

    Raises:
        ValueError: weights that do not fit, NaN or infinity, logits that overflow, a stack.
    """
    if problem.parts:
        raise ValueError(
            "selected_tokens takes one problem; use it on each of the stack's `parts`."
        )
    w = as_weights(problem, X, Y, needs_Y=False)
    chunks = problem.chunks
    elements = forward_elements(problem, w.layer)
    found = [map_rows(chunk, lambda tile: _selection(tile, w), elements) for chunk in chunks]
    rows = problem.rows_from_chunks(found)
    if bool(rows.isnan().any()):
        raise ValueError("The logits are not finite at these weights: they overflow.")
    keys, weights, margins = rows.unflatten(-1, (3, -1)).movedim((-2, -1), (0, 1))
    if w.one_head:
        keys, weights, margins = keys[0], weights[0], margins[0]
    map_, relative = _query_key_map(w), None
    if map_ is not None:
        size = torch.linalg.vector_norm(map_, dim=(-2, -1))
        size = size.reshape(-1, *[1] * (margins.ndim - 1)) if map_.ndim == 3 else size
        relative = torch.where(margins == 0, 0.0, margins / size)
    return SelectedTokens(
        problem.present(keys.to(torch.int64) - 1),
        problem.present(weights),
        problem.present(margins),
        None if relative is None else problem.present(relative),
        None if map_ is None else problem.present(map_),
        problem,
    )


def selection_problem(
    A1: ArrayLike,
    A2: ArrayLike,
    selected: ArrayLike,
    mask: ArrayLike | str | None = None,
    *,
    scale: float = 1.0,
) -> AttentionProblem:
    """The problem of attention maps whose rows are one-hot: query j is to attend to selected[j].

    Args:
        A1: (n, d1) query tokens.
        A2: (m, d2) key tokens.
        selected: (n,) integers.
        mask: (n, m) booleans, True where attention is allowed, or "causal", or None.
        scale: multiplies the logits.

    Returns:
        A problem of maps B (n, m), one entry of 1 in each row.

    Raises:
        ValueError, TypeError: as for `AttentionProblem.from_maps`; also a selected key that does
            not exist or is not allowed.
    """
    tensors, numpy = as_tensors({"A1": A1, "A2": A2})
    like = tensors["A1"]
    for name, t in tensors.items():
        require_shape(name, t, (None, None), "tokens x width")
    n, m = (len(t) for t in tensors.values())
    explicit, causal = as_batch_masks(mask, (), n, m, like.device)
    rule = Mask(causal=causal, explicit=None if explicit is None else explicit[None])
    chosen = as_selection(selected, n, m, rule)
    maps = one_hot(chosen, m).to(like)
    arrays = [t.cpu().numpy() if numpy else t for t in (*tensors.values(), maps)]
    return AttentionProblem.from_maps(*arrays, mask=mask, scale=scale)


def angle_between(U: ArrayLike, V: ArrayLike | None) -> float | None:
    """Degrees between two matrices, accurate for small angles too; None if one is 0 or missing."""
    if V is None:
        return None
    u, v = (torch.as_tensor(t).detach().cpu().double().reshape(-1) for t in (U, V))
    a, b = float(u.norm()), float(v.norm())
    if a == 0 or b == 0:
        return None
    u, v = u / a, v / b
    return math.degrees(2.0 * math.atan2(float((u - v).norm()), float((u + v).norm())))


def _selection(tile: Chunk, w: Weights) -> Float[Tensor, "1 s n k"]:
    """Key + 1, weight and margin of every query, head by head within each."""
    heads = w.layer.qkv(tile, w.theta)
    assert heads.k is not None
    logits = attention_logits(heads.q, heads.k, tile.bias, tile.allowed)
    top, keys = logits.max(-1)
    others = logits.scatter(-1, keys[..., None], -torch.inf).amax(-1)
    weight = (top - logits.logsumexp(-1)).exp()
    margin = torch.where(others == -torch.inf, torch.inf, top - others)
    longest = torch.linalg.vector_norm(heads.k, dim=-1).amax(-1, keepdim=True)
    terms = torch.linalg.vector_norm(heads.q, dim=-1) * longest + top.abs()
    margin = torch.where(margin <= 4 * torch.finfo(margin.dtype).eps * terms, 0.0, margin)
    margin = torch.where(top.isfinite(), margin, torch.nan)  # for the caller to refuse
    return torch.stack([(keys + 1).to(weight), weight, margin], 2).flatten(2, 3).mT


def _query_key_map(w: Weights) -> Float[Tensor, "*h d1 d2"] | None:
    """X of the weights, without a head axis if the user gave none; None for a factored layer."""
    if isinstance(w.layer, AttentionMap):
        return w.layer.unpack(w.theta)[0, 0]
    if isinstance(w.layer, Bilinear):
        X = w.layer.unpack(w.theta)[0][0]
        return X[0] if w.one_head else X
    return None
