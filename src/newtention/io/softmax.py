"""The folder of `newtention fit --kind softmax`.

softmax.json          what is known about the run, and where its data are
softmax.safetensors   x and the fitted values
report.html           derived from these and the data
predictions.safetensors, certificate.json
                      written by other commands
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from newtention.certify.certificate import Verdict
from newtention.files import write_atomically
from newtention.inputs import shape_text
from newtention.io.arrays import ArrayFile
from newtention.io.documents import Kind
from newtention.io.names import ArrayNames
from newtention.io.plain import as_history, as_text, read_document, without_null
from newtention.io.results import CERTIFICATE, PREDICTIONS, REPORT
from newtention.io.sources import DTYPES, unchanged_file
from newtention.io.tensors import SourceData
from newtention.regression import SoftmaxCertificate, SoftmaxRegression
from newtention.solution import Status

SOFTMAX = Kind("softmax", derived=(REPORT, PREDICTIONS, CERTIFICATE))
PROOF = "newtention-softmax-certificate"
PROOF_VERSION = 1
_NUMBERS = ("loss", "log10_loss", "data_loss", "penalty", "relative_loss", "seconds", "tol")
_PLAIN = ("success", "message", "form", "iterations", *_NUMBERS)
_SUBJECT = ("files", "source", "sha256", "arrays", "form", "ridge")
"""Fields of the document that a proof is about."""


@dataclass(frozen=True, eq=False)
class SavedSoftmax:
    """A folder with its data.

    A, b: what was fitted.  result: its arrays are torch tensors.  document: softmax.json.
    """

    folder: Path
    A: Float[Tensor, "n d"]
    b: Float[Tensor, " n"]
    result: SoftmaxRegression
    document: dict[str, Any]


def read_softmax_problem(
    file: ArrayFile, matrix: str, target: str | None, dtype: str
) -> SourceData:
    """A (n, d), as the queries, and b (n,), as the targets, by their names in a file.

    target: None for A alone.

    Raises:
        ValueError: there is none of that name, NaN or infinity, or shapes that do not fit.
        TypeError: it holds no real numbers.
    """
    for name, option in ((matrix, "--queries"), (target, "--targets")):
        if name is not None and name not in file.arrays:
            raise ValueError(
                f"{file.label} has no array {name!r}; name it with {option}.  It holds "
                f"{file.listing()}."
            )
    data = SourceData(file, ArrayNames(queries=matrix, targets=target), DTYPES[dtype])
    for role, axes in (("queries", 2), ("targets", 1)):
        t = data.tensors.get(role)
        if t is not None and (t.ndim != axes or t.numel() == 0):
            raise ValueError(
                f"{data.title(role)} must be {axes}-D and not empty; found {shape_text(t.shape)}."
            )
    if target is not None and len(data.tensors["targets"]) != len(data.tensors["queries"]):
        raise ValueError(
            f"{data.title('targets')} must have one entry per row of {matrix!r} (queries, "
            f"{shape_text(data.tensors['queries'].shape)}); found "
            f"{shape_text(data.tensors['targets'].shape)}."
        )
    return data


def write_softmax(folder: Path, result: SoftmaxRegression, about: dict[str, Any]) -> dict[str, Any]:
    """Write the result, and return the document.

    about: where the problem comes from and how it was solved, added to the document.
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


def holds_softmax(folder: Path) -> bool:
    """Whether a folder holds such a result."""
    return (folder / SOFTMAX.result).is_file()


def read_softmax(folder: Path) -> tuple[dict[str, Any], SoftmaxRegression]:
    """The document and the result of a folder, without its data.

    Raises:
        FileNotFoundError: a file of the folder is missing.
        ValueError: a damaged folder.
    """
    document, arrays = SOFTMAX.read(folder)
    with _damage(folder):
        numbers = {name: without_null(document[name], math.inf) for name in _NUMBERS}
        if document["log10_loss"] is None:  # of a loss of 0
            numbers["log10_loss"] = -math.inf
        return document, SoftmaxRegression(
            x=arrays["x"],
            fitted=arrays["fitted"],
            form=document["form"],
            status={status.value: status for status in Status}[document["status"]],
            iterations=document["iterations"],
            history=as_history(document["history"], math.inf),
            start_losses=tuple(without_null(v, math.inf) for v in document["start_losses"]),
            **numbers,
        )


def load_softmax(folder: Path, source: str | Path | None = None) -> SavedSoftmax:
    """Read a folder and its data; `source` is where these are now, if they have moved.

    Raises:
        FileNotFoundError: a file of the folder or the data are missing.
        ValueError: a damaged folder, or data that have changed since the fit.
    """
    document, result = read_softmax(folder)
    with _damage(folder):
        names, dtype = document["arrays"], document["dtype"]
        file = unchanged_file(document["source"], document["sha256"], source)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the fit gave them
            data = read_softmax_problem(file, names["A"], names["b"], dtype)
    x = torch.as_tensor(result.x)
    A, b = (data.tensors[role].to(x) for role in ("queries", "targets"))
    return SavedSoftmax(folder, A, b, result, document)


@contextmanager
def _damage(folder: Path) -> Iterator[None]:
    """Name the document in what is raised about its content."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        where = folder / SOFTMAX.result
        raise ValueError(f"{where} is incomplete or damaged: {error}.") from error


def write_softmax_certificate(
    saved: SavedSoftmax, certificate: SoftmaxCertificate
) -> dict[str, Any]:
    """Write certificate.json into the folder, and return its content.

    It repeats from softmax.json what the proof is about.

    Raises:
        OSError: the folder cannot be written to.
    """
    from newtention import __version__

    document = {
        "format": PROOF,
        "format_version": PROOF_VERSION,
        **_subject(saved.document),
        "versions": {"newtention": __version__, "torch": torch.__version__},
        "certificate": certificate.to_dict(),
    }
    write_atomically({saved.folder / CERTIFICATE: as_text(document)})
    return document


def read_softmax_certificate(saved: SavedSoftmax) -> SoftmaxCertificate | None:
    """The certificate in the folder; None if there is none.

    Raises:
        ValueError: it is damaged, of another version, or belongs to another fit.
        OSError: it cannot be read.
    """
    path = saved.folder / CERTIFICATE
    again = f"newtention certify {saved.folder} writes it anew"
    try:
        document = read_document(path, PROOF, PROOF_VERSION, f"; {again}")
    except FileNotFoundError:
        return None
    if any(document.get(name) != value for name, value in _subject(saved.document).items()):
        raise ValueError(f"{path} belongs to another x or other data than this fit's; {again}.")
    try:
        return _as_certificate(document["certificate"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is incomplete or damaged ({error}); {again}.") from error


def _subject(document: dict[str, Any]) -> dict[str, Any]:
    return {name: document[name] for name in _SUBJECT}


def _as_certificate(record: dict[str, Any]) -> SoftmaxCertificate:
    """The inverse of `SoftmaxCertificate.to_dict`."""
    values: dict[str, Any] = {**record, "reasons": tuple(record["reasons"])}
    for field in fields(SoftmaxCertificate):
        if field.type == "float":
            values[field.name] = float(values[field.name])
    if values["local_minimum"] not in get_args(Verdict):
        raise ValueError(f"local_minimum is {values['local_minimum']!r}")
    return SoftmaxCertificate(**values)
