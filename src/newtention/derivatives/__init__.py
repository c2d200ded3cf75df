"""Derivatives of the data loss and of the total, for the bilinear parametrisation."""
