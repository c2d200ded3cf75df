"""
Fit a real head and look at it
==============================

One head of a sentence encoder (all-MiniLM-L6-v2, layer 3, head 4) on 40 sentences. The packaged
tokens are 31 leading directions and a constant; to be quick, this page keeps 15 of them and the
constant, and looks for the head on these that comes nearest to the outputs of the real one.
"""

import numpy as np

import newtention as nt
from newtention import plots
from newtention.io import open_arrays

file = open_arrays("example:minilm-head")
tokens, targets, offsets = (
    file.read(name).double().numpy() for name in ("tokens", "head_output", "offsets")
)
A = np.hstack([tokens[:, :15], tokens[:, -1:]])
print(A.shape, targets.shape, "in", len(offsets) - 1, "sentences")

# %%
# Sentences of different lengths go in concatenated, with offsets. A small ridge holds back the
# directions that 1,204 tokens hardly show.
problem = nt.AttentionProblem.from_ragged(
    A, targets, offsets=offsets.astype(int), regularizer=nt.Ridge(0.1, 0.1)
)
solution = nt.solve(problem, method="newton")
print(solution.status, f"after {solution.iterations} iterations")
print(f"relative loss {solution.relative_loss:.4f}")
print(f"Newton decrement {solution.history[-1].decrement:.0e}")

# %%
# The Gauss-Newton matrix leads near a minimum, then the full Hessian takes over: the last few
# points fall as only quadratic convergence does.
figure = plots.convergence(solution)

# %%
# Where did the queries of one sentence look before and after? Rows sum to one.
before, after = (
    nt.attention_weights(problem, layer, sequence=3) for layer in (solution.start, solution.layer)
)
maps = plots.attention(before, after)

# %%
# The error of each token's output, relative to its length. A relative error of 1 is no better than
# zero.
missed = np.linalg.norm(nt.predict(problem, solution.layer) - targets, axis=1)
sentence = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets.astype(int)))
errors = plots.errors(missed / np.linalg.norm(targets, axis=1), sentence)
