"""Attention as a support vector machine: the smallest X that selects given keys by a margin.

`pairs` holds the constraints without forming them, `programs` solves over a few, `generation` finds
which few, `conflicts` says why there is no X, `solve` is the function that users call.
"""

from newtention.svm.result import AttentionSVM, Conflict, SvmStatus
from newtention.svm.solve import attention_svm

__all__ = ["AttentionSVM", "Conflict", "SvmStatus", "attention_svm"]
