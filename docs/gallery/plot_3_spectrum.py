"""
Hessian spectrum of a fitted head
=================================

At a minimum the eigenvalues of the Hessian say which directions of the weights the data determine.
With the closed form all of them are at hand for problems of a few thousand unknowns.
"""

import numpy as np

import newtention as nt
from newtention import plots, zoo

problem = zoo.planted(8, 256, noise=0.1, tokens="real", seed=1).problem
solution = nt.solve(problem, n_init=8)
print(solution)

# %%
# 128 unknowns: the dense Hessian and its eigenvalues. At the random start there are negative ones,
# directions along which the loss falls ever faster; at the minimum there are none.
at_start, at_end = (
    np.linalg.eigvalsh(nt.hessian(problem, layer).to_dense())
    for layer in (solution.start, solution.layer)
)
print(f"start: {(at_start < 0).sum()} negative, smallest {at_start[0]:.2g}")
print(f"end:   {(at_end < 0).sum()} negative, smallest {at_end[0]:.2g}, largest {at_end[-1]:.2g}")
spectrum = plots.spectrum(at_end)

# %%
# The Gauss-Newton matrix is never indefinite. Where the residual is small it is close to the
# Hessian: the large eigenvalues agree, the small ones need not.
gauss_newton = np.linalg.eigvalsh(
    nt.hessian(problem, solution.layer, kind="gauss-newton").to_dense()
)
change = abs(gauss_newton / at_end - 1)[::-1]
print(f"relative change: the largest ten {change[:10].max():.3f}, all {change.max():.1f}")

# %%
# Without a matrix: a few eigenvalues at both ends with error bounds, and the trace, from products
# alone. This works for layers of any size; here the problem is small and is solved densely.
print(nt.spectrum(problem, solution.layer, k=3).summary())
