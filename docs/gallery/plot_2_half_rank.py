"""
A layer with half its head width
================================

A layer of ``torch.nn.MultiheadAttention`` with four heads of width 16 loses half of that width.
First it is truncated, with regard to the activations; then it is refitted to its own outputs,
held-out sequences deciding when to stop.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

import newtention as nt

torch.manual_seed(0)
module = torch.nn.MultiheadAttention(64, 4, batch_first=True)
x = torch.randn(100, 30, 64) @ torch.randn(64, 64) / 8
with torch.no_grad():
    y = module(x, x, x)[0]

# %%
# The layer is read from the module: per head W_Q, W_K, W_V, W_O, and the biases. Its outputs here
# agree with those of the module.
layer = nt.FactoredAttention.from_torch(module)
train = nt.AttentionProblem(x[:80], x[:80], x[:80], y[:80])
held_out = nt.AttentionProblem(x[80:], x[80:], x[80:], y[80:])
print(layer)
print("largest difference of outputs:", f"{(nt.predict(train, layer) - y[:80]).abs().max():.0e}")

# %%
# ``truncate`` keeps the directions that matter for these tokens. As a start it is already useful.
start = nt.truncate(train, layer, ranks=8)
energy = float((y[80:] ** 2).sum()) / 2
print(start)
print(f"held out, after truncation: {nt.loss(held_out, start) / energy:.4f}")

# %%
# A step that does not gain on the held-out sequences is not kept; ``Proximity`` holds back what the
# training tokens hardly show.
near = nt.Proximity(start, 3e-3, isotropic=True)
solution = nt.solve(train.with_regularizer(near), start=start, validation=held_out, max_iter=20)
print(f"held out, after the fit: {solution.validation_loss:.4f}")
print(f"training: {solution.relative_loss:.4f}")

# %%
# Training and held-out error at each iteration. 80 sequences are few for so many weights, so the
# held-out error falls less.
figure, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
trained = np.array(solution.history.column("loss")) / float((y[:80] ** 2).sum() / 2)
ax.plot(trained, label="training, with the penalty")
ax.plot(solution.history.column("validation"), label="held out")
ax.set(xlabel="iteration", ylabel="relative loss", ylim=(0, None))
ax.legend()
