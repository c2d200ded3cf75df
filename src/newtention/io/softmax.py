"""What `newtention fit --kind softmax` leaves behind: softmax.json and softmax.safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from newtention.io.documents import Kind
from newtention.regression import SoftmaxRegression

SOFTMAX = Kind("softmax")
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


def write_softmax(folder: Path, result: SoftmaxRegression, about: dict[str, Any]) -> dict[str, Any]:
    """Write the result, and return the document.

    about: where the problem comes from, added to the document.
    """
    facts = {
        "status": result.status.value,
        **{name: getattr(result, name) for name in _PLAIN},
        **about,
        "start_losses": list(result.start_losses),
        "history": result.history.to_dicts(),
    }
    tensors = {name: torch.as_tensor(getattr(result, name)) for name in ("x", "fitted")}
    return SOFTMAX.write(folder, facts, tensors)
