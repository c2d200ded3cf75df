"""Smaller layers from a given one: narrower heads, fewer heads.

Both are starts for a fit.  What they minimise is a mean over the query rows, with the problem's
query weights; regularisers play no part.

*Narrower queries and keys.*  Replace q by q A and k by k B, with A, B (e, r).  The attention
weights see a change D of the logits only through its variance under each row of P: the second-order
term of the Kullback-Leibler divergence is 1/2 Var_P(D), whatever is constant along the keys.  With
the second moment Q of the queries and the mean K over rows of the keys' covariance under P, the
mean variance of q (I - A B^T) k^T is about tr((I - A B^T)^T Q (I - A B^T) K).  Its minimiser
(`balanced`) is the truncated SVD of W_Q W_K^T in the metric of the activations, biases included,
without a matrix of the tokens' width.  Query heads that share keys share A: their moments add up.

*Rotary layers* keep whole frequency pairs: no other product turns as they do.  The logits are a sum
over pairs, so the best scaled pairs are least squares in the same variance (`eliminate`).

*Narrower values.*  With the new attention weights, values v C and any W_O: reduced-rank regression
of the layer's own outputs on the attended values (`block_reduced_rank`), then W_O and b_O of all
heads together.

*Fewer heads.*  Backward elimination in the least squares of the targets on all heads' outputs; then
W_O and b_O of the heads that stay.

Measured by relative loss.  MiniLM layer 3 on its 64 sentences, ranks 16: keys in the covariance
under P rather than of all allowed keys 0.0077 against 0.0090 (values at full width), attended
rather than input moments of the values 0.024 against 0.026 (keys at full width), W_O solved for
rather than truncated 0.032 against 0.062.  SmolLM2 layer 14, 16 of 32 pairs: scaled 0.0096,
unscaled 0.0120, by the energy under all allowed keys 0.0135.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.chunks import Chunk, reduce
from newtention.derivatives.linearised import forward_elements
from newtention.layers import Factored, FactoredAttention, Rotary, evaluate
from newtention.linsolve.pseudo_inverse import gram_inverse
from newtention.linsolve.reduction import LinearFit, balanced, block_reduced_rank, eliminate
from newtention.memory import require_memory
from newtention.problem import AttentionProblem
from newtention.weights import Weights, as_weights

SWEEPS = 4
"""Passes over the heads when values are narrowed.  MiniLM layer 3, ranks 16, 10,392 tokens, without
made-up rows: held out 0.1085 after one, 0.1067, 0.1058 after four, 0.1052 after eight."""
PRIOR_ROWS = 1.0
"""Made-up query rows for each of the h f rows of W_O: every head reads a token of white noise, of
the size that gives the observed variance, and the given W_O answers.  Without them W_O fits the few
rows of a small problem and nothing else.  Relative loss held out with 0 and 1 rows: MiniLM layer 3,
ranks 16, 783 tokens 0.250, 0.163 and 10,392 tokens 0.1058, 0.1042; SmolLM2 layer 14, ranks 32, 512
tokens 1.29, 0.213, three heads of nine 1.30, 0.30.  Half and twice as many do about as well."""
_MATRICES = 6
"""Matrices of the size of the Gram matrix alive at once."""


def truncate(
    problem: AttentionProblem, layer: FactoredAttention, ranks: int | tuple[int, int]
) -> FactoredAttention:
    """The layer with narrower heads that best reproduces its own outputs on the problem's tokens.

    Args:
        problem: the tokens, masks and query weights; its targets play no part.
        layer: the layer to narrow.
        ranks: the new widths (e of queries and keys, f of values), or one number for both.

    Returns:
        A layer with the same heads, biases and scale.  A width that stays leaves its weights as
        they are; W_O and b_O are solved for in any case, drawn to the given ones as far as the
        rows are few (`PRIOR_ROWS`).

    Raises:
        ValueError: a width below 1 or above the layer's, an odd e with rotary positions, a layer
            that does not fit the problem.
        TypeError: another kind of layer, ranks that are no integers.
        MemoryError: the Gram matrix of all heads' outputs, (h f) x (h f), does not fit.

    Example:
        >>> layer = nt.FactoredAttention.from_torch(torch.nn.MultiheadAttention(8, 2))
        >>> x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
        >>> nt.truncate(nt.AttentionProblem(x, x, x, x), layer, ranks=2)
        FactoredAttention(2 heads; d1 8, d2 8, d3 8, p 8, e 2, f 2; scale 0.5)
    """
    w, shape = _checked(problem, layer)
    e, f = _checked_ranks(ranks, shape)
    narrow, rotary = layer, shape.rotary
    if e < shape.e:
        narrow = _narrow_logits(w, layer, e) if rotary is None else _keep_pairs(w, layer, rotary, e)
    W = _double(layer, "W_O", problem.like).flatten(0, 1)
    fit = _output_fit(problem, narrow, w)
    if f < shape.f:
        C, W = block_reduced_rank(fit.gram, fit.cross, W, shape.kv_heads, shape.f, f, SWEEPS)
        narrow = _rebuilt(narrow, {"W_O": W.view(shape.heads, f, -1)} | _mapped(narrow, "V", C))
        groups = C.repeat_interleave(shape.heads // shape.kv_heads, 0)
        fit = fit.mapped(torch.block_diag(*groups))
    return _with_output(narrow, fit, fit.solve(W))


def keep_heads(
    problem: AttentionProblem, layer: FactoredAttention, heads: int
) -> FactoredAttention:
    """The layer with so many of its heads, chosen and refitted by the loss on the problem.

    Where query heads share keys and values, either whole groups go, or equally many query heads of
    every group, so that the result is a regular layer; where both are possible, what fits better.

    Args:
        problem: tokens, targets, masks and query weights.
        layer: the layer to prune.
        heads: query heads of the result.

    Returns:
        A layer with W_O and b_O solved for, as by `truncate`; the heads that stay are as they were
        otherwise.

    Raises:
        ValueError: heads out of range or not expressible, a layer that does not fit the problem, a
            problem whose bias is per head.
        TypeError: another kind of layer, heads that is no integer.
        MemoryError: the Gram matrix of all heads' outputs, (h f) x (h f), does not fit.
    """
    shape = _checked(problem, layer)[1]
    h, g, f = shape.heads, shape.kv_heads, shape.f
    group = h // g
    heads = _integer("heads", heads)
    if not 1 <= heads <= h:
        raise ValueError(f"heads must lie between 1 and the layer's {h}; found {heads}.")
    if heads % group and heads % g:
        raise ValueError(
            f"heads must be a multiple of {group}, for whole groups, or of {g}, for equally many "
            f"in every group; found {heads}."
        )
    if problem.fixed_heads not in (None, heads):
        raise ValueError(
            f"The problem's bias or Proximity reference is for {problem.fixed_heads} head(s) and "
            f"would not fit {heads}."
        )
    W = _double(layer, "W_O", problem.like).flatten(0, 1)
    fit = _output_fit(problem, layer)
    gram, cross = fit.gram[None], fit.cross[None]
    choices = []
    if heads % group == 0:
        groups = eliminate(gram, cross, group * f, 1, heads // group)
        choices.append([i for k in groups for i in range(k * group, (k + 1) * group)])
    if heads % g == 0 and group > 1:
        choices.append(eliminate(gram, cross, f, g, heads // g))
    layers = []
    for kept in choices:
        select = torch.eye(len(W)).to(W).unflatten(1, (h, f))[:, kept].flatten(1)
        of_kept = fit.mapped(select)
        solved = of_kept.solve(select.mT @ W)
        smaller = _with_output(_take_heads(layer, kept), of_kept, solved)
        layers.append((of_kept.misfit(solved), smaller))
    return min(layers, key=lambda choice: choice[0])[1]


def _narrow_logits(w: Weights, layer: FactoredAttention, e: int) -> FactoredAttention:
    """Queries and keys of width e in a layer without rotary positions."""

    def tile_sums(tile: Chunk) -> tuple[Tensor, Tensor]:
        at = evaluate(tile, w.layer, w.theta)
        assert at.heads.k is not None
        q, k, P = at.heads.q.double(), at.heads.k.double(), at.P.double()
        weight = tile.weight[:, :, None, :, None].double()
        mean = P @ k
        reach = (P * weight).sum(3)[..., None]
        covariance = k.mT @ (reach * k) - mean.mT @ (weight * mean)
        return (q.mT @ (weight * q)).sum(1), covariance.sum(1)

    of_q, of_k = (t.unflatten(0, (len(layer.W_K), -1)).sum(1) for t in _sums(w, tile_sums))
    A, B = balanced(of_q, of_k, e)
    A = A.repeat_interleave(len(layer.W_Q) // len(layer.W_K), 0)
    return _rebuilt(layer, _mapped(layer, "Q", A) | _mapped(layer, "K", B))


def _keep_pairs(w: Weights, layer: FactoredAttention, rotary: Rotary, e: int) -> FactoredAttention:
    """The e/2 best frequency pairs of every key/value head, rescaled in the queries."""
    h, g, width = len(layer.W_Q), len(layer.W_K), layer.W_Q.shape[-1]

    def pairs_of(t: Tensor | None) -> Float[Tensor, "o s h pairs n 2"]:
        assert t is not None
        return torch.stack(rotary.split(t.double()), -1).transpose(3, 4)

    def tile_sums(tile: Chunk) -> tuple[Tensor]:
        at = evaluate(tile, w.layer, w.theta)
        q, k, P = pairs_of(at.heads.q), pairs_of(at.heads.k), at.P.double()
        root = (P * tile.weight[:, :, None, :, None]).sqrt()
        grams = []
        for i in range(h):
            S = q[:, :, i] @ k[:, :, i].mT  # (o, s, pairs, n, m): every pair's part of the logits
            S = S - (S * P[:, :, i, None]).sum(-1, keepdim=True)
            S = (S * root[:, :, i, None]).transpose(1, 2).flatten(2)
            grams.append(S @ S.mT)
        return (torch.stack(grams, 1),)

    keys = max(chunk.A2.shape[2] for chunk in w.problem.chunks)
    (gram,) = _sums(w, tile_sums, keys * width // 2)
    cross = gram.sum(-1, keepdim=True)  # all pairs together are the logits
    features = rotary.split(torch.eye(width, dtype=gram.dtype, device=gram.device))
    kept, A, B = [], [], []
    for G, c in zip(gram.split(h // g), cross.split(h // g), strict=True):
        pairs = eliminate(G, c, 1, 1, e // 2)
        G, c = G[:, pairs][:, :, pairs], c[:, pairs]
        factor = 1 + gram_inverse(G).solve(c - G.sum(-1, keepdim=True))[:, None, :, 0]
        columns = [t[:, pairs] for t in features]
        kept.append(pairs)
        A.append(rotary.join(*(t * factor for t in columns)))
        B.append(rotary.join(*columns))
    parts = _mapped(layer, "Q", torch.cat(A)) | _mapped(layer, "K", torch.stack(B))
    return _rebuilt(layer, parts, rotary=rotary.keep(kept, width))


def _sums(
    w: Weights, tile_sums: Callable[[Chunk], tuple[Tensor, ...]], elements: int = 0
) -> list[Tensor]:
    """Sums over all tiles, of which one intermediate has so many elements per query row."""
    elements = max(elements, forward_elements(w.problem, w.layer))
    sums = [t[0] for t in reduce(w.problem.chunks, 1, tile_sums, elements)]
    if not all(bool(torch.isfinite(t).all()) for t in sums):
        raise ValueError("layer must have finite outputs on the problem; they overflow.")
    return sums


def _output_fit(
    problem: AttentionProblem, layer: FactoredAttention, reference: Weights | None = None
) -> LinearFit:
    """The targets, or a reference layer's outputs in their place, on all heads' outputs."""
    w, shape = as_weights(problem, layer), layer.parametrisation
    k = shape.heads * shape.f
    require_memory(
        f"The Gram matrix of {k} columns of head outputs",
        _MATRICES * 8 * k * k,
        problem.like.device,
        "a layer with fewer or narrower heads would fit.",
    )

    def tile_sums(tile: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        at = evaluate(tile, shape, w.theta)
        F = tile.B
        if reference is not None:
            O = evaluate(tile, reference.layer, reference.theta).O
            F = reference.layer.mix(tile, reference.theta, O)
        O = at.O.transpose(2, 3).flatten(3)
        O = torch.cat([O, torch.ones_like(O[..., :1])], -1).double().flatten(1, 2)
        weight = tile.weight.double().flatten(1)
        weighted = (O * weight[..., None]).mT
        return weighted @ O, weighted @ F.double().flatten(1, 2), weight.square().sum(1)

    gram, cross, squares = _sums(w, tile_sums)
    total = gram[-1, -1].clone()
    fit = LinearFit.of_moments(gram / total, cross / total, constant=shape.out_bias)
    rows = float(total.square() / squares)  # Kish's effective number
    variance = (gram.diagonal() / total - (gram[-1] / total).square())[:-1].clamp(min=0)
    W_V = _double(layer, "W_V", gram).repeat_interleave(shape.heads // shape.kv_heads, 0)
    size = variance.view(shape.heads, -1).sum(1) / W_V.square().sum((1, 2)).clamp(min=1e-300)
    noise = torch.block_diag(*(size[:, None, None] * W_V.mT @ W_V))
    share = PRIOR_ROWS * k / (PRIOR_ROWS * k + rows)
    return fit.mixed(share, noise, _double(layer, "W_O", gram).flatten(0, 1))


def _checked(problem: AttentionProblem, layer: FactoredAttention) -> tuple[Weights, Factored]:
    if not isinstance(problem, AttentionProblem):
        raise TypeError(f"problem must be an AttentionProblem; found {type(problem).__name__}.")
    if not isinstance(layer, FactoredAttention):
        raise TypeError(f"layer must be a FactoredAttention; found {type(layer).__name__}.")
    return as_weights(problem, layer), layer.parametrisation


def _checked_ranks(ranks: int | tuple[int, int], shape: Factored) -> tuple[int, int]:
    pair = tuple(ranks) if isinstance(ranks, tuple | list) else (ranks, ranks)
    if len(pair) != 2:
        raise ValueError(f"ranks must be one number or a pair (e, f); found {len(pair)} numbers.")
    e, f = (_integer("ranks", r) for r in pair)
    for value, limit, what in ((e, shape.e, "queries and keys"), (f, shape.f, "values")):
        if not 1 <= value <= limit:
            raise ValueError(
                f"ranks must lie between 1 and the layer's width of {what}, {limit}; found {value}."
            )
    if shape.rotary is not None and e % 2:
        raise ValueError(
            f"ranks must be even for the queries and keys of a rotary layer; found {e}."
        )
    return e, f


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be whole numbers; found {value!r}.")
    return operator.index(value)  # pyrefly: ignore


def _double(layer: FactoredAttention, name: str, like: Tensor) -> Tensor:
    """One of the layer's weights in float64, on the device of `like`."""
    return torch.as_tensor(getattr(layer, name)).to(like.device, torch.float64)


