"""
Softmax regression and a real attention map
===========================================

The paper's smaller problems: one row of attention, ``softmax(A x) = b``, and whole attention maps,
``softmax(A1 X A2^T) = B``, with no values behind them. The maps are those of a head of the sentence
encoder all-MiniLM-L6-v2 (layer 3, head 4) on 32 sentences, packaged with Newtention.
"""

from itertools import pairwise

import numpy as np

import newtention as nt
from newtention import plots
from newtention.examples import MAPS
from newtention.io import open_arrays

head, file = open_arrays("example:minilm-head"), open_arrays(MAPS)
maps, layers_own = (file.read(name).double().numpy() for name in ("maps", "X"))
offsets = file.read("offsets").numpy()
tokens = head.read("tokens").double().numpy()[: offsets[-1]]  # 31 directions and a constant
print(f"{len(offsets) - 1} sentences, {len(tokens)} tokens")

# %%
# One row: where does the fourth token of the longest sentence look? 64 weights, 32 unknowns. With
# so few weights a ridge is needed to make the answer unique; that it is a minimum is then proved.
longest = int(np.diff(offsets).argmax())
rows = slice(offsets[longest], offsets[longest + 1])
A, b = tokens[rows], maps[rows][3]
fit = nt.softmax_regression(A, b / b.sum(), ridge=1e-4)
print(fit)
print(nt.certify_softmax(A, b / b.sum(), fit.x, ridge=1e-4).summary())
figure = plots.probabilities(fit.fitted, b)

# %%
# All rows share one ``X``. It is fitted to the maps of 24 sentences, from ``X = 0``, and looked at
# on the other eight. For comparison: attention spread evenly (``X = 0``), and the head's own
# ``X``, which sees only 31 directions of the tokens here while the maps come from all 384.
cut = offsets[24]


def problem(part, first, **settings):
    """The sentences from number `first` on."""
    own = offsets[first : first + (24 if first == 0 else 8) + 1]
    return nt.AttentionProblem.from_ragged_maps(
        tokens[part], maps[part], offsets=own - own[0], **settings
    )


seen = problem(slice(cut), 0, regularizer=nt.Ridge(x=1e-2))
held_out = problem(slice(cut, None), 24)
solution = nt.solve(seen)
print(solution)
energy = np.square(maps[cut:]).sum() / 2
for name, X in (
    ("evenly spread", np.zeros((32, 32))),
    ("fitted", solution.X),
    ("the head's own", layers_own),
):
    print(f"{name:14} relative loss on unseen sentences {nt.loss(held_out, X) / energy:.4f}")

# %%
# The maps alone tell nearly all about the head: on sentences that the fit has not seen, an error of
# a few percent of the energy is left. Below, the unseen sentence that is fitted worst: most of the
# weight lies on the first token, and of the fainter columns some are found and some are not.
pairs = []
for i, (a, b) in enumerate(pairwise(offsets[24:])):
    pairs.append((maps[a:b, : b - a], nt.attention_weights(held_out, solution.X, sequence=i)))
errors = [np.square(real - found).sum() / np.square(real).sum() for real, found in pairs]
print("relative losses, sentence by sentence:", np.round(errors, 3))
worst = int(np.argmax(errors))
figure = plots.attention(*pairs[worst], labels=("The head", "Fitted to other sentences"))
