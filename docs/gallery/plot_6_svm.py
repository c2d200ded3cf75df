"""
Attention as a support vector machine
=====================================

Which smallest ``X`` gives every query the key that a real layer prefers? That is a support vector
machine over pairs of tokens. The data are the 256 + 256 keypoints of a photograph and its rotated
copy, packaged with Newtention.
"""

import matplotlib.pyplot as plt
import numpy as np

import newtention as nt
from newtention.examples import KEYPOINTS
from newtention.io import open_arrays

file = open_arrays(KEYPOINTS)
queries, keys, W, bias = (
    file.read(name).double().numpy() for name in ("queries", "keys", "to_qk_W", "to_qk_b")
)
logits = (queries @ W + bias) @ (keys @ W + bias).T
selected = logits.argmax(1)
svm = nt.attention_svm(queries, keys, selected)
print(svm.summary())

# %%
# Of 65,280 constraints a few hundred hold X in place. Every selected key now leads by at least 1;
# the queries that are on the margin are the support.
lead = queries @ svm.X @ keys.T
best = lead[np.arange(256), selected]
lead[np.arange(256), selected] = -np.inf
lead = best - lead.max(1)

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
left.hist(lead, 40, color="#0072b2")
left.set(xlabel="lead of the selected key", ylabel="queries")
right.semilogy(np.linalg.svd(svm.X, compute_uv=False), ".", color="#0072b2")
right.set(xlabel="rank", ylabel="singular values of X")

# %%
# A wish that cannot be granted, on the first 64 keypoints: key 0 is moved half way between keys 1
# and 2, so its logit is always the mean of theirs. The conflict is named, with a proof; with slack
# the others still get their keys.
queries, keys = queries[:64], keys[:64].copy()
keys[0] = (keys[1] + keys[2]) / 2
selected = ((queries @ W + bias) @ (keys @ W + bias).T).argmax(1)
selected[5] = 0
asked = nt.attention_svm(queries, keys, selected)
print(asked.status.value)
print(asked.conflict.summary())
soft = nt.attention_svm(queries, keys, selected, soft=10.0)
print("queries that fall short:", np.flatnonzero(soft.slack > 1e-6))
