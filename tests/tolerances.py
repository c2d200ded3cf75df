"""Relative tolerances by quantity and dtype, against the autograd oracle in float64.

Errors are relative to the largest entry of the expected array (see `checks.require_close`).  A
value is loosened only with a reason beside it.
"""

import torch

EXACT = {torch.float64: 1e-10, torch.float32: 2e-5}
"""Closed forms: rounding of a few products of length up to 100."""

SATURATED = {torch.float64: 1e-10, torch.float32: 1e-3}
"""Logits of 500 carry rounding of 500 eps into the attention weights: 6e-5 in float32, which the
residual and its products with the tokens amplify."""

REORDERED = {torch.float64: 1e-13, torch.float32: 1e-5}
"""The same sums in another order: tiles, batches, padding."""
