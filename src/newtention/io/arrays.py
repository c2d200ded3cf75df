"""Named arrays in .safetensors and .npz files, and in the packaged examples."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from newtention.examples import find_example
from newtention.inputs import shape_text

EXAMPLE_PREFIX = "example:"
SUFFIXES = (".safetensors", ".npz")


@dataclass(frozen=True)
class ArrayInfo:
    """Shape and type of an array, from the file's header."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        """For example '1204 x 32 float32'."""
        return f"{shape_text(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class ArrayFile:
    """A file whose header has been read.

    label: how messages name it.
    reference: how it is recorded, an absolute path or ``example:NAME``.
    arrays: what it holds, by name.
    """

    path: Path
    label: str
    reference: str
    arrays: dict[str, ArrayInfo]

    def listing(self) -> str:
        """All arrays with their shapes, in one line."""
        if not self.arrays:
            return "no arrays"
        return ", ".join(f"{name!r} ({info})" for name, info in sorted(self.arrays.items()))

    def read(self, name: str) -> Tensor:
        """One array as a tensor of its own type that shares no memory with the file.

        Raises:
            ValueError: no such array, or its bytes are damaged.
            TypeError: the array holds Python objects, text or records.
        """
        if name not in self.arrays:
            raise ValueError(f"{self.label} has no array {name!r}; it holds {self.listing()}.")
        if self.path.suffix.lower() == ".npz":
            return self._read_npz(name)
        with _safetensors(self.path, self.label) as file:
            # The tensor may be a view of the mapped file, which would fail if the file shrank.
            return file.get_tensor(name).clone()

    def _read_npz(self, name: str) -> Tensor:
        kind = self.arrays[name].dtype
        if kind == "object":
            raise TypeError(
                f"{self.label}: array {name!r} holds pickled Python objects, which are never "
                "loaded; save it as an array of numbers."
            )
        try:
            with np.load(self.path, allow_pickle=False) as archive:
                a = archive[name]
        except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(
                f"{self.label}: array {name!r} cannot be read ({_first_line(error)}); the file is "
                "damaged."
            ) from error
        if a.dtype.kind not in "fiub":
            raise TypeError(
                f"{self.label}: array {name!r} must hold real numbers; found {a.dtype.name}."
            )
        if a.dtype.kind in "iu":
            a = a.astype(np.int64)
        elif a.dtype.itemsize > 8:
            a = a.astype(np.float64)
        # torch takes native byte order only.
        return torch.from_numpy(np.ascontiguousarray(a, dtype=a.dtype.newbyteorder("=")))

    def sha256(self) -> str:
        """Hash of the whole file, in hexadecimal."""
        return sha256_of(self.path)


def open_arrays(source: str | Path) -> ArrayFile:
    """Read the header of a .safetensors or .npz file, or of ``example:NAME``.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file.
        OSError: the file cannot be opened.
        ValueError: unknown example or extension, or not a file of that kind.
    """
    text = str(source)
    if text.startswith(EXAMPLE_PREFIX):
        example = find_example(text.removeprefix(EXAMPLE_PREFIX))
        path, label, reference = example.path, text, text
    else:
        path = Path(source).expanduser()
        label, reference = str(path), str(path.absolute())
    if path.is_dir():
        raise IsADirectoryError(f"{label} is a directory; expected a {' or '.join(SUFFIXES)} file.")
    if not path.exists():
        raise FileNotFoundError(f"There is no file {label}.")
    if path.suffix.lower() == ".safetensors":
        arrays = _safetensors_header(path, label)
    elif path.suffix.lower() == ".npz":
        arrays = _npz_header(path, label)
    else:
        raise ValueError(
            f"{label} must end in {' or '.join(SUFFIXES)}; found "
            + (f"{path.suffix!r}." if path.suffix else "no extension.")
        )
    return ArrayFile(path, label, reference, arrays)


def sha256_of(path: Path) -> str:
    """Hash of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _safetensors(path: Path, label: str) -> Any:
    # Opened once by Python first: its errors name the file and the reason, safetensors' do not.
    with path.open("rb"):
        pass
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{label} is not a readable safetensors file ({_first_line(error)}); it is damaged, "
            "incomplete or of another kind."
        ) from error


def _safetensors_header(path: Path, label: str) -> dict[str, ArrayInfo]:
    with _safetensors(path, label) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: ArrayInfo(tuple(part.get_shape()), _spelled_out(part.get_dtype()))
            for name, part in slices.items()
        }


def _spelled_out(dtype: str) -> str:
    """'F32' as 'float32'."""
    if dtype == "BF16":
        return "bfloat16"
    for letter, word in (("F", "float"), ("I", "int"), ("U", "uint")):
        if dtype.startswith(letter):
            return word + dtype[1:].lower()
    return dtype.lower()


def _npz_header(path: Path, label: str) -> dict[str, ArrayInfo]:
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if not member.filename.endswith(".npy"):
                    continue
                with archive.open(member) as file:
                    version = np.lib.format.read_magic(file)
                    read = (
                        np.lib.format.read_array_header_1_0
                        if version == (1, 0)
                        else np.lib.format.read_array_header_2_0
                    )
                    shape, _, dtype = read(file)
                arrays[member.filename.removesuffix(".npy")] = ArrayInfo(shape, dtype.name)
    except (ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{label} is not a readable NumPy .npz archive ({_first_line(error)}); it is damaged, "
            "incomplete or of another kind."
        ) from error
    return arrays


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0].rstrip(".") if text else type(error).__name__
