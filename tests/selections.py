"""Tokens with a key for every query, and the layers' plain definition of what they select."""

import numpy as np


def planted(n, m, d, seed=0):
    """Gaussian tokens and a selection that some X makes."""
    rng = np.random.default_rng(seed)
    A1, A2 = rng.normal(size=(n, d)), rng.normal(size=(m, d))
    return A1, A2, (A1 @ rng.normal(size=(d, d)) @ A2.T).argmax(1)


def selection_of(logits):
    """Key of the largest logit, its lead over the others and its weight, row by row."""
    ordered = np.sort(logits, -1)
    weights = np.exp(logits - ordered[..., -1:])
    lead = ordered[..., -1] - ordered[..., -2] if logits.shape[-1] > 1 else np.inf
    return logits.argmax(-1), lead, 1 / weights.sum(-1)
