"""
Compare methods on one problem
==============================

One problem and one start, not far from a minimum, for four methods: dense Newton, matrix-free
Newton, and two trust-region methods of scipy, which get our loss and derivatives through
``to_scipy``.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.optimize import minimize

import newtention as nt
from newtention import zoo

problem = zoo.planted(4, 64, noise=0.1, tokens="real", seed=1).problem
best = nt.solve(problem, n_init=8)
generator = torch.Generator().manual_seed(0)
noise = torch.randn(best.X.shape, generator=generator, dtype=torch.float64)
start = nt.solve(problem, start=best.X + 0.3 * best.X.std() * noise, max_iter=0).layer
options = nt.Options(curvature="full")
losses = {}
for method in ("newton", "newton-cg"):
    solution = nt.solve(problem, start=start, method=method, options=options)
    losses[method] = np.array(solution.history.column("loss"))
    print(f"{method:<12} loss {solution.loss:.8f}, {solution.iterations} iterations")

# %%
# scipy's minimisers take a flat vector. ``trust-exact`` factors the dense Hessian, ``trust-ncg``
# only multiplies by it.
s = nt.to_scipy(problem, start=start)
for method, curvature in (("trust-exact", {"hess": s.hess}), ("trust-ncg", {"hessp": s.hessp})):
    points = [s.x0]
    keep = points.append
    found = minimize(
        s.fun, s.x0, jac=s.jac, method=method, callback=keep, options={"gtol": 1e-8}, **curvature
    )
    losses[method] = np.array([s.fun(x) for x in points])
    print(f"{method:<12} loss {found.fun:.8f}, {found.nit} iterations")

# %%
# From here all reach the same minimum, dense Newton and the exact trust region with quadratic
# convergence at the end; from farther away they may end in different ones. An iteration is not the
# same work for all: ``make bench`` compares seconds.
lowest = min(path.min() for path in losses.values())
figure, ax = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
for method, path in losses.items():
    ax.semilogy(path - lowest + 1e-15, label=method)
ax.set(xlabel="iteration", ylabel="loss above the lowest found", ylim=(1e-13, None))
ax.legend()
