"""What `newtention svm` leaves behind: svm.json and svm.safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from newtention.io.documents import Kind
from newtention.svm import AttentionSVM, SvmStatus

SVM = Kind("svm", ("clarabel", "torch", "numpy"))


def write_svm(folder: Path, result: AttentionSVM, about: dict[str, Any]) -> dict[str, Any]:
    """Write the result, and return the document.

    about: where the problem comes from, added to the document.
    """
    arrays = {name: getattr(result, name) for name in ("X", "support", "duals", "slack")}
    if result.conflict is not None:
        for name in ("pairs", "selected", "weights"):
            arrays[f"conflict_{name}"] = getattr(result.conflict, name)
    if result.status is SvmStatus.INFEASIBLE:
        del arrays["support"], arrays["duals"]  # empty
    tensors = {name: t for name, t in arrays.items() if t is not None}
    return SVM.write(folder, {**result.to_dict(), **about}, tensors)
