"""The folder of a fit: weights, start, and what is known about the run.

    weights.safetensors   the layer, as `newtention.save_layer` writes it (X and Y, or W_Q, ...)
    start.safetensors     the layer that the run began from
    reference.safetensors the layer that a Proximity penalty is centred at, where there is one
    result.json           everything else; written last, so that its presence means a complete fit
    report.html           derived from the others
    certificate.json      what was proved about the weights; see `certificates`

Files are written beside their final names and moved into place.  result.json holds the hashes of
the layers, so that a mixture of two fits cannot pass for one.
"""

from __future__ import annotations

import io
import json
import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from newtention.files import TEMPORARY, write_atomically
from newtention.io.arrays import SUFFIXES, open_arrays
from newtention.io.layers import layer_bytes, load_layer
from newtention.io.plain import as_history, as_text, read_document, with_null, without_null
from newtention.io.sources import Provenance, reload_problem
from newtention.layers import (
    AttentionLayer,
    BilinearAttention,
    FactoredAttention,
    MapAttention,
)
from newtention.problem import AttentionProblem
from newtention.regularizers import Proximity
from newtention.solution import Solution, Status

FORMAT = "newtention-result"
FORMAT_VERSION = 1
RESULT = "result.json"
WEIGHTS = "weights.safetensors"
START = "start.safetensors"
REFERENCE = "reference.safetensors"
CERTIFICATE = "certificate.json"
REPORT = "report.html"
PREDICTIONS = "predictions.safetensors"
DERIVED = (REPORT, PREDICTIONS, CERTIFICATE)
"""What other commands make from a result; out of date once it is replaced."""


@dataclass(frozen=True, eq=False)
class SavedResult:
    """A result folder's content, without its data.

    solution: its arrays are torch tensors.
    document: result.json.
    """

    folder: Path
    solution: Solution
    provenance: Provenance
    document: dict[str, Any]


def prepare_folder(folder: str | Path, force: bool = False, beside: Collection[str] = ()) -> bool:
    """Make sure, before a long run, that its result can be written.

    Args:
        folder: created if missing, with its parents.
        force: replace the result that the folder holds.
        beside: names of files that may lie in the folder, such as a checkpoint.

    Returns:
        Whether the folder was created.

    Raises:
        FileExistsError: the folder holds a result and force is False, or anything else.
        OSError: it cannot be created or written to.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file; expected a folder for the result.")
    created = not path.exists()
    if not created:
        _require_replaceable(path, force, beside)
    require_writable(path)
    return created


def require_writable(path: Path) -> None:
    """Create a folder if it is missing, and write a file there and remove it.

    Raises:
        OSError: that cannot be done.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f"{TEMPORARY}{os.getpid()}.tmp"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise type(error)(
            f"The result cannot be written to {path}: {error.strerror or error}."
        ) from error


def _require_replaceable(path: Path, force: bool, beside: Collection[str]) -> None:
    names = {p.name for p in path.iterdir()} - set(beside)
    present = [name for name in names if not name.startswith(TEMPORARY)]
    if not present:
        return
    if not _is_result(path):
        raise FileExistsError(
            f"{path} holds other files ({sorted(present)[0]!r}, say) and no result of Newtention; "
            "choose another folder."
        )
    if not force:
        raise FileExistsError(f"{path} already holds a result; --force replaces it.")


def _is_result(path: Path) -> bool:
    try:
        return json.loads((path / RESULT).read_text("utf-8")).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def write_result(
    folder: str | Path,
    problem: AttentionProblem,
    solution: Solution,
    provenance: Provenance,
    *,
    force: bool = False,
    beside: Collection[str] = (),
    **settings: object,
) -> dict[str, Any]:
    """Write the layers and result.json; what was derived from an earlier fit is removed.

    Args:
        folder: see `prepare_folder`.
        problem: what was fitted, as `load_problem` built it, or with a `Proximity` instead.
        solution: of that problem.
        provenance: of that problem.
        force: replace the result that the folder holds.
        beside: see `prepare_folder`.
        settings: further settings of the run to record, such as seed and n_init.

    Returns:
        The content of result.json.

    Raises:
        FileExistsError: as for `prepare_folder`.
        OSError: the folder cannot be written to.
    """
    path = Path(folder)
    prepare_folder(path, force, beside)
    contents = {
        WEIGHTS: layer_bytes(solution.layer),
        START: layer_bytes(solution.start),
    }
    if isinstance(problem.regularizer, Proximity):
        contents[REFERENCE] = layer_bytes(_reference(problem.regularizer))
    document = _document(problem, solution, provenance, settings)
    document["files"] = {name: sha256(data).hexdigest() for name, data in contents.items()}
    contents[RESULT] = as_text(document)
    for name in {*DERIVED, REFERENCE} - contents.keys():
        (path / name).unlink(missing_ok=True)
    write_atomically({path / name: data for name, data in contents.items()})
    return document


