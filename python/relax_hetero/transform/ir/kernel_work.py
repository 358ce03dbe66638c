"""How much a kernel computes and moves, and in which element types: what its time is compared with."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from tvm import tirx
from tvm.tirx.buffer import is_buffer_var

from ...encoding.arithmetic import operations, precision, precision_of_arguments

OPERATIONS = "relax_hetero.operations"
PRECISION = "relax_hetero.precision"


def work_attributes(problem: Any) -> dict[str, int | str]:
    """The attributes of a kernel that solves a problem; none where its arithmetic is not counted."""
    attributes: dict[str, int | str] = {OPERATIONS: operations(problem), PRECISION: precision(problem)}
    return {name: value for name, value in attributes.items() if value}


def operations_of(func: tirx.PrimFunc) -> int:
    """Multiplications and additions of the products in a kernel; 0 where they are not known."""
    return int(func.attrs.get(OPERATIONS, 0))


def precision_of(func: tirx.PrimFunc, arguments: Iterable[str] | None = None) -> str:
    """The element types of a kernel's products, as `encoding.arithmetic` writes them, else those of its arguments.

    Parameters
    ----------
    func : tirx.PrimFunc
    arguments : iterable of str, optional
        The element types of its tensors, where its parameters do not say them any more.
    """
    if arguments is None:
        arguments = (str(param.dtype) for param in func.params if is_buffer_var(param))
    return str(func.attrs.get(PRECISION, "")) or precision_of_arguments(arguments)


def bytes_of(func: tirx.PrimFunc) -> int:
    """Bytes of a kernel's arguments, each read or written once; 0 where an extent is symbolic."""
    return sum(_bytes(param) for param in func.params if is_buffer_var(param)) if _static(func) else 0


def _static(func: tirx.PrimFunc) -> bool:
    buffers = [param for param in func.params if is_buffer_var(param)]
    return all(isinstance(extent, tirx.IntImm) for buffer in buffers for extent in buffer.shape)


def _bytes(buffer: tirx.Buffer) -> int:
    return tensor_bytes([int(extent) for extent in buffer.shape], buffer.dtype)


def tensor_bytes(extents: Iterable[int], dtype: Any) -> int:
    """Bytes of a tensor of elements of a ``tvm.DataType``."""
    return (prod(extents) * dtype.bits * dtype.lanes + 7) // 8


def bytes_of_extents(extents: Iterable[Any], dtype: Any) -> Any:
    """`tensor_bytes` of extents that are ints or expressions: an int where all are."""
    count: Any = tensor_bytes((), dtype)
    # Numbers first, as an expression cannot be told from zero.
    for extent in sorted(extents, key=lambda extent: not isinstance(extent, int)):
        count = count * extent
    return count
