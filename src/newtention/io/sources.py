"""From a file to a problem, and the record that rebuilds it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from newtention.io.arrays import ArrayFile, open_arrays
from newtention.io.names import ABSENT, ArrayNames, choose_names
from newtention.io.tensors import OF_LAYERS, SourceData
from newtention.problem import AttentionProblem
from newtention.regularizers import Ridge

Kind = Literal["layer", "attention-map"]
"""What is fitted: outputs of a layer, or the attention map itself."""

DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class Provenance:
    """Everything that rebuilds a problem from its file.

    source: absolute path or ``example:NAME``.
    sha256: of the file.
    arrays: names as they were used; None where a role had no array.
    mask: "none" or "causal".
    ridge_x, ridge_y: strengths of `Ridge`; both 0 for none.
    dtype: "float64" or "float32", what the data were converted to.
    hold_out: every so many-th sequence is left out, for validation; 0 for none.
    kind: what the targets are.
    """

    source: str
    sha256: str
    arrays: ArrayNames
    mask: str = "none"
    scale: float = 1.0
    ridge_x: float = 0.0
    ridge_y: float = 0.0
    dtype: str = "float64"
    hold_out: int = 0
    kind: Kind = "layer"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Provenance:
        """Inverse of `to_dict`.

        Raises:
            KeyError, TypeError: missing or unknown fields.
        """
        fields: dict[str, Any] = dict(data)
        fields["arrays"] = ArrayNames(**fields["arrays"])
        return cls(**fields)


def load_problem(
    source: str | Path,
    arrays: ArrayNames | None = None,
    *,
    mask: str = "none",
    scale: float = 1.0,
    ridge_x: float = 0.0,
    ridge_y: float = 0.0,
    dtype: str = "float64",
    hold_out: int = 0,
    held_out: bool = False,
    targets_width: int | None = None,
    kind: Kind = "layer",
) -> tuple[AttentionProblem, Provenance]:
    """Build a problem from a .safetensors or .npz file or a packaged example.

    The arrays' shapes say what they are.  2-D queries (N, d1) and targets (N, p) are sequences
    concatenated if there are offsets (s + 1,), else one sequence; 3-D ones (s, n, .) are a padded
    batch with optional lengths (s,).  Keys (M, d2) default to the queries (self-attention), values
    (M, d3) to the keys.

    Args:
        source: path, or ``example:NAME``.
        arrays: names by role.  Where none is given, an array named like the role is used if the
            file has one; queries may also be called tokens or hidden, targets head_output or
            output.  "none" leaves a role out.
        mask: "none" or "causal".
        scale: multiplies the logits.
        ridge_x: strength of a `Ridge` on X.
        ridge_y: the same on Y.
        dtype: "float64" or "float32"; the data are converted.
        hold_out: k > 1 leaves out the k-th, 2 k-th, ... sequence; 0 takes all.
        held_out: take those that `hold_out` leaves out, and only those.
        targets_width: for predictions, the targets may be missing; they are then zero with this
            width (attention maps have a width of their own).
        kind: what the targets are: outputs of a layer, or attention maps, which have no values and
            take the ridge on X alone.

    Raises:
        OSError: the file is missing, a directory or not readable.
        ValueError: not a file of its kind, a missing array, shapes that do not fit, NaN or
            infinity, a setting out of range, fewer sequences than `hold_out`.
        TypeError: an array of the wrong kind (Python objects, text, booleans, complex numbers).
    """
    if mask not in ("none", "causal"):
        raise ValueError(f'mask must be "none" or "causal"; found {mask!r}.')
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be {' or '.join(DTYPES)}; found {dtype!r}.")
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale must be a positive finite number; found {scale}.")
    ridge = Ridge(ridge_x, ridge_y)
    file = open_arrays(source)
    asked = arrays or ArrayNames()
    if kind == "attention-map":
        if asked.values not in (None, ABSENT):
            raise ValueError("Attention maps have no values; leave --values out.")
        asked = replace(asked, values=ABSENT)
    names = choose_names(file, asked, targets_width is not None)
    data = SourceData(file, names, DTYPES[dtype])
    data.require_shapes()
    tensors, rows = dict(data.tensors), data.rows
    if hold_out:
        tensors, rows = _sequences(file.label, tensors, rows, hold_out, held_out)
    if "targets" not in tensors:
        a1 = tensors["queries"]
        keys = tensors.get("keys", a1)
        width = keys.shape[-2] if kind == "attention-map" else targets_width or 1
        tensors["targets"] = a1.new_zeros(*a1.shape[:-1], width)
    keywords = {
        "mask": None if mask == "none" else mask,
        "scale": scale,
        "regularizer": ridge if ridge.x or ridge.y else None,
    }
    with warnings.catch_warnings():
        if names.targets is None:  # about targets that nobody gave
            warnings.simplefilter("ignore")
        with data.named(OF_LAYERS):
            problem = _build(tensors, rows, keywords, maps=kind == "attention-map")
    provenance = Provenance(
        file.reference,
        file.sha256(),
        names,
        mask,
        float(scale),
        ridge.x,
        ridge.y,
        dtype,
        hold_out,
        kind,
    )
    return problem, provenance


def recorded_file(provenance: Provenance, source: str | Path | None = None) -> ArrayFile:
    """The file of a record, known to be unchanged; `source` is its new place, if it has moved.

    Raises:
        FileNotFoundError: the file is gone.
        ValueError: its content has changed.
        OSError: it cannot be opened.
    """
    return unchanged_file(provenance.source, provenance.sha256, source)


def unchanged_file(
    recorded: str | Path, sha256: str, source: str | Path | None = None
) -> ArrayFile:
    """The data of a fit, known by their hash, at the recorded place or at `source` instead.

    Raises:
        FileNotFoundError, ValueError, OSError: as for `recorded_file`.
    """
    try:
        file = open_arrays(recorded if source is None else source)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"The data of this fit are not at {recorded}; give their place with --source (sha256 "
            f"{sha256[:12]}...)."
            if source is None
            else f"--source: there is no file {source}; expected the data of this fit, which were "
            f"at {recorded} (sha256 {sha256[:12]}...)."
        ) from error
    found = file.sha256()
    if found != sha256:
        other = f"its sha256 is {found[:12]}..., that of the fit's data {sha256[:12]}...."
        raise ValueError(
            f"{file.label} is not the file of this fit, or has changed since: {other}  Restore it, "
            "give its place with --source, or fit again."
            if source is None
            else f"--source: {file.label} is not the file of this fit, which was at {recorded}: "
            f"{other}"
        )
    return file


def reload_problem(
    provenance: Provenance, source: str | Path | None = None
) -> tuple[AttentionProblem, Provenance]:
    """Rebuild a recorded problem; `source` is the file's new place, if it has moved.

    A `Proximity` is not part of the record: its reference lies in the result folder.

    Raises:
        FileNotFoundError, OSError, ValueError: as for `recorded_file`.
        TypeError: as for `load_problem`.
    """
    recorded_file(provenance, source)
    return load_problem(
        provenance.source if source is None else source,
        provenance.arrays.exact(),
        mask=provenance.mask,
        scale=provenance.scale,
        ridge_x=provenance.ridge_x,
        ridge_y=provenance.ridge_y,
        dtype=provenance.dtype,
        hold_out=provenance.hold_out,
        kind=provenance.kind,
    )


def _sequences(
    label: str,
    tensors: Mapping[str, Tensor],
    rows: Mapping[str, Tensor],
    every: int,
    held_out: bool,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All sequences but every so many-th, or only those; tensors that are one object stay one."""
    t = dict(tensors)
    if "key_offsets" in rows:
        t.setdefault("keys", t["queries"])
    padded = t["queries"].ndim == 3
    counts = {len(r) - (not padded) for r in rows.values()} or {len(t["queries"]) if padded else 1}
    if len(counts) > 1:  # the problem says what is wrong
        return t, dict(rows)
    if min(counts) < every:
        raise ValueError(
            f"{label} holds {min(counts)} sequence(s), too few to hold out one in {every}."
        )
    chosen = [i for i in range(min(counts)) if (i % every == every - 1) == held_out]

    def cut(x: Tensor, bounds: list[int] | None) -> Tensor:
        if bounds is None:
            return x[chosen]
        return torch.cat([x[bounds[i] : bounds[i + 1]] for i in chosen])

    cuts: dict[tuple[int, str], Tensor] = {}
    for role, x in t.items():
        of_keys = role in ("keys", "values") and "key_offsets" in rows
        side = "key_offsets" if of_keys else "offsets"
        if (id(x), side) not in cuts:
            cuts[id(x), side] = cut(x, None if padded else rows[side].tolist())
        t[role] = cuts[id(x), side]
    if padded:
        return t, {role: r[chosen] for role, r in rows.items()}
    sizes = {role: r.diff()[chosen] for role, r in rows.items()}
    return t, {role: torch.cat([n.new_zeros(1), n.cumsum(0)]) for role, n in sizes.items()}


def _build(
    t: Mapping[str, Tensor],
    rows: Mapping[str, Tensor],
    keywords: Mapping[str, Any],
    maps: bool,
) -> AttentionProblem:
    """The constructor for the shapes at hand."""
    if "offsets" in rows:
        key_side = {"keys": t.get("keys"), "key_offsets": rows.get("key_offsets")}
        given: dict[str, Any] = {"offsets": rows["offsets"], **key_side, **keywords}
        if maps:
            return AttentionProblem.from_ragged_maps(t["queries"], t["targets"], **given)
        values = t.get("values")
        return AttentionProblem.from_ragged(t["queries"], t["targets"], values=values, **given)
    keys = t.get("keys", t["queries"])
    given = {"lengths": rows.get("lengths"), "key_lengths": rows.get("key_lengths"), **keywords}
    if maps:
        return AttentionProblem.from_maps(t["queries"], keys, t["targets"], **given)
    values = t.get("values", keys)
    return AttentionProblem(t["queries"], keys, values, t["targets"], **given)
