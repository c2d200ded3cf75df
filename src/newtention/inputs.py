"""Checks and conversions of user input; every message names the argument, the find and the want."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from newtention.notation import COMPUTE_DTYPES, ArrayLike

_HALF = (torch.float16, torch.bfloat16)


def shape_text(shape: tuple[int, ...] | torch.Size) -> str:
    """(2, 3) as '2 x 3'."""
    return " x ".join(str(n) for n in shape) if len(shape) else "a single number"


def as_tensors(arrays: Mapping[str, ArrayLike]) -> tuple[dict[str, Tensor], bool]:
    """Convert arguments to tensors of one compute dtype on one device.

    float32 and float64 stay as they are; float16 and bfloat16 become float32, integers the floating
    type beside them (float64 if none), each with a warning.

    Returns:
        The tensors by name, and whether the input was NumPy (or nested sequences) throughout.

    Raises:
        TypeError: torch and NumPy mixed, complex or object input, float32 mixed with float64,
            several devices.
        ValueError: NaN or infinity.
    """
    is_torch = {name: isinstance(a, Tensor) for name, a in arrays.items()}
    if any(is_torch.values()) and not all(is_torch.values()):
        yes = next(n for n, t in is_torch.items() if t)
        no = next(n for n, t in is_torch.items() if not t)
        raise TypeError(
            f"{yes} is a torch tensor but {no} is {type(arrays[no]).__name__}; "
            "pass all arrays as torch tensors or all as NumPy arrays."
        )
    # One conversion per distinct array, so that self-attention keeps sharing its tokens.
    first_name = {id(a): name for name, a in reversed(list(arrays.items()))}
    converted: dict[str, Tensor] = {}
    for name in first_name.values():  # a loop, since a comprehension is a frame before Python 3.12
        converted[name] = _promote_half(name, _as_tensor(name, arrays[name]))

    floating = {t.dtype for t in converted.values() if t.dtype in COMPUTE_DTYPES}
    if len(floating) > 1:
        kinds = ", ".join(f"{n} {str(t.dtype)[6:]}" for n, t in converted.items())
        raise TypeError(f"All arrays must have one floating type; found {kinds}.")
    dtype = floating.pop() if floating else torch.float64
    for name, t in converted.items():
        if t.dtype != dtype:
            warnings.warn(f"{name} holds integers; computing in {str(dtype)[6:]}.", stacklevel=3)
            converted[name] = t.to(dtype)
    devices = {str(t.device) for t in converted.values()}
    if len(devices) > 1:
        raise TypeError(f"All arrays must be on one device; found {', '.join(sorted(devices))}.")
    for name, t in converted.items():
        require_finite(name, t)
    tensors = {name: converted[first_name[id(a)]] for name, a in arrays.items()}
    return tensors, not any(is_torch.values())


def as_like(name: str, array: ArrayLike, like: Tensor, finite: bool = True) -> Tensor:
    """Convert an argument to the dtype and device of the problem's data, checked finite."""
    t = _as_tensor(name, array).to(dtype=like.dtype, device=like.device)
    if finite:
        require_finite(name, t)
    return t


def require_finite(name: str, t: Tensor) -> None:
    """Raise ValueError with the first offending index if t holds NaN or infinity."""
    bad = ~torch.isfinite(t)
    if bool(bad.any()):
        index = tuple(int(i) for i in bad.nonzero()[0])
        raise ValueError(
            f"{name} must hold finite numbers; found {float(t[index])} at index {index} "
            f"({int(bad.sum())} such entries in all)."
        )


def require_shape(name: str, t: Tensor, shape: tuple[int | None, ...], why: str) -> None:
    """Raise ValueError unless t has this shape; None admits any length."""
    fits = t.ndim == len(shape) and all(w in (None, n) for n, w in zip(t.shape, shape, strict=True))
    if not fits:
        want = " x ".join("any" if w is None else str(w) for w in shape)
        raise ValueError(f"{name} must be {want} ({why}); found {shape_text(t.shape)}.")


