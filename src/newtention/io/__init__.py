"""Files: reading problems from arrays on disk, writing and reading result folders.

`arrays` reads .safetensors and .npz files, `names` decides which array plays which role, `tensors`
checks them, `sources` builds the problem and records how (`Provenance`), `results` writes and reads
the folder of a fit, `certificates` what was proved about it, `layers` the weights of a layer.
Nothing here unpickles.
"""

from newtention.io.arrays import ArrayFile, ArrayInfo, open_arrays
from newtention.io.certificates import read_certificate, write_certificate
from newtention.io.layers import load_layer, save_layer
from newtention.io.names import ABSENT, ArrayNames
from newtention.io.results import (
    SavedResult,
    load_result,
    prepare_folder,
    read_result,
    write_array,
    write_result,
)
from newtention.io.sources import Provenance, load_problem, recorded_file, reload_problem

__all__ = [
    "ABSENT",
    "ArrayFile",
    "ArrayInfo",
    "ArrayNames",
    "Provenance",
    "SavedResult",
    "load_layer",
    "load_problem",
    "load_result",
    "open_arrays",
    "prepare_folder",
    "read_certificate",
    "read_result",
    "recorded_file",
    "reload_problem",
    "save_layer",
    "write_array",
    "write_certificate",
    "write_result",
]
