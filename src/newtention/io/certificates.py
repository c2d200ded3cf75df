"""certificate.json: what was proved about the weights of a result folder.

It repeats from result.json what the proof is about: the hash of the weights, the data with their
hash, mask, scale and regulariser.  A certificate that says anything else belongs to another fit.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from newtention.certify.certificate import Certificate, Verdict
from newtention.files import write_atomically
from newtention.io.plain import as_text, read_document
from newtention.io.results import CERTIFICATE, REFERENCE, WEIGHTS

FORMAT = "newtention-certificate"
FORMAT_VERSION = 1


def write_certificate(
    folder: str | Path, certificate: Certificate, result: dict[str, Any], **settings: object
) -> dict[str, Any]:
    """Write certificate.json into a result folder, replacing an earlier one.

    Args:
        folder: of the result.
        certificate: of its weights.
        result: content of its result.json, as `load_result` returned it for the certified weights.
        settings: of the computation, to record.

    Returns:
        The content of certificate.json: format, format_version, weights (sha256 of
        weights.safetensors), reference, provenance, regularizer, the settings, versions, and
        certificate, for `Certificate.from_dict`.

    Raises:
        OSError: the folder cannot be written to.
    """
    from newtention import __version__

    document = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **_subject(result),
        **settings,
        "versions": {
            "newtention": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "certificate": certificate.to_dict(),
    }
    write_atomically({Path(folder) / CERTIFICATE: as_text(document)})
    return document


def read_certificate(folder: str | Path, result: dict[str, Any]) -> Certificate | None:
    """The certificate in a result folder; None if it has none.

    Args:
        folder: of the result.
        result: content of its result.json, as `load_result` returns it.

    Raises:
        ValueError: it is damaged, of another version, or belongs to another fit.
        OSError: it cannot be read.
    """
    path = Path(folder) / CERTIFICATE
    again = f"newtention certify {folder} writes it anew"
    try:
        document = read_document(path, FORMAT, FORMAT_VERSION, f"; {again}")
    except FileNotFoundError:
        return None
    if any(document.get(name) != value for name, value in _subject(result).items()):
        raise ValueError(f"{path} belongs to other weights or data than this fit's; {again}.")
    try:
        certificate = Certificate.from_dict(document["certificate"])
        _require_sense(certificate)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is incomplete or damaged ({error}); {again}.") from error
    return certificate


def _subject(result: dict[str, Any]) -> dict[str, Any]:
    """Weights and problem of a fit; the layer that it began from does not matter."""
    return {
        "weights": result["files"][WEIGHTS],
        "reference": result["files"].get(REFERENCE),
        "provenance": result["provenance"],
        "regularizer": result["regularizer"],
    }


def _require_sense(certificate: Certificate) -> None:
    """Raise ValueError for a field that is not what it should be."""
    for part in (certificate, certificate.basin):
        for field in fields(part) if part is not None else ():
            value = getattr(part, field.name)
            numeric = isinstance(value, int | float)
            fits = {
                "Verdict": value in get_args(Verdict),
                "float": numeric,
                "int": numeric,
                "float | None": numeric or value is None,
            }
            if not fits.get(str(field.type), True):
                raise ValueError(f"{field.name} is {value!r}")
