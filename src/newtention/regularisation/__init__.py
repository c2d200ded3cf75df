"""The path of minima as a ridge falls towards 0."""

from newtention.regularisation.path import regularisation_path
from newtention.regularisation.result import RegularisationPath

__all__ = ["RegularisationPath", "regularisation_path"]
