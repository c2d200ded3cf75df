"""What `newtention svm` leaves behind: svm.json and svm.safetensors."""

from __future__ import annotations

import json
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from newtention.files import write_atomically
from newtention.io.results import prepare_folder
from newtention.svm import AttentionSVM, SvmStatus

FORMAT = "newtention-svm"
FORMAT_VERSION = 1
RESULT = "svm.json"
ARRAYS = "svm.safetensors"


def prepare_svm_folder(folder: Path, force: bool) -> bool:
    """As `prepare_folder`, for a folder that may hold such a result and nothing else."""
    if (folder / RESULT).exists() and not force:
        raise FileExistsError(f"{folder} already holds a result; --force replaces it.")
    names = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    if "result.json" in names:
        raise FileExistsError(f"{folder} holds the result of a fit; choose another folder.")
    return prepare_folder(folder, beside=(RESULT, ARRAYS))


def write_svm(folder: Path, result: AttentionSVM, about: dict[str, Any]) -> dict[str, Any]:
    """Write RESULT and ARRAYS, and return the document of the former.

    about: where the problem comes from, added to the document.
    """
    from newtention import __version__

    arrays = {name: getattr(result, name) for name in ("X", "support", "duals", "slack")}
    if result.conflict is not None:
        for name in ("pairs", "selected", "weights"):
            arrays[f"conflict_{name}"] = getattr(result.conflict, name)
    if result.status is SvmStatus.INFEASIBLE:
        del arrays["support"], arrays["duals"]  # empty
    tensors = {n: t.contiguous() for n, t in arrays.items() if t is not None}
    data = safetensors.torch.save(tensors, metadata={"format": "pt"})
    document = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **result.to_dict(),
        **about,
        "files": {ARRAYS: sha256(data).hexdigest()},
        "versions": {
            "newtention": __version__,
            "clarabel": version("clarabel"),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    write_atomically({folder / ARRAYS: data, folder / RESULT: text.encode()})
    return document