def write_array(path: str | Path, name: str, array: torch.Tensor, *, force: bool = False) -> None:
    """Write one array to a .safetensors or .npz file.

    Raises:
        ValueError: another extension.
        FileExistsError: the file exists and force is False.
        OSError: it cannot be written.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{target} must end in {' or '.join(SUFFIXES)}.")
    if target.is_dir():
        raise IsADirectoryError(f"{target} is a directory; expected a file name.")
    if target.exists() and not force:
        raise FileExistsError(f"{target} exists; --force replaces it.")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {target.parent} to write {target.name} to.")
    array = array.detach().cpu().contiguous()
    if suffix == ".npz":
        buffer = io.BytesIO()
        named: dict[str, Any] = {name: array.numpy()}
        np.savez(buffer, **named)
        data = buffer.getvalue()
    else:
        data = safetensors.torch.save({name: array}, metadata={"format": "pt"})
    write_atomically({target: data})


def read_result(folder: str | Path) -> SavedResult:
    """Read a result folder without its data.

    Raises:
        FileNotFoundError: there is no such folder, or it lacks a file.
        ValueError: the folder holds no result, a damaged one, or one of another version.
    """
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"There is no result folder {path}.")
    try:
        document = read_document(path / RESULT, FORMAT, FORMAT_VERSION)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is not a result folder: it has no {RESULT}.") from None
    try:
        solution = Solution(
            layer=_read_layer(path / WEIGHTS, document["files"]),
            start=_read_layer(path / START, document["files"]),
            status={status.value: status for status in Status}[document["status"]],
            history=as_history(document["history"]),
            start_losses=tuple(map(without_null, document["start_losses"])),
            validation_loss=document.get("validation_loss"),
            **{name: without_null(document[name]) for name in _PLAIN},
        )
        provenance = Provenance.from_dict(document["provenance"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path / RESULT} is incomplete or damaged: {error}.") from error
    return SavedResult(path, solution, provenance, document)


def load_result(
    folder: str | Path, source: str | Path | None = None
) -> tuple[AttentionProblem, Solution, dict[str, Any]]:
    """Read a result folder and rebuild the problem it belongs to.

    Args:
        folder: written by `write_result`.
        source: where the data are now, if they have moved.

    Returns:
        The problem, the solution, and the content of result.json.

    Raises:
        FileNotFoundError: the folder, a file of it or the data are missing.
        ValueError: a damaged folder, or data that have changed since the fit.
    """
    saved = read_result(folder)
    problem, _ = reload_problem(saved.provenance, source)
    about = saved.document["regularizer"]
    if about is not None and about["name"] == "proximity":
        layer = _read_layer(saved.folder / REFERENCE, saved.document["files"])
        reference = (layer.X, layer.Y) if isinstance(layer, BilinearAttention) else layer
        around = Proximity(reference, about["strength"], about["isotropic"])
        problem = problem.with_regularizer(around)
    return problem, saved.solution, saved.document


_PLAIN = (
    "loss",
    "data_loss",
    "penalty",
    "relative_loss",
    "iterations",
    "seconds",
    "method",
    "tol",
)
"""Fields of a Solution that stand in result.json as they are."""


def _document(
    problem: AttentionProblem,
    solution: Solution,
    provenance: Provenance,
    settings: Mapping[str, object],
) -> dict[str, Any]:
    from newtention import __version__

    regularizer = problem.regularizer
    layout = problem.layout
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "status": solution.status.value,
        "success": solution.success,
        "message": solution.message,
        **with_null({name: getattr(solution, name) for name in (*_PLAIN, "validation_loss")}),
        **with_null(settings),
        "heads": solution.layer.heads,
        "widths": dict(zip(("d1", "d2", "d3", "p"), problem.widths, strict=True)),
        "sequences": len(layout.queries),
        "queries": sum(layout.queries),
        "keys": sum(layout.keys),
        "regularizer": None if regularizer is None else regularizer.describe(),
        "provenance": provenance.to_dict(),
        "versions": {
            "newtention": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "threads": torch.get_num_threads(),
        "device": str(problem.like.device),
        "start_losses": with_null(solution.start_losses),
        "history": with_null(solution.history.to_dicts()),
    }


def _read_layer(
    path: Path, hashes: Mapping[str, str]
) -> FactoredAttention | BilinearAttention | MapAttention:
    if open_arrays(path).sha256() != hashes[path.name]:
        raise ValueError(f"{path} does not belong to the {RESULT} beside it; fit again.")
    return load_layer(path)


def _reference(around: Proximity) -> AttentionLayer:
    if around.around_layer:
        return around.reference
    X, Y = around.reference
    return MapAttention(X) if Y is None else BilinearAttention(X, Y)
