"""Kronecker-structured sketching: Gram matrices of A1 (x) A2 from few rows, never formed in full.

`LeverageSampling(n1, n2, size, seed=0).apply(A1, A2)` is S (A1 (x) A2), (size, d1 d2).
"""

from newtention.sketch.base import Distribution, Sketch
from newtention.sketch.countsketch import CountSketch
from newtention.sketch.gaussian import Gaussian
from newtention.sketch.hadamard import walsh_hadamard
from newtention.sketch.kinds import KINDS
from newtention.sketch.leverage import LeverageSampling, leverage_scores
from newtention.sketch.quality import Calibration, calibrate, distortion
from newtention.sketch.sizes import size_after_transform, size_for
from newtention.sketch.srht import SRHT
from newtention.sketch.tensor_sketch import TensorSketch
from newtention.sketch.tensor_srht import TensorSRHT

__all__ = [
    "KINDS",
    "SRHT",
    "Calibration",
    "CountSketch",
    "Distribution",
    "Gaussian",
    "LeverageSampling",
    "Sketch",
    "TensorSRHT",
    "TensorSketch",
    "calibrate",
    "distortion",
    "leverage_scores",
    "size_after_transform",
    "size_for",
    "walsh_hadamard",
]
