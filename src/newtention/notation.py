"""Symbols, shapes and conventions shared by every module.

Symbols, with the paper's letter where it differs (Gao, Song, Wang, Yin, arXiv 2309.07418)::

    A1   (n, d1)   query-side tokens        X   (h, d1, d2)   query/key map, W_Q W_K^T per head
    A2   (m, d2)   key-side tokens          Y   (h, d3, p)    value map, W_V W_O per head
    A3   (m, d3)   value-side tokens        B   (n, p)        targets
    S    (h, n, m) logits, scale A1 X A2^T + bias
    P    (h, n, m) attention weights, softmax of S along keys      paper: f(x)_j = alpha^-1 u
    V    (h, m, p) values, A3 Y                                    paper: h(y)
    F    (h, n, p) attended values, P V                            paper: gamma
    C    (n, p)    residual, sum over heads of F minus B           paper: c(x, y)
    q    (n,)      weight of each query row in the loss

Leading axes.  Data lives in chunks whose tensors start with ``(o, s, ...)``: ``o`` independent
problems ("owners") by ``s`` sequences of equal padded length.  Unknowns start with ``(b, ...)``:
one set of weights for each independent problem.  One problem is ``b = 1``.

vec is row-major everywhere (``Tensor.reshape(-1)``), so that

    vec(A1 X A2^T) = (A1 (x) A2) vec(X).

The flat vector of the unknowns holds all X head by head, then all Y head by head.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Array: TypeAlias = Tensor | np.ndarray
ArrayLike: TypeAlias = Any
"""Anything `torch.as_tensor` takes: tensors, NumPy arrays, nested sequences of numbers."""

COMPUTE_DTYPES = (torch.float32, torch.float64)
