"""Newtention fits attention layers by second-order optimisation."""

from newtention import sketch
from newtention.api import Options, solve, solve_many
from newtention.certify import Basin, Certificate, certify
from newtention.compression import keep_heads, truncate
from newtention.functions import (
    DerivativeReport,
    Hessian,
    attention_weights,
    check_derivatives,
    gradient,
    hessian,
    hessian_operator,
    loss,
    predict,
)
from newtention.io import load_layer, save_layer
from newtention.layers import BilinearAttention, FactoredAttention, Rotary
from newtention.operators.curvature import CurvatureOperator
from newtention.operators.scipy import ScipyProblem, to_scipy
from newtention.problem import AttentionProblem
from newtention.regularizers import Proximity, Regularizer, Ridge, TokenWeights
from newtention.run import Progress
from newtention.solution import History, Record, Solution, Status
from newtention.spectra import SpectralDensity, Spectrum, spectrum
from newtention.svm import AttentionSVM, Conflict, SvmStatus, attention_svm

__version__ = "0.1.0"

__all__ = [
    "AttentionProblem",
    "AttentionSVM",
    "Basin",
    "BilinearAttention",
    "Certificate",
    "Conflict",
    "CurvatureOperator",
    "DerivativeReport",
    "FactoredAttention",
    "Hessian",
    "History",
    "Options",
    "Progress",
    "Proximity",
    "Record",
    "Regularizer",
    "Ridge",
    "Rotary",
    "ScipyProblem",
    "Solution",
    "SpectralDensity",
    "Spectrum",
    "Status",
    "SvmStatus",
    "TokenWeights",
    "attention_svm",
    "attention_weights",
    "certify",
    "check_derivatives",
    "gradient",
    "hessian",
    "hessian_operator",
    "keep_heads",
    "load_layer",
    "loss",
    "predict",
    "save_layer",
    "sketch",
    "solve",
    "solve_many",
    "spectrum",
    "to_scipy",
    "truncate",
]
