"""What a caller gives for a kernel's parameters, checked against what the kernel takes."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi

from ...artifact.commands import KernelSpec, TensorParam
from ...errors import BindingError
from ..region.walk_commands import SCALARS, Kernel
from .operands import Integer, MemoryRange, Number, as_float, integer, substituted


@dataclass(frozen=True)
class KernelCall:
    """A kernel and what it works on.

    Attributes
    ----------
    kernel : Kernel
    operands : tuple of MemoryRange
    scalars : tuple
        Numbers, without those of workgroups.
    extents : tuple
        For each tensor its extents, and its bytes.
    """

    kernel: Kernel
    operands: tuple[MemoryRange, ...]
    scalars: tuple[Any, ...]
    extents: tuple[tuple[tuple[Integer, ...], Integer], ...]


def kernel_call(kernel: Kernel, operands: Sequence[MemoryRange], scalars: object) -> KernelCall:
    """A call of a kernel.

    Raises
    ------
    BindingError
        A wrong number of operands or scalars, scalars that are missing, unknown or of another kind.
    """
    spec, where = kernel.spec, f"kernel {kernel.spec.name!r}"
    if len(operands) != len(spec.tensors):
        names = ", ".join(tensor.name for tensor in spec.tensors)
        raise BindingError(f"{where} is given {len(operands)} operands, expected {len(spec.tensors)}: {names}")
    given = _in_order(spec, scalars, where)
    values: dict[str, Integer] = {
        name: value for name, value in given.items() if isinstance(value, int | Number)  # the others are no extents
    }  # fmt: skip
    extents = tuple(_extents(tensor, values, f"tensor {tensor.name!r} of {where}") for tensor in spec.tensors)
    return KernelCall(kernel, tuple(operands), tuple(given.values()), extents)


def _in_order(spec: KernelSpec, scalars: object, where: str) -> dict[str, Any]:
    own = spec.scalars[: len(spec.scalars) - spec.workgroups]
    names = [scalar.name for scalar in own]
    expected = f"expected {', '.join(f'{scalar.name}: {scalar.dtype}' for scalar in own) or 'none'}"
    if isinstance(scalars, Mapping):
        if set(scalars) != set(names):
            raise BindingError(f"{where} is given the scalars {', '.join(map(str, scalars)) or 'none'}, {expected}")
        values = [scalars[name] for name in names]
    elif isinstance(scalars, Sequence) and not isinstance(scalars, str):
        if len(scalars) != len(names):
            raise BindingError(f"{where} is given {len(scalars)} scalars, {expected}")
        values = list(scalars)
    else:
        raise BindingError(f"{where} is given scalars {scalars!r}, expected a mapping or a sequence")
    for scalar in spec.scalars:
        if scalar.dtype not in SCALARS:
            raise BindingError(f"{where} takes scalar {scalar.name!r} of {scalar.dtype}, expected one of C's types")
    pairs = zip(own, values, strict=True)
    return {scalar.name: _value(value, scalar.dtype, f"scalar {scalar.name!r} of {where}") for scalar, value in pairs}


def _value(value: object, dtype: str, what: str) -> Any:
    if isinstance(value, Number):
        if dtype.startswith("float") and not value.text.isidentifier():
            raise BindingError(f"{what} ({dtype}) is {value.text}, expected a float or a parameter itself")
        return value
    if dtype == "bool" and isinstance(value, bool):
        return int(value)
    if dtype.startswith("float"):
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise BindingError(f"{what} is {value!r} ({type(value).__name__}), expected a {dtype}")
        return as_float(value, dtype, what)
    return integer(value, what)


def _extents(tensor: TensorParam, values: dict[str, Integer], what: str) -> tuple[tuple[Integer, ...], Integer]:
    extents = tuple(substituted(extent, values, what) for extent in tensor.shape)
    dtype = tvm_ffi.dtype(tensor.dtype)
    bits = int(dtype.bits) * int(dtype.lanes)
    count: Integer = 1
    for extent in extents:
        count = extent if isinstance(count, int) and count == 1 else count * extent
    nbytes: Integer = (count * bits + 7) // 8 if bits % 8 else count * (bits // 8)
    return extents, nbytes
