"""The folder of `newtention fit --kind softmax`.

softmax.json          what is known about the run, and where its data are
softmax.safetensors   x and the fitted values
report.html           derived from these and the data
certificate.json      what was proved about x
"""

from __future__ import annotations

import math
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
from newtention.io.plain import as_history, as_text, read_document, without_null
from newtention.io.results import CERTIFICATE, REPORT
from newtention.io.sources import DTYPES, unchanged_file
from newtention.regression import SoftmaxCertificate, SoftmaxRegression
from newtention.solution import Status

SOFTMAX = Kind("softmax", derived=(REPORT, CERTIFICATE))
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
    file: ArrayFile, matrix: str, target: str, dtype: str
) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"]]:
    """A and b by their names in a file.

    Raises:
        ValueError: there is none of that name, or it has another number of axes.
        TypeError: it holds no numbers.
    """
    read = []
    for name, axes, option in ((matrix, 2, "--queries"), (target, 1, "--targets")):
        if name not in file.arrays:
            raise ValueError(
                f"{file.label} has no array {name!r}; name it with {option}.  It holds "
                f"{file.listing()}."
            )
        t = file.read(name)
        if t.ndim != axes:
            raise ValueError(
                f"{file.label}: array {name!r} must be {axes}-D; found {shape_text(t.shape)}."
            )
        read.append(t.to(DTYPES[dtype]) if t.is_floating_point() else t)
    return read[0], read[1]


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


def load_softmax(folder: Path, source: str | Path | None = None) -> SavedSoftmax:
    """Read a folder and its data; `source` is where these are now, if they have moved.

    Raises:
        FileNotFoundError: a file of the folder or the data are missing.
        ValueError: a damaged folder, or data that have changed since the fit.
    """
    document, arrays = SOFTMAX.read(folder)
    try:
        numbers = {name: without_null(document[name], math.inf) for name in _NUMBERS}
        if document["log10_loss"] is None:  # of a loss of 0
            numbers["log10_loss"] = -math.inf
        result = SoftmaxRegression(
            x=arrays["x"],
            fitted=arrays["fitted"],
            form=document["form"],
            status={status.value: status for status in Status}[document["status"]],
            iterations=document["iterations"],
            history=as_history(document["history"], math.inf),
            start_losses=tuple(without_null(v, math.inf) for v in document["start_losses"]),
            **numbers,
        )
        names, dtype = document["arrays"], document["dtype"]
        place = document["source"] if source is None else source
        file = unchanged_file(place, document["sha256"])
        A, b = read_softmax_problem(file, names["A"], names["b"], dtype)
    except (KeyError, TypeError, AttributeError) as error:
        where = folder / SOFTMAX.result
        raise ValueError(f"{where} is incomplete or damaged: {error}.") from error
    return SavedSoftmax(folder, A.to(arrays["x"]), b.to(arrays["x"]), result, document)


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
