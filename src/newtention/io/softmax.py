"""What `newtention fit --kind softmax` leaves behind: softmax.json and softmax.safetensors."""

from __future__ import annotations

import json
import math
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from newtention.files import write_atomically
from newtention.io.results import prepare_folder
from newtention.regression import SoftmaxRegression

FORMAT = "newtention-softmax"
FORMAT_VERSION = 1
RESULT = "softmax.json"
ARRAYS = "softmax.safetensors"
_PLAIN = (
    "success",
    "message",
    "form",
    "loss",
    "data_loss",
    "penalty",
    "relative_loss",
    "iterations",
    "seconds",
    "tol",
)


def prepare_softmax_folder(folder: Path, force: bool) -> bool:
    """As `prepare_folder`, for a folder that may hold such a result and nothing else."""
    if (folder / RESULT).exists() and not force:
        raise FileExistsError(f"{folder} already holds a result; --force replaces it.")
    names = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    if "result.json" in names:
        raise FileExistsError(f"{folder} holds the result of a fit; choose another folder.")
    return prepare_folder(folder, beside=(RESULT, ARRAYS))


def write_softmax(folder: Path, result: SoftmaxRegression, about: dict[str, Any]) -> dict[str, Any]:
    """Write RESULT and ARRAYS, and return the document of the former.

    about: where the problem comes from, added to the document.
    """
    from newtention import __version__

    tensors = {name: torch.as_tensor(getattr(result, name)) for name in ("x", "fitted")}
    data = safetensors.torch.save(
        {name: t.contiguous() for name, t in tensors.items()}, metadata={"format": "pt"}
    )
    document = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "status": result.status.value,
        **{name: getattr(result, name) for name in _PLAIN},
        **about,
        "start_losses": list(result.start_losses),
        "history": result.history.to_dicts(),
        "files": {ARRAYS: sha256(data).hexdigest()},
        "versions": {
            "newtention": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }
    text = json.dumps(_with_null(document), indent=1, allow_nan=False) + "\n"
    write_atomically({folder / ARRAYS: data, folder / RESULT: text.encode()})
    return json.loads(text)


def _with_null(value: Any) -> Any:
    """JSON has neither NaN nor infinity."""
    if isinstance(value, dict):
        return {name: _with_null(v) for name, v in value.items()}
    if isinstance(value, list):
        return [_with_null(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