def require_count(name: str, value: object, least: int) -> int:
    """Raise ValueError unless value is an integer of at least `least`; returned as an int."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}; found {value!r}.")
    return int(value)


def require_positive(name: str, value: float, finite: bool = True) -> None:
    """Check a positive number, of Python or NumPy."""
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not value > 0 or (finite and not math.isfinite(value)):
        raise ValueError(
            f"{name} must be a positive{' finite' if finite else ''} number; found {value!r}."
        )


def as_boolean(name: str, array: ArrayLike, device: torch.device) -> Tensor:
    """Convert a mask; anything but booleans is refused, since 0/1 conventions differ."""
    t = _as_tensor(name, array)
    if t.dtype != torch.bool:
        raise TypeError(
            f"{name} must be boolean, True where attention is allowed; found {str(t.dtype)[6:]}. "
            "Additive masks go to bias=."
        )
    return t.to(device)


def as_lengths(name: str, array: ArrayLike, count: int, longest: int) -> list[int]:
    """Convert sequence lengths: `count` integers from 1 to `longest`."""
    t = as_integers(name, array)
    if t.shape != (count,):
        raise ValueError(
            f"{name} must hold {count} integers, one per sequence; found {shape_text(t.shape)}."
        )
    values = t.tolist()
    for i, n in enumerate(values):
        if not 1 <= n <= longest:
            raise ValueError(f"{name}[{i}] must lie between 1 and {longest}; found {n}.")
    return values


def as_offsets(name: str, array: ArrayLike, total: int) -> list[int]:
    """Convert offsets of ragged data: increasing from 0 to the number of rows."""
    t = as_integers(name, array)
    if t.ndim != 1 or t.shape[0] < 2:
        raise ValueError(
            f"{name} must hold at least two integers, 0 first and the number of rows ({total}) "
            f"last; found {shape_text(t.shape)}."
        )
    values = t.tolist()
    if values[0] != 0 or values[-1] != total:
        raise ValueError(
            f"{name} must start at 0 and end at the number of rows, {total}; "
            f"found {values[0]} and {values[-1]}."
        )
    for i in range(len(values) - 1):
        if values[i + 1] <= values[i]:
            raise ValueError(
                f"{name} must increase strictly (no sequence is empty); found {values[i]} then "
                f"{values[i + 1]} at position {i}."
            )
    return values


def as_integers(name: str, array: ArrayLike) -> Tensor:
    """Convert a small array of integers."""
    t = _as_tensor(name, array)
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers; found {str(t.dtype)[6:]}.")
    return t.to(device="cpu", dtype=torch.int64)


def is_causal(mask: object) -> bool:
    """Whether the mask is the word "causal"; any other word is refused."""
    if isinstance(mask, str) and mask != "causal":
        raise ValueError(f'mask must be "causal", booleans or None; found {mask!r}.')
    return isinstance(mask, str)


def as_batch_masks(
    mask: ArrayLike | str | None, lead: tuple[int, ...], n: int, m: int, device: torch.device
) -> tuple[Tensor | None, bool]:
    """(s, n, m) booleans or None, and whether the causal rule applies."""
    if mask is None or isinstance(mask, str):
        return None, is_causal(mask)
    t = as_boolean("mask", mask, device)
    if t.ndim == 3 and lead:
        require_shape("mask", t, (*lead, n, m), "sequences x queries x keys")
        return t, False
    require_shape("mask", t, (n, m), "queries x keys")
    return t.expand(lead[0] if lead else 1, n, m), False


def as_batch_biases(
    bias: ArrayLike | None, lead: tuple[int, ...], n: int, m: int, like: Tensor
) -> Tensor | None:
    """(s, h or 1, n, m) or None."""
    if bias is None:
        return None
    if not lead:
        return as_bias("bias", bias, n, m, like)[None]
    t = _as_bias_tensor("bias", bias, like)
    if t.ndim == 3:
        require_shape("bias", t, (*lead, n, m), "sequences x queries x keys")
    if t.ndim == 2:
        t = t[None].expand(*lead, n, m) if t.shape == (n, m) else t
    if t.ndim == 3:
        t = t[:, None]
    require_shape("bias", t, (*lead, None, n, m), "sequences x heads x queries x keys")
    return t


def as_bias(name: str, bias: ArrayLike, n: int, m: int, like: Tensor) -> Tensor:
    """Convert the bias of one sequence to (h or 1, n, m)."""
    t = _as_bias_tensor(name, bias, like)
    if t.ndim == 2:
        t = t[None]
    require_shape(name, t, (None, n, m), "heads x queries x keys")
    return t


def as_list(name: str, values: Any, count: int) -> Sequence[Any] | None:
    """Check that values is a list with one entry per sequence, or None."""
    if values is None:
        return None
    if not isinstance(values, list | tuple) or len(values) != count:
        found = f"{len(values)} entries" if isinstance(values, list | tuple) else type(values)
        raise ValueError(
            f"{name} of ragged data must be a list of {count} arrays, one per sequence; "
            f"found {found}."
        )
    return values


def _as_bias_tensor(name: str, bias: ArrayLike, like: Tensor) -> Tensor:
    t = as_like(name, bias, like, finite=False)
    if bool((torch.isnan(t) | (t == torch.inf)).any()):
        raise ValueError(f"{name} must hold finite numbers or minus infinity; found NaN or +inf.")
    return t


def _as_tensor(name: str, array: ArrayLike) -> Tensor:
    if isinstance(array, Tensor):
        t = array.detach()
        if t.is_sparse or t.is_nested:
            raise TypeError(f"{name} must be a dense tensor.")
    else:
        try:
            a = np.asarray(array)
        except ValueError:
            raise TypeError(f"{name} must be a rectangular array; its rows differ.") from None
        if a.dtype.kind not in "fiub":
            raise TypeError(f"{name} must hold real numbers; found NumPy dtype {a.dtype}.")
        if a.dtype.kind == "f" and a.dtype.itemsize > 8:
            a = a.astype(np.float64)
        if a.dtype.kind == "u" and a.dtype.itemsize > 1:
            a = a.astype(np.int64)
        # torch shares memory only with writable arrays of positive strides in native byte order.
        native = a.dtype.newbyteorder("=")
        if not a.flags.writeable or any(s < 0 for s in a.strides) or a.dtype != native:
            a = a.astype(native, copy=True, order="C")
        t = torch.from_numpy(a)
    if t.is_complex():
        raise TypeError(f"{name} must hold real numbers; found {str(t.dtype)[6:]}.")
    return t


def _promote_half(name: str, t: Tensor) -> Tensor:
    if t.dtype in _HALF or (t.is_floating_point() and t.element_size() < 2):
        warnings.warn(f"{name} is {str(t.dtype)[6:]}; computing in float32.", stacklevel=4)
        return t.float()
    if t.dtype == torch.bool:
        raise TypeError(f"{name} must hold numbers; found booleans.")
    return t
