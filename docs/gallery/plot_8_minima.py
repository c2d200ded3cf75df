"""
Look for a better minimum
=========================

The loss has many local minima. Here targets come from a planted layer, so that the least loss is 0,
and one can see how far from it fits end. Tokens are those of a real sentence encoder.
"""

import matplotlib.pyplot as plt

import newtention as nt
from newtention import zoo

specimen = zoo.planted(4, 256, tokens="real", seed=0)
problem = specimen.problem

# %%
# Sixteen fits from random starts, as one batch. All converge; their losses differ.
restarts = nt.solve(problem, n_init=16)
scale = float(problem.target_energy())
losses = sorted(loss / scale for loss in restarts.start_losses)
print("relative losses", " ".join(f"{loss:.0e}" for loss in losses))

# %%
# Basin hopping goes on from the best of them: it disturbs, fits again on a sample of the rows, and
# keeps what is lower. A relative loss of 1e-29 is that of rounding: the plant.
found = nt.basin_hopping(problem, members=16, rounds=20)
print(found.summary())
print("distance to the planted X", f"{float((found.X - specimen.X).norm()):.0e}")

# %%
# Every fit that started at random, and the one that was looked for.
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.semilogy(range(1, 17), losses, "o", label="random starts")
axes.axhline(found.relative_loss, color="#c0392b", label="basin hopping")
axes.set(xlabel="fit, by its loss", ylabel="relative loss")
axes.legend(frameon=False)
plt.show()
