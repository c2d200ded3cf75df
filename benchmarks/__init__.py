"""Benchmarks of Newtention against autograd, scipy, pytorch-minimize and first-order methods."""
