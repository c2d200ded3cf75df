"""The blocks of a factored layer from plain arrays: their usual names and layouts.

    W_Q, Wq        b_Q, bq            y = x W, (in, out), or per head with the heads first
    to_q_W         to_q_b             the same
    to_q.weight    to_q.bias          y = x W^T, (out, in), as torch.nn.Linear keeps it

Weights (in, out) of all heads side by side are cut into heads here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from newtention.inputs import as_tensors, shape_text
from newtention.notation import ArrayLike

STEMS = {
    "Q": ("to_q", "q_proj", "query", "self.query"),
    "K": ("to_k", "k_proj", "key", "self.key"),
    "V": ("to_v", "v_proj", "value", "self.value"),
    "O": ("to_out", "o_proj", "out_proj", "to_out.0", "output.dense"),
    "QK": ("to_qk", "qk_proj"),
}
"""Modules that hold the weights of queries, keys, values, outputs, queries and keys at once."""

UNSUPPORTED = ("q_norm", "k_norm", "norm_q", "norm_k", "q_layernorm", "k_layernorm", "sinks")
"""Starts of names of arrays that change the outputs in a way that no block expresses."""

PACKED = "in_proj_weight"
"""Where torch.nn.MultiheadAttention keeps three blocks at once."""


class _Use(NamedTuple):
    """Blocks that an array gives; transposed: stored as (out, in)."""

    blocks: tuple[str, ...]
    transposed: bool


def _usual_names() -> dict[str, _Use]:
    """Every known name in lower case."""
    names = {}
    for roles, stems in STEMS.items():
        for kind, suffix in (("W", "weight"), ("b", "bias")):
            blocks = tuple(f"{kind}_{role}" for role in roles)
            plain = [f"{kind}_{roles}", kind + roles, *(f"{stem}_{kind}" for stem in stems)]
            names |= {name.lower(): _Use(blocks, False) for name in plain}
            names |= {f"{stem}.{suffix}": _Use(blocks, suffix == "weight") for stem in stems}
    return names


USUAL_NAMES = _usual_names()


def choose_arrays(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Which array gives which block: names by block, from the names and shapes of all arrays.

    Raises:
        ValueError: a weight has no array or two, or an array cannot be expressed.
    """
    found: dict[str, str] = {}
    for name in shapes:
        use = USUAL_NAMES.get(name.lower())
        if use is None:
            _require_ignorable(name)
            continue
        for block in use.blocks:
            if block in found:
                raise ValueError(
                    f"{found[block]!r} and {name!r} are both {block}; leave one of them out."
                )
            found[block] = name
    packed = next((name for name in shapes if name.lower().endswith(PACKED)), None)
    for role in "QKVO":
        if f"W_{role}" not in found:
            if packed is not None:
                raise ValueError(
                    f"{packed!r} holds W_Q, W_K and W_V of torch.nn.MultiheadAttention in one "
                    "array; convert the module with newtention.FactoredAttention.from_torch and "
                    "write it with newtention.save_layer."
                )
            stem = STEMS[role][0]
            raise ValueError(
                f"There is no array for W_{role} (W_{role}, W{role.lower()}, {stem}_W, "
                f"{stem}.weight, {STEMS[role][1]}.weight and the like); found {_listing(shapes)}."
            )
    return found


def named_weights(
    arrays: Mapping[str, ArrayLike], heads: int | None = None, kv_heads: int | None = None
) -> dict[str, Any]:
    """Blocks with a head axis, as FactoredAttention takes them; NumPy arrays if given so.

    Args:
        arrays: by name, see `FactoredAttention.from_arrays`.
        heads: query heads h; needed unless W_Q has a head axis.
        kv_heads: key/value heads g.

    Raises:
        ValueError: missing or ambiguous arrays, shapes that do not fit.
        TypeError: arrays of mixed kinds.
    """
    chosen = choose_arrays({name: _shape(a) for name, a in arrays.items()})
    named = {name: arrays[name] for name in chosen.values()}
    tensors, numpy = as_tensors(named)
    for name, t in tensors.items():
        if USUAL_NAMES[name.lower()].transposed:
            if t.ndim != 2:
                raise ValueError(f"{name!r} must be 2-D (out x in); found {shape_text(t.shape)}.")
            tensors[name] = t.T
    parts = _Parts({block: tensors[name] for block, name in chosen.items()}, chosen)
    split = parts.split(heads, kv_heads)
    return {block: t.numpy() if numpy else t for block, t in split.items()}


