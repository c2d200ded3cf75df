"""Newtention fits attention layers by second-order optimisation."""

from newtention.api import Options, solve, solve_many
from newtention.functions import (
    DerivativeReport,
    Hessian,
    ScipyProblem,
    attention_weights,
    check_derivatives,
    gradient,
    hessian,
    loss,
    predict,
    to_scipy,
)
from newtention.problem import AttentionProblem
from newtention.regularizers import Proximity, Regularizer, Ridge, TokenWeights
from newtention.run import Progress
from newtention.solution import History, Record, Solution, Status

__version__ = "0.1.0"

__all__ = [
    "AttentionProblem",
    "DerivativeReport",
    "Hessian",
    "History",
    "Options",
    "Progress",
    "Proximity",
    "Record",
    "Regularizer",
    "Ridge",
    "ScipyProblem",
    "Solution",
    "Status",
    "TokenWeights",
    "attention_weights",
    "check_derivatives",
    "gradient",
    "hessian",
    "loss",
    "predict",
    "solve",
    "solve_many",
    "to_scipy",
]
