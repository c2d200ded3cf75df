"""Newtention fits attention layers by second-order optimisation."""

from newtention import sketch
from newtention.api import Options, solve, solve_many
from newtention.approximate_newton import (
    Contraction,
    ContractionStep,
    contraction,
    paper_regime,
)
from newtention.basin_hopping import BasinHopping, basin_hopping
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
    sample_queries,
)
from newtention.io import load_layer, save_layer
from newtention.layers import BilinearAttention, FactoredAttention, MapAttention, Rotary
from newtention.newton.regime import Regime
from newtention.operators.curvature import CurvatureOperator
from newtention.operators.scipy import ScipyProblem, to_scipy
from newtention.problem import AttentionProblem
from newtention.regression import (
    SoftmaxCertificate,
    SoftmaxRegression,
    certify_softmax,
    softmax_regression,
    softmax_regression_many,
)
from newtention.regression.maps import multiple_softmax_regression
from newtention.regularisation import RegularisationPath, regularisation_path
from newtention.regularizers import Proximity, Regularizer, Ridge, TokenWeights
from newtention.run import Progress
from newtention.selection import SelectedTokens, selected_tokens, selection_problem
from newtention.solution import History, Record, Solution, Status
from newtention.spectra import SpectralDensity, Spectrum, spectrum
from newtention.svm import AttentionSVM, Conflict, SvmStatus, attention_svm

__version__ = "0.1.0"

__all__ = [
    "AttentionProblem",
    "AttentionSVM",
    "Basin",
    "BasinHopping",
    "BilinearAttention",
    "Certificate",
    "Conflict",
    "Contraction",
    "ContractionStep",
    "CurvatureOperator",
    "DerivativeReport",
    "FactoredAttention",
    "Hessian",
    "History",
    "MapAttention",
    "Options",
    "Progress",
    "Proximity",
    "Record",
    "Regime",
    "RegularisationPath",
    "Regularizer",
    "Ridge",
    "Rotary",
    "ScipyProblem",
    "SelectedTokens",
    "SoftmaxCertificate",
    "SoftmaxRegression",
    "Solution",
    "SpectralDensity",
    "Spectrum",
    "Status",
    "SvmStatus",
    "TokenWeights",
    "attention_svm",
    "attention_weights",
    "basin_hopping",
    "certify",
    "certify_softmax",
    "check_derivatives",
    "contraction",
    "gradient",
    "hessian",
    "hessian_operator",
    "keep_heads",
    "load_layer",
    "loss",
    "multiple_softmax_regression",
    "paper_regime",
    "predict",
    "regularisation_path",
    "sample_queries",
    "save_layer",
    "selected_tokens",
    "selection_problem",
    "sketch",
    "softmax_regression",
    "softmax_regression_many",
    "solve",
    "solve_many",
    "spectrum",
    "to_scipy",
    "truncate",
]
