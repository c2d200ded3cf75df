"""Softmax regression: one softmax fitted to one target, plain and rescaled."""

from newtention.regression.certificate import SoftmaxCertificate, certify_softmax
from newtention.regression.fit import softmax_regression, softmax_regression_many
from newtention.regression.result import SoftmaxRegression

__all__ = [
    "SoftmaxCertificate",
    "SoftmaxRegression",
    "certify_softmax",
    "softmax_regression",
    "softmax_regression_many",
]