class _Parts(NamedTuple):
    """Blocks (in, out) or with a head axis, and the names of their arrays for messages."""

    blocks: dict[str, Tensor]
    names: dict[str, str]

    def split(self, heads: int | None, kv_heads: int | None) -> dict[str, Tensor]:
        """The blocks with a head axis."""
        for block, t in self.blocks.items():
            axes = (1,) if block == "b_O" else (1, 2) if block.startswith("b") else (2, 3)
            if t.ndim not in axes or 0 in t.shape:
                raise ValueError(
                    f"{self._title(block)} must have {' or '.join(map(str, axes))} axes and not be "
                    f"empty; found {shape_text(t.shape)}."
                )
        h = self._count("heads", heads, ("W_Q",))
        if h is None:
            raise ValueError(
                f"{self._title('W_Q')} has no head axis; give the number of query heads, heads=."
            )
        g = self._count("kv_heads", kv_heads, ("W_K", "W_V")) or h
        out = {"W_Q": self._columns("W_Q", h)}
        e = out["W_Q"].shape[-1]
        self._require_keys(h, g, e, kv_heads is None)
        out |= {name: self._columns(name, g) for name in ("W_K", "W_V")}
        out["W_O"] = self._rows(h, out["W_V"].shape[-1])
        for name, count in (("b_Q", h), ("b_K", g), ("b_V", g)):
            if name in self.blocks:
                out[name] = self._columns(name, count)
        if "b_O" in self.blocks:
            out["b_O"] = self.blocks["b_O"]
        return {name: t.contiguous() for name, t in out.items()}

    def _title(self, block: str) -> str:
        name = self.names[block]
        return repr(name) if name == block else f"{name!r} ({block})"

    def _count(self, what: str, given: int | None, blocks: tuple[str, ...]) -> int | None:
        """The number of heads, from the argument or the first block that has a head axis."""
        if given is not None and given < 1:
            raise ValueError(f"{what} must be at least 1; found {given}.")
        for block in blocks:
            t = self.blocks[block]
            if t.ndim == 3:
                if given is not None and given != t.shape[0]:
                    raise ValueError(
                        f"{what} is {given}, but {self._title(block)} is {shape_text(t.shape)}, "
                        "with the heads first."
                    )
                return t.shape[0]
        return given

    def _require_keys(self, h: int, g: int, e: int, default: bool) -> None:
        """Keys side by side must be as wide per head as the queries."""
        t = self.blocks["W_K"]
        if t.ndim == 3 or t.shape[1] == g * e:
            return
        fitting, rest = divmod(t.shape[1], e)
        hint = f"; kv_heads={fitting} would fit" if default and not rest and not h % fitting else ""
        raise ValueError(
            f"{self._title('W_K')} must have {g * e} columns, {g} heads of the queries' width {e}; "
            f"found {t.shape[1]}{hint}."
        )

    def _columns(self, block: str, count: int) -> Tensor:
        """(d, c w) as (c, d, w), (c w,) as (c, w)."""
        t = self.blocks[block]
        bias = block.startswith("b")
        if t.ndim == (2 if bias else 3):
            return t
        if t.shape[-1] % count:
            raise ValueError(
                f"{self._title(block)} must have columns for {count} heads; found "
                f"{shape_text(t.shape)}."
            )
        split = t.unflatten(-1, (count, -1))
        return split if bias else split.transpose(0, 1)

    def _rows(self, h: int, f: int) -> Tensor:
        """W_O, (h f, p), as (h, f, p)."""
        t = self.blocks["W_O"]
        if t.ndim == 3:
            return t
        if t.shape[0] != h * f:
            raise ValueError(
                f"{self._title('W_O')} must have {h * f} inputs, {h} heads of the values' width "
                f"{f}; found {t.shape[0]}."
            )
        return t.unflatten(0, (h, f))


def _require_ignorable(name: str) -> None:
    lower = name.lower()
    modules = tuple(f"{stem}." for stems in STEMS.values() for stem in stems)
    if lower.startswith(modules):
        raise ValueError(f"{name!r} changes what the module does and is not understood.")
    if lower.startswith(UNSUPPORTED):
        raise ValueError(f"{name!r} changes the attention in a way that is not supported.")


def _shape(a: ArrayLike) -> tuple[int, ...]:
    """() for what is not an array, which is reported where it matters."""
    try:
        return tuple(np.shape(a))
    except ValueError:
        return ()


def _listing(shapes: Mapping[str, tuple[int, ...]], most: int = 12) -> str:
    """The first arrays with their shapes, and how many more there are."""
    if not shapes:
        return "no arrays"
    names = sorted(shapes)
    text = ", ".join(f"{name!r} ({shape_text(shapes[name])})" for name in names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"
