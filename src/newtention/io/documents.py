"""A JSON document with its arrays in a safetensors file beside it: results other than a fit's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from newtention.files import write_atomically
from newtention.io.arrays import open_arrays
from newtention.io.plain import as_text, read_document, with_null
from newtention.io.results import RESULT, prepare_folder

VERSION = 1


@dataclass(frozen=True)
class Kind:
    """The files of one kind of result, NAME.json and NAME.safetensors.

    packages: whose versions are recorded.
    derived: files that other commands make from a result; out of date once it is replaced.
    """

    name: str
    packages: tuple[str, ...] = ("torch", "numpy")
    derived: tuple[str, ...] = ()

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
        if RESULT in names:
            raise FileExistsError(f"{folder} holds the result of a fit; choose another folder.")
        return prepare_folder(folder, beside=(self.result, self.arrays, *self.derived))

    def write(
        self, folder: Path, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Write both files, and return the document; NaN and infinity become null in it.

        What was derived from an earlier result is removed.
        """
        from newtention import __version__

        contiguous = {name: t.contiguous() for name, t in tensors.items()}
        data = safetensors.torch.save(contiguous, metadata={"format": "pt"})
        document = with_null(
            {
                "format": self._format,
                "format_version": VERSION,
                **facts,
                "files": {self.arrays: sha256(data).hexdigest()},
                "versions": {
                    "newtention": __version__,
                    **{package: version(package) for package in self.packages},
                },
            }
        )
        for derived in self.derived:
            (folder / derived).unlink(missing_ok=True)
        write_atomically({folder / self.arrays: data, folder / self.result: as_text(document)})
        return document

    def read(self, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The document and the arrays.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: the folder holds another format or version, or is damaged.
        """
        try:
            document = read_document(folder / self.result, self._format, VERSION)
        except FileNotFoundError:
            raise FileNotFoundError(f"{folder} holds no {self.result}.") from None
        file = open_arrays(folder / self.arrays)
        if file.sha256() != document.get("files", {}).get(self.arrays):
            raise ValueError(f"{file.label} does not belong to the {self.result} beside it.")
        return document, {name: file.read(name) for name in file.arrays}

    @property
    def _format(self) -> str:
        return f"newtention-{self.name}"
