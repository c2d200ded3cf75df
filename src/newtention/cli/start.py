"""The layer that a fit begins from: read from a file, made smaller, and put on record."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from newtention.compression import keep_heads, truncate
from newtention.io import load_layer, open_arrays
from newtention.layers import (
    AttentionLayer,
    AttentionMap,
    Bilinear,
    BilinearAttention,
    Factored,
    FactoredAttention,
    Rotary,
)
from newtention.layers.rotary import Pairing
from newtention.problem import AttentionProblem
from newtention.regularizers import Proximity
from newtention.weights import as_layer, start_weights

IN_SOURCE = "source"
"""As the file of a layer: its weights are beside the tokens."""

_HALF = ("float16", "bfloat16", "float8")


@dataclass(frozen=True)
class LayerOptions:
    """What the command line says about the layer; None where it says nothing.

    file: "source" for the file of the tokens.
    heads, kv_heads: of weights without a head axis.
    """

    file: str | None
    prefix: str | None
    heads: int | None
    kv_heads: int | None
    rope_base: float | None
    rope_pairing: Pairing | None
    logit_scale: float | None

    def require_sense(self) -> None:
        """Raise ValueError for settings without a layer, without one another, or out of range."""
        given = {
            "--layer-prefix": self.prefix,
            "--layer-heads": self.heads,
            "--kv-heads": self.kv_heads,
            "--rope-base": self.rope_base,
            "--rope-pairing": self.rope_pairing,
            "--logit-scale": self.logit_scale,
        }
        for name, value in given.items():
            if value is not None and self.file is None:
                raise ValueError(f"{name} says how to read a layer; give its file with --layer.")
        if self.rope_pairing is not None and self.rope_base is None:
            raise ValueError("--rope-pairing goes with --rope-base.")
        if self.logit_scale is not None and not 0 < self.logit_scale < float("inf"):
            raise ValueError(
                f"--logit-scale must be a positive finite number; found {self.logit_scale}."
            )

    @property
    def rotary(self) -> Rotary | None:
        """The rotary positions asked for."""
        if self.rope_base is None:
            return None
        return Rotary(self.rope_base, self.rope_pairing or "halves")


@dataclass(frozen=True, eq=False)
class Start:
    """A layer to begin from.

    given: as it was read, in the precision of the problem.
    layer: with the heads and ranks asked for.
    record: for result.json.
    """

    given: AttentionLayer
    layer: AttentionLayer
    record: dict[str, Any]

    @property
    def factored(self) -> bool:
        """Whether it has W_Q, W_K, W_V and W_O rather than X and Y."""
        return isinstance(self.layer, FactoredAttention)

    def around(self, strength: float, isotropic: bool) -> Proximity:
        """The penalty for leaving it."""
        if isinstance(self.layer, BilinearAttention):
            return Proximity((self.layer.X, self.layer.Y), strength, isotropic)
        return Proximity(self.layer, strength, isotropic)

    def sentence(self) -> str:
        """What was read and what became of it."""
        before, after = self.given.parametrisation, self.layer.parametrisation
        text = f"Layer {self.record['source']}: {_shape(before)}"
        if isinstance(before, Factored):
            text += f", logits times {before.scale:.6g}"
            if before.rotary is not None:
                text += f", rotary positions with base {before.rotary.base:g}"
        return f"{text}; the fit begins with {_shape(after)}." if after != before else f"{text}."


def load_start(
    options: LayerOptions,
    source: str,
    problem: AttentionProblem,
    heads: int | None,
    ranks: tuple[int, ...] | None,
) -> Start | None:
    """The layer to begin from, or None where the start is random.

    Args:
        options: see `LayerOptions`.
        source: the file of the tokens.
        problem: what the layer will be fitted to.
        heads: keep so many, if fewer than it has.
        ranks: truncate to these widths.

    Raises:
        OSError: the file is missing or not readable.
        ValueError: no such layer, one that does not fit the tokens, heads or ranks it cannot have.
        TypeError: weights of other or mixed types.
    """
    if options.file is None:
        return None
    place = source if options.file == IN_SOURCE else options.file
    file = open_arrays(place)
    dtype = str(problem.like.dtype)[6:]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer = load_layer(
            place,
            options.heads,
            options.kv_heads,
            options.rotary,
            options.logit_scale,
            options.prefix or "",
        )
    _warn(caught, file.label, dtype)
    try:
        w = start_weights(problem, layer)
        layer = as_layer(w.layer, w.theta[0], w.one_head, problem)
        smaller = _reduced(problem, layer, heads, ranks)
    except (ValueError, TypeError) as error:
        widths = "of queries, keys, values and outputs"
        text = str(error).replace("(d1, d2, d3, p)", widths)
        raise type(error)(f"{file.label}: {text}") from error
    rotary = options.rotary
    record = {
        "source": file.reference,
        "sha256": file.sha256(),
        "prefix": options.prefix or "",
        "layer_heads": options.heads,
        "kv_heads": options.kv_heads,
        "rope_base": None if rotary is None else rotary.base,
        "rope_pairing": None if rotary is None else rotary.pairing,
        "logit_scale": options.logit_scale,
    }
    return Start(layer, smaller, record)


def require_proximity(
    strength: float | None, isotropic: bool, layer: str | None, ridges: Sequence[float | None]
) -> None:
    """Raise ValueError for options that --proximity does not go with."""
    if strength is None:
        if isotropic:
            raise ValueError("--isotropic goes with --proximity.")
        return
    if layer is None:
        raise ValueError("--proximity stays near a given layer; name its file with --layer.")
    if any(ridges):
        raise ValueError("--proximity and --ridge exclude each other.")


def _reduced(
    problem: AttentionProblem,
    layer: AttentionLayer,
    heads: int | None,
    ranks: tuple[int, ...] | None,
) -> AttentionLayer:
    if not isinstance(layer, FactoredAttention):
        if ranks is not None or (heads is not None and heads != layer.heads):
            raise ValueError(
                "the layer is bilinear, X and Y, which --ranks and another number of --heads do "
                "not go with."
            )
        return layer
    if heads is not None and heads != layer.heads:
        layer = keep_heads(problem, layer, heads)
    if ranks is not None:
        layer = truncate(problem, layer, (ranks[0], ranks[-1]))
    return layer


def _warn(caught: Sequence[warnings.WarningMessage], label: str, dtype: str) -> None:
    """Pass warnings on, those about half precision as one rather than one for each array."""
    half = {k for k in _HALF for w in caught if f" is {k}" in str(w.message)}
    for w in caught:
        if not any(f" is {k}" in str(w.message) for k in half):
            warnings.warn(w.message, w.category, stacklevel=3)
    if half:
        found = " and ".join(sorted(half))
        warnings.warn(f"{label}: the weights are {found}; computing in {dtype}.", stacklevel=3)


def _shape(shape: AttentionMap | Bilinear | Factored) -> str:
    heads = f"{shape.heads} head" + "s" * (shape.heads != 1)
    if isinstance(shape, AttentionMap):
        return f"an attention map, X {shape.d1} x {shape.d2}"
    if not isinstance(shape, Factored):
        return f"{heads}, X {shape.d1} x {shape.d2} and Y {shape.d3} x {shape.p}"
    groups = "" if shape.kv_heads == shape.heads else f" ({shape.kv_heads} for keys and values)"
    return f"{heads}{groups}, queries and keys {shape.e} wide, values {shape.f}"
