"""
Attention as a support vector machine
=====================================

Which smallest ``X`` gives every query the key that a real layer prefers? That is a support vector
machine over pairs of tokens. The layer is the first cross-attention of the keypoint matcher
LighterGlue, on 256 + 256 keypoints of a photograph and its rotated copy, packaged with Newtention:
a keypoint's query picks its partner in the other image.
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
partner = logits.argmax(1)
matched = np.flatnonzero(logits.argmax(0)[partner] == np.arange(256))  # they pick each other
print(f"{len(matched)} of 256 keypoints and their partners pick each other")

# %%
# The smallest ``X`` with these matches. Of its constraints, one for every match and other key, a
# few hundred hold it in place.
A1, selected = queries[matched], partner[matched]
svm = nt.attention_svm(A1, keys, selected)
print(svm.summary())
print(f"constraints: {len(A1) * (len(keys) - 1)}")

# %%
# Does such an ``X`` exist for any wishes? With directions enough, yes: the same keys dealt out at
# random can be had as well, by a smaller margin. On fewer, the leading ones of the tokens, the real
# matches remain possible where shuffled ones contradict each other: the layer's choice has few
# dimensions.


def leading(tokens, k):
    """The k leading directions of the tokens and a constant."""
    centred = tokens - tokens.mean(0)
    return np.hstack([centred @ np.linalg.svd(centred)[2][:k].T, np.ones((len(tokens), 1))])


shuffled = np.random.default_rng(0).permutation(selected)
counts, margins = (12, 16, 24, 32, 48), {"the layer's": [], "shuffled": []}
for k in counts:
    Q, K = leading(queries, k)[matched], leading(keys, k)
    for name, wanted in (("the layer's", selected), ("shuffled", shuffled)):
        margins[name].append(nt.attention_svm(Q, K, wanted).margin)

lead = A1 @ svm.X @ keys.T
best = lead[np.arange(len(A1)), selected]
lead[np.arange(len(A1)), selected] = -np.inf
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
left.hist(best - lead.max(1), 30, color="#0072b2")
left.set(xlabel="lead of the selected key", ylabel="queries")
for (name, values), colour in zip(margins.items(), ("#0072b2", "#d55e00"), strict=True):
    right.plot(counts, values, "o-", color=colour, label=name)
right.set(xlabel="directions", ylabel="margin (0: contradiction)")
right.legend(frameon=False)
print({name: [round(float(m), 3) for m in values] for name, values in margins.items()})

# %%
# A margin is no generalisation. Made for two thirds of the matches, the smallest ``X`` finds some
# of the others, each among 256 keys, but far fewer than the keypoints' own similarity, ``X = I``:
# 84 matches do not tell 9,216 numbers.
order = np.random.default_rng(0).permutation(len(matched))
seen, unseen = order[: 2 * len(order) // 3], order[2 * len(order) // 3 :]
learned = nt.attention_svm(A1[seen], keys, selected[seen]).X
for name, X in (("learned", learned), ("identity", np.eye(96)), ("the layer's", W @ W.T)):
    found = (A1[unseen] @ X @ keys.T).argmax(1) == selected[unseen]
    print(f"{name:12} finds {found.sum()} of {len(unseen)} unseen partners")

# %%
# A wish that cannot be granted: key 0 is moved half way between keys 1 and 2, so its logit is
# always the mean of theirs, and the first query is to select it. The conflict is named, with a
# proof; with slack only two queries fall short of the margin.
moved, wish = keys[:64].copy(), logits[:64, :64].argmax(1)
moved[0] = (keys[1] + keys[2]) / 2
wish[0] = 0
asked = nt.attention_svm(queries[:64], moved, wish)
print(asked.status.name.lower(), "-", asked.conflict.summary())
soft = nt.attention_svm(queries[:64], moved, wish, soft=10.0)
print("queries that fall short:", np.flatnonzero(soft.slack > 1e-6))
