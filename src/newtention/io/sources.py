"""From a file to a problem, and the record that rebuilds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from newtention.io.arrays import ArrayFile, open_arrays
from newtention.io.names import ArrayNames, choose_names
from newtention.io.tensors import SourceData
from newtention.problem import AttentionProblem
from newtention.regularizers import Ridge

DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class Provenance:
    """Everything that rebuilds a problem from its file.

    source: absolute path or ``example:NAME``.
    sha256: of the file.
    arrays: names as they were used; None where a role had no array.
    mask: "none" or "causal".
    ridge_x, ridge_y: strengths of `Ridge`; both 0 for no regulariser.
    dtype: "float64" or "float32", what the data were converted to.
    """

    source: str
    sha256: str
    arrays: ArrayNames
    mask: str = "none"
    scale: float = 1.0
    ridge_x: float = 0.0
    ridge_y: float = 0.0
    dtype: str = "float64"

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
    targets_width: int | None = None,
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
        targets_width: for predictions, the targets may be missing; they are then zero with this
            width.

    Raises:
        OSError: the file is missing, a directory or not readable.
        ValueError: not a file of its kind, a missing array, shapes that do not fit, NaN or
            infinity, a setting out of range.
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
    names = choose_names(file, arrays or ArrayNames(), targets_width is not None)
    data = SourceData(file, names, DTYPES[dtype])
    data.require_shapes()
    tensors = dict(data.tensors)
    if "targets" not in tensors:
        a1 = tensors["queries"]
        tensors["targets"] = a1.new_zeros(*a1.shape[:-1], targets_width or 1)
    keywords = {
        "mask": None if mask == "none" else mask,
        "scale": scale,
        "regularizer": ridge if ridge.x or ridge.y else None,
    }
    try:
        problem = _build(tensors, data.rows, keywords)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{file.label}: {error}") from error
    provenance = Provenance(
        file.reference, file.sha256(), names, mask, float(scale), ridge.x, ridge.y, dtype
    )
    return problem, provenance


def recorded_file(provenance: Provenance, source: str | Path | None = None) -> ArrayFile:
    """The file of a record, known to be unchanged; `source` is its new place, if it has moved.

    Raises:
        FileNotFoundError: the file is gone.
        ValueError: its content has changed.
        OSError: it cannot be opened.
    """
    place = provenance.source if source is None else source
    try:
        file = open_arrays(place)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"The data of this fit are not at {place}; give their place with --source (sha256 "
            f"{provenance.sha256[:12]}...)."
        ) from error
    found = file.sha256()
    if found != provenance.sha256:
        raise ValueError(
            f"{file.label} is not the file of this fit, or has changed since: its sha256 is "
            f"{found[:12]}..., that of the fit's data {provenance.sha256[:12]}....  Restore it, "
            "give its place with --source, or fit again."
        )
    return file


def reload_problem(
    provenance: Provenance, source: str | Path | None = None
) -> tuple[AttentionProblem, Provenance]:
    """Rebuild a recorded problem; `source` is the file's new place, if it has moved.

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
    )


def _build(
    t: Mapping[str, Tensor], rows: Mapping[str, Tensor], keywords: Mapping[str, Any]
) -> AttentionProblem:
    """The constructor for the shapes at hand."""
    if "offsets" in rows:
        return AttentionProblem.from_ragged(
            t["queries"],
            t["targets"],
            offsets=rows["offsets"],
            keys=t.get("keys"),
            values=t.get("values"),
            key_offsets=rows.get("key_offsets"),
            **keywords,
        )
    keys = t.get("keys", t["queries"])
    return AttentionProblem(
        t["queries"],
        keys,
        t.get("values", keys),
        t["targets"],
        lengths=rows.get("lengths"),
        key_lengths=rows.get("key_lengths"),
        **keywords,
    )
