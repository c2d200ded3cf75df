"""The state of a run on disk, so that a killed run can go on as if nothing had happened.

One safetensors file, replaced as a whole after every iteration: tensors of the method and of the
run, and in the metadata, as JSON, what identifies the run (`fingerprint`), the choices it made by
itself, and its history.  It is never unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from newtention.files import write_atomically
from newtention.problem import AttentionProblem

KEY = "newtention_checkpoint"
VERSION = 2


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds.

    choices: what the run decided by itself, such as its method.  run: plain data of the run.
    """

    tensors: dict[str, Tensor]
    choices: dict[str, Any]
    run: dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A place for the state of one run.

    identity: digests and settings that a run must share with the file to continue from it, by name.
    """

    path: Path
    identity: dict[str, str]

    def load(self, device: torch.device) -> Saved | None:
        """The state, or None if there is no file.

        Raises:
            ValueError: the file is damaged, not a checkpoint, or of another run.
            OSError: it cannot be read.
        """
        document = read_document(self.path)
        if document is None:
            return None
        theirs = document["identity"]
        for name in {**self.identity, **theirs}:
            found, mine = (d.get(name, "missing") for d in (theirs, self.identity))
            if found != mine:
                raise ValueError(
                    f"checkpoint {self.path} belongs to another run: its {name} is {found}, this "
                    f"run's {mine}.  Give another path, or delete the file to start again."
                )
        tensors = safetensors.torch.load_file(self.path, device=str(device))
        if digest(tensors[name] for name in sorted(tensors)) != document["digest"]:
            raise ValueError(f"checkpoint {self.path} is damaged; delete it to start again.")
        return Saved(tensors, document["choices"], document["run"])

    def save(self, saved: Saved) -> None:
        """Replace the file.

        Raises:
            OSError: it cannot be written; the old one stays.
        """
        # Cloned, since tensors of a state may share memory, which the format refuses.
        tensors = {name: t.detach().cpu().clone() for name, t in saved.tensors.items()}
        document = {
            "version": VERSION,
            "digest": digest(tensors[name] for name in sorted(tensors)),
            "identity": self.identity,
            "choices": saved.choices,
            "run": saved.run,
        }
        data = safetensors.torch.save(tensors, metadata={KEY: json.dumps(document)})
        write_atomically({self.path: data})


def read_document(path: Path) -> dict[str, Any] | None:
    """The JSON of a checkpoint, or None if there is no file.

    Raises:
        ValueError: it is damaged or not a checkpoint.
    """
    if not path.exists():
        if not path.parent.is_dir():
            raise FileNotFoundError(f"There is no folder {path.parent} for the checkpoint.")
        return None
    if path.is_dir():
        raise IsADirectoryError(f"checkpoint must be a file; {path} is a directory.")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(KEY)
    except SafetensorError as error:
        raise ValueError(
            f"checkpoint {path} is damaged or of another kind ({error}); delete it to start again."
        ) from error
    document = None
    if text is not None:
        try:
            document = json.loads(text)
        except ValueError:
            document = None
    parts = ("identity", "choices", "run")
    if not isinstance(document, dict) or any(not isinstance(document.get(p), dict) for p in parts):
        raise ValueError(f"checkpoint {path} was not written by Newtention; give another path.")
    if document.get("version") != VERSION:
        raise ValueError(
            f"checkpoint {path} has version {document.get('version')}; this version of Newtention "
            f"reads {VERSION}."
        )
    return document


def digest(tensors: Iterable[Tensor | None]) -> str:
    """A hash of tensors: shapes, types and bits, in order."""
    h = hashlib.sha256()
    for t in tensors:
        if t is None:
            h.update(b"none")
            continue
        h.update(f"{tuple(t.shape)} {t.dtype}".encode())
        h.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()[:16]


def problem_digest(problem: AttentionProblem) -> str:
    """A hash of everything that a problem's loss depends on."""
    tensors: list[Tensor | None] = []
    for c in problem.chunks:
        tensors += [c.A1, c.A2, c.A3, c.B, c.weight, c.owner, c.bias, c.key_weight]
        tensors += [c.mask.key_lengths, c.mask.explicit]
        tensors.append(torch.tensor([float(c.mask.causal), c.scale], dtype=torch.float64))
    q = problem.quadratic
    tensors += [q.left, q.right, q.gram, q.centre_x, q.centre_y]
    parts = problem.parts or (problem,)
    regularizers = [p.regularizer for p in parts]
    for r in regularizers:
        tensors.append(getattr(getattr(r, "reference", None), "theta", None))
    words = json.dumps([None if r is None else r.describe() for r in regularizers])
    return digest([*tensors, torch.tensor(list(words.encode()))])


def run_identity(
    problem: AttentionProblem, theta: Tensor, settings: Mapping[str, object]
) -> dict[str, str]:
    """What a run must share with a checkpoint to continue from it."""
    return {
        "data": problem_digest(problem),
        **{name: str(value) for name, value in settings.items()},
        "device": problem.like.device.type,
        "number of threads": str(torch.get_num_threads()),
        "start": digest([theta]),
    }
