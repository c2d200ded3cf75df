"""Layers in files: written as .safetensors with their settings, read from there or plain arrays.

The arrays are the layer's blocks by name (W_Q, b_Q, ..., X and Y, or X alone).  The file's metadata
holds, under "newtention_layer", a JSON object:

    format_version   1
    kind             "factored", "bilinear" or "map" (X alone)
    scale            of the logits, factored only
    rotary           the fields of Rotary, or null, factored only
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open

from newtention.files import write_atomically
from newtention.io.arrays import ArrayFile, open_arrays
from newtention.layers import (
    AttentionLayer,
    BilinearAttention,
    FactoredAttention,
    MapAttention,
    Rotary,
)
from newtention.layers.named_arrays import USUAL_NAMES, choose_arrays

KEY = "newtention_layer"
FORMAT_VERSION = 1
KINDS: dict[str, type[AttentionLayer]] = {
    "bilinear": BilinearAttention,
    "factored": FactoredAttention,
    "map": MapAttention,
}


def save_layer(path: str | Path, layer: AttentionLayer) -> None:
    """Write a layer, with its scale and rotary positions, to a .safetensors file.

    An existing file is replaced, in one move once the new one is complete.

    Args:
        path: of the file, ending in .safetensors.
        layer: factored, bilinear, or of attention maps.

    Raises:
        TypeError: not a layer.
        ValueError: another extension.
        OSError: the file cannot be written.
    """
    data = layer_bytes(layer)
    target = Path(path).expanduser()
    if target.suffix.lower() != ".safetensors":
        raise ValueError(f"{target} must end in .safetensors; a layer's settings need its header.")
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a directory; expected a file name.")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {target.parent} to write {target.name} to.")
    write_atomically({target: data})


def layer_bytes(layer: AttentionLayer) -> bytes:
    """The content of a file of `save_layer`.

    Raises:
        TypeError: not a layer.
    """
    kind = next((kind for kind, cls in KINDS.items() if type(layer) is cls), None)
    if kind is None:
        raise TypeError(
            "save_layer takes a FactoredAttention, MapAttention or BilinearAttention; found "
            f"{type(layer).__name__}."
        )
    settings: dict[str, Any] = {"format_version": FORMAT_VERSION, "kind": kind}
    if isinstance(layer, FactoredAttention):
        rotary = None if layer.rotary is None else asdict(layer.rotary)
        settings |= {"scale": float(layer.scale), "rotary": rotary}
    blocks = (block.name for block in layer.parametrisation.blocks)
    tensors = {
        name: torch.as_tensor(getattr(layer, name)).detach().cpu().contiguous() for name in blocks
    }
    metadata = {"format": "pt", KEY: json.dumps(settings, allow_nan=False)}
    return safetensors.torch.save(tensors, metadata=metadata)


def load_layer(
    source: str | Path,
    heads: int | None = None,
    kv_heads: int | None = None,
    rotary: Rotary | None = None,
    scale: float | None = None,
    prefix: str = "",
) -> FactoredAttention | BilinearAttention | MapAttention:
    """Read a layer that `save_layer` wrote, or plain weight arrays of a .safetensors or .npz file.

    Plain arrays have the names of `FactoredAttention.from_arrays`; X and Y without any of those are
    a bilinear layer.  Other arrays of the file (tokens, other layers) are not read.

    Args:
        source: the file.
        heads: query heads, see `FactoredAttention.from_arrays`.
        kv_heads: key/value heads, see there.
        rotary: rotary positions.  A file's own settings may be repeated but not contradicted.
        scale: of the logits; 1/sqrt(head width) where the file does not say.
        prefix: only arrays whose names begin so, such as "layer2." or
            "model.layers.14.self_attn.", the prefix left out.

    Returns:
        The layer, its weights torch tensors of the file's type; half precision becomes float32
        with a warning.

    Raises:
        FileNotFoundError, IsADirectoryError, OSError: the file cannot be opened.
        ValueError: arrays are missing, ambiguous or do not fit, or the file's settings are damaged
            or contradict the arguments.
        TypeError: arrays of mixed or other types.
    """
    file = open_arrays(source)
    inside = {
        name.removeprefix(prefix): info.shape
        for name, info in file.arrays.items()
        if name.startswith(prefix)
    }
    settings = {"heads": heads, "kv_heads": kv_heads, "rotary": rotary, "scale": scale}
    given: dict[str, Any] = {n: value for n, value in settings.items() if value is not None}
    try:
        saved = _read_settings(file)
        if saved is not None and saved["kind"] == "map":
            _require_names(file, prefix, inside, given, ("X",), "an attention map, X")
            return MapAttention(file.read(prefix + "X"))
        if _is_bilinear(saved, inside):
            _require_names(file, prefix, inside, given, ("X", "Y"), "a bilinear layer, X and Y")
            return BilinearAttention(file.read(prefix + "X"), file.read(prefix + "Y"))
        if saved is not None:
            given = _agreed(saved, given)
        names = _choose(file, prefix, inside).values()
        return FactoredAttention.from_arrays({n: file.read(prefix + n) for n in names}, **given)
    except (TypeError, ValueError) as error:
        text = str(error)
        if file.label in text:
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        where = f"{file.label}, prefix {prefix!r}" if prefix else file.label
        raise kind(f"{where}: {text}") from error


def _is_bilinear(saved: Mapping[str, Any] | None, inside: Mapping[str, tuple[int, ...]]) -> bool:
    if saved is not None:
        return saved["kind"] == "bilinear"
    usual = any(name.lower() in USUAL_NAMES for name in inside)
    return not usual and {"X", "Y"} <= inside.keys()


def _require_names(
    file: ArrayFile,
    prefix: str,
    inside: Mapping[str, tuple[int, ...]],
    given: Mapping[str, object],
    names: Sequence[str],
    what: str,
) -> None:
    if given:
        raise ValueError(f"the file holds {what}, which takes no {' or '.join(given)}.")
    for name in names:
        if name not in inside:
            raise ValueError(f"there is no array {prefix + name!r}; found {file.listing()}.")


def _choose(file: ArrayFile, prefix: str, inside: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Names by block; a file without any may hold some under another prefix."""
    try:
        return choose_arrays(inside)
    except ValueError as error:
        places = _prefixes(file)
        if not places or any(name.lower() in USUAL_NAMES for name in inside):
            raise
        shown = ", ".join(map(repr, places[:6])) + (" and others" if len(places) > 6 else "")
        raise ValueError(f"{error}  There are such names under prefix={shown}.") from error


