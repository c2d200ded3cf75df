"""Theorems about attention regression, one per function: bare tensors in, bare tensors out."""
