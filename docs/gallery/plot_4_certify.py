"""
Certify a minimum
=================

A solver stops near a minimum. ``certify`` proves that an exact one exists, and how near it is, from
the problem and the weights alone.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

import newtention as nt
from newtention import zoo

problem = zoo.planted(4, 64, noise=0.1, tokens="real", seed=1).problem
solution = nt.solve(problem, n_init=4)
certificate = nt.certify(problem, solution.X, solution.Y)
print(certificate)

# %%
# The proof does not care where the weights come from. We move away from the minimum by a known
# distance, in a random direction, and ask again. The proved distance is never smaller, and on this
# scale it is the same; far away nothing is proved any more.
generator = torch.Generator().manual_seed(0)
theta = solution.layer.theta
direction = torch.randn(theta.shape, generator=generator, dtype=theta.dtype)
direction /= direction.norm()
moved = np.logspace(-6, 0, 13)
proved = []
for size in moved:
    layer = solution.layer.with_theta(theta + size * direction)
    found = nt.certify(problem, layer.X, layer.Y)
    proved.append(found.distance if found.local_minimum == "proved" else np.nan)

figure, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
ax.loglog(moved, moved, color="grey", label="true")
ax.loglog(moved, proved, "o", label="proved")
ax.set(xlabel="distance from the minimum", ylabel="bound on it")
ax.legend()
print(f"proved for {np.isfinite(proved).sum()} of {len(moved)} points")

# %%
# With a strong ridge there is no other stationary point anywhere: the minimum is the global one.
# The certificate of the first problem names a strength that is enough.
strong = problem.with_regularizer(nt.Ridge(1000.0, 1000.0))
fit = nt.solve(strong)
print(nt.certify(strong, fit.X, fit.Y))