def _prefixes(file: ArrayFile) -> list[str]:
    """What stands before the name of some weights of queries, where anything does."""
    ends = [name for name, use in USUAL_NAMES.items() if "W_Q" in use.blocks]
    found = set()
    for name in file.arrays:
        fitting = [end for end in ends if name.lower().endswith("." + end)]
        if fitting:
            found.add(name[: -max(map(len, fitting))])
    return sorted(found)


def _read_settings(file: ArrayFile) -> dict[str, Any] | None:
    """The JSON object of the file's metadata, checked; None if the file was not saved by us."""
    if file.path.suffix.lower() != ".safetensors":
        return None
    with safe_open(file.path, framework="pt") as opened:
        text = (opened.metadata() or {}).get(KEY)
    if text is None:
        return None
    try:
        saved = json.loads(text)
    except ValueError:
        saved = None
    if not isinstance(saved, dict):
        raise ValueError(f"the metadata {KEY!r} must be a JSON object; found {text[:80]!r}.")
    if saved.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"the layer has format version {saved.get('format_version')!r}; this version of "
            f"Newtention reads {FORMAT_VERSION}."
        )
    if saved.get("kind") not in tuple(KINDS):
        raise ValueError(f"the layer's kind must be {' or '.join(KINDS)}; found {text[:80]!r}.")
    if saved["kind"] == "factored":
        scale = saved.get("scale")
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            raise ValueError(f"the layer's scale must be a number; found {scale!r}.")
        saved["rotary"] = _read_rotary(saved.get("rotary", ...))
    return saved


def _read_rotary(saved: object) -> Rotary | None:
    if saved is None:
        return None
    if not isinstance(saved, dict):
        raise ValueError("the layer's rotary settings are missing or no JSON object.")
    unknown = saved.keys() - {field.name for field in fields(Rotary)}
    if unknown:
        raise ValueError(
            f"the layer's rotary settings have {', '.join(sorted(unknown))}, which this version of "
            "Newtention does not know."
        )
    try:
        return Rotary(**{name: _with_tuples(value) for name, value in saved.items()})
    except TypeError as error:
        raise ValueError(f"the layer's rotary settings are damaged: {error}.") from error


def _with_tuples(value: object) -> Any:
    """JSON knows lists only; frozen values hold tuples."""
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _agreed(saved: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The file's settings, beside arguments that do not contradict them."""
    settings = {"scale": float(saved["scale"]), "rotary": saved["rotary"]}
    for name, value in settings.items():
        if name in given and given[name] != value:
            raise ValueError(f"the file says {name}={value!r}; found {name}={given[name]!r}.")
    return {**given, **settings}
