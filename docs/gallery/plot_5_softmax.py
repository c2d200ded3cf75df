"""
Softmax regression and an attention map
=======================================

The paper's smaller problems: one row of attention, ``softmax(A x) = b``, and a whole attention map,
``softmax(A1 X A2^T) = B``, with no values behind it.
"""

import numpy as np

import newtention as nt
from newtention import plots
from newtention.examples import KEYPOINTS
from newtention.io import open_arrays

rng = np.random.default_rng(0)
A, x = rng.normal(size=(500, 6)), rng.normal(size=6) / 2
b = np.exp(A @ x)
b /= b.sum()
fit = nt.softmax_regression(A, b)
print(f"x found to {abs(fit.x - x).max():.0e}, {fit.iterations} iterations")

# %%
# With noise on ``b`` there is no exact ``x``. The minimum found is proved to be one.
noisy = b * np.exp(0.5 * rng.normal(size=500))
noisy /= noisy.sum()
fit = nt.softmax_regression(A, noisy)
print(f"relative loss {fit.relative_loss:.3f}")
print("local minimum:", nt.certify_softmax(A, noisy, fit.x).local_minimum)

# %%
# Now a real map: 256 keypoints of a photograph attend to 256 of its rotated copy (layer 0 of the
# matcher LighterGlue). How well do 12 leading directions of the tokens explain where they look?
file = open_arrays(KEYPOINTS)
queries, keys, W, bias = (
    file.read(name).double().numpy() for name in ("queries", "keys", "to_qk_W", "to_qk_b")
)
logits = (queries @ W + bias) @ (keys @ W + bias).T / 96**0.5
B = np.exp(logits - logits.max(1, keepdims=True))
B /= B.sum(1, keepdims=True)


def leading(tokens, k):
    """The k leading directions of the tokens and a constant."""
    centred = tokens - tokens.mean(0)
    return np.hstack([centred @ np.linalg.svd(centred)[2][:k].T, np.ones((len(tokens), 1))])


A1, A2 = leading(queries, 12), leading(keys, 12)
solution = nt.multiple_softmax_regression(A1, A2, B, ridge=1e-6, method="newton")
print(solution)

# %%
# The first 40 keypoints and their matches, the real map on the left.
problem = nt.AttentionProblem.from_maps(A1, A2, B)
fitted = nt.attention_weights(problem, solution.layer)
figure = plots.attention(B[:40, :40], fitted[:40, :40], labels=("The layer", "12 directions"))