def _mapped(layer: FactoredAttention, name: str, maps: Float[Tensor, "b e r"]) -> dict[str, Tensor]:
    """W and b of the queries, keys or values times a map per head."""
    parts = {"W_" + name: _double(layer, "W_" + name, maps) @ maps}
    if getattr(layer, "b_" + name) is not None:
        parts["b_" + name] = (_double(layer, "b_" + name, maps)[:, None] @ maps)[:, 0]
    return parts


def _take_heads(layer: FactoredAttention, heads: Sequence[int]) -> FactoredAttention:
    """These query heads and the key/value heads they use, equally many query heads each."""
    group = len(layer.W_Q) // len(layer.W_K)
    groups = sorted({h // group for h in heads})
    parts = {}
    for block in layer.parametrisation.blocks:
        if block.name != "b_O":
            chosen = groups if block.name[2] in "KV" else list(heads)
            parts[block.name] = torch.as_tensor(getattr(layer, block.name))[chosen]
    rotary = None if layer.rotary is None else layer.rotary.take_heads(groups)
    return _rebuilt(layer, parts, rotary=rotary)


def _with_output(
    layer: FactoredAttention, fit: LinearFit, W: Float[Tensor, "k p"]
) -> FactoredAttention:
    """With W as W_O, and b_O to match."""
    parts = {"W_O": W.view(len(layer.W_Q), -1, W.shape[1])}
    if layer.b_O is not None:
        parts["b_O"] = fit.constant(W)
    return _rebuilt(layer, parts)


def _rebuilt(
    layer: FactoredAttention, parts: dict[str, Tensor], rotary: Rotary | None = None
) -> FactoredAttention:
    """The layer with other weights, in its own dtype, device and kind of array."""
    like = layer.W_Q
    if isinstance(like, Tensor):
        cast: dict[str, Any] = {n: t.to(like) for n, t in parts.items()}
    else:
        cast = {n: t.cpu().numpy().astype(like.dtype) for n, t in parts.items()}
    return replace(layer, **cast, rotary=layer.rotary if rotary is None else rotary)
