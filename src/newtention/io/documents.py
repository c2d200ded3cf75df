"""A JSON document with its arrays in a safetensors file beside it: results other than a fit's."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from newtention.files import write_atomically
from newtention.io.results import prepare_folder


@dataclass(frozen=True)
class Kind:
    """The files of one kind of result, NAME.json and NAME.safetensors.

    packages: whose versions are recorded.
    """

    name: str
    packages: tuple[str, ...] = ("torch", "numpy")

    @property
    def result(self) -> str:
        """File name of the document."""
        return f"{self.name}.json"

    @property
    def arrays(self) -> str:
        """File name of the arrays."""
        return f"{self.name}.safetensors"

    def prepare(self, folder: Path, force: bool) -> bool:
        """As `prepare_folder`, for a folder that may hold such a result and nothing else."""
        if (folder / self.result).exists() and not force:
            raise FileExistsError(f"{folder} already holds a result; --force replaces it.")
        names = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
        if "result.json" in names:
            raise FileExistsError(f"{folder} holds the result of a fit; choose another folder.")
        return prepare_folder(folder, beside=(self.result, self.arrays))

    def write(
        self, folder: Path, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Write both files, and return the document; NaN and infinity become null in it."""
        from newtention import __version__

        contiguous = {name: t.contiguous() for name, t in tensors.items()}
        data = safetensors.torch.save(contiguous, metadata={"format": "pt"})
        document = _with_null(
            {
                "format": f"newtention-{self.name}",
                "format_version": 1,
                **facts,
                "files": {self.arrays: sha256(data).hexdigest()},
                "versions": {
                    "newtention": __version__,
                    **{package: version(package) for package in self.packages},
                },
            }
        )
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
        write_atomically({folder / self.arrays: data, folder / self.result: text.encode()})
        return document


def _with_null(value: Any) -> Any:
    """JSON has neither NaN nor infinity."""
    if isinstance(value, dict):
        return {name: _with_null(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [_with_null(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
