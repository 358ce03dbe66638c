"""Results of calls: tuples of tensors, or the caller's buffers, filled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import runtime

from ...artifact.dims import DimValues
from ...artifact.signature import FunctionSignature, TensorSpec, TupleSpec, ValueSpec, describe
from ...errors import BindingError
from ..device.tensors import (
    PACKED,
    AddressRange,
    MemoryRanges,
    bytes_of,
    copy_into,
    copy_to,
    dtype_name,
    from_array,
    is_host,
    unpacked,
)
from .arguments import as_tensor, check_tensor, from_dlpack

_Tensor = tvm_ffi.core.Tensor


def to_python(value: Any, constants: MemoryRanges, borrowed: Sequence[AddressRange]) -> Any:
    """A result with tuples as Python tuples, each tensor in memory of its own.

    Tensors in the memory of constants, of the caller or of an earlier tensor of the result are copied.
    """
    return _to_python(value, constants, MemoryRanges(borrowed), set())


def _to_python(value: Any, constants: MemoryRanges, borrowed: MemoryRanges, addresses: set[int]) -> Any:
    if isinstance(value, _Tensor):
        address = value.data_ptr()
        if address in addresses or borrowed.contain(address) or constants.contain(address):
            return copy_to(value, value.device)
        addresses.add(address)
        return value
    if isinstance(value, tvm_ffi.Array):
        value = value[:]  # a list: iterating over a TVM array queries its length for every element
    if isinstance(value, (tuple, list)):  # steps of a schedule return separate results
        return tuple([_to_python(part, constants, borrowed, addresses) for part in value])
    return value


def check_out_buffers(out: Any, signature: FunctionSignature, dims: DimValues) -> None:
    """Require the structure, element types and extents of a function's results; BindingError if they differ."""
    if signature.output_is_tuple:
        _check_buffer(out, TupleSpec("out", signature.outputs), "out", dims)
        _check_disjoint(out)
    else:
        _check_buffer(out, signature.outputs[0], "out", dims)
    dims.settle()


def _check_buffer(out: Any, spec: ValueSpec, where: str, dims: DimValues) -> None:
    if isinstance(spec, TupleSpec):
        if not isinstance(out, Sequence) or isinstance(out, str):
            raise BindingError(f"{where} is a {type(out).__name__}, expected a tuple of buffers: {describe(spec)}")
        if len(out) != len(spec.fields):
            raise BindingError(f"{where} has {len(out)} buffers, expected {len(spec.fields)}: {describe(spec)}")
        for i, (part, field) in enumerate(zip(out, spec.fields, strict=True)):
            _check_buffer(part, field, f"{where}[{i}] ({field.name!r})", dims)
        return
    if not isinstance(spec, TensorSpec):
        raise BindingError(f"{where}: a {describe(spec)} cannot be written into a buffer")
    if isinstance(out, np.ndarray):
        if isinstance(out, np.ma.MaskedArray):
            raise BindingError(f"{where} is a masked array, whose mask would be stale; expected {describe(spec)}")
        if not out.flags.writeable:
            raise BindingError(f"{where} is read-only")
        check_tensor(dtype_name(out.dtype), out.shape, spec, where, dims)
        if not out.flags.c_contiguous and not _elements_are_disjoint(out):
            raise BindingError(f"{where} has strides {out.strides}, by which elements share memory: {describe(spec)}")
        return
    tensor = _buffer(out, where, spec)
    check_tensor(str(tensor.dtype), tensor.shape, spec, where, dims)
    if not tensor.is_contiguous():
        raise BindingError(f"{where} has strides {tensor.strides}, expected a contiguous tensor")


def _elements_are_disjoint(array: np.ndarray) -> bool:
    """Return whether elements certainly share no bytes: each stride is at least the extent of all smaller ones."""
    extent_bytes = array.itemsize
    for stride, extent in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < extent_bytes:
            return False
        extent_bytes += stride * (extent - 1)
    return True


def _check_disjoint(out: Any) -> None:
    """Refuse buffers that share memory."""
    for (first, a), (second, b) in itertools.combinations(list(_numpy_views(out, "out")), 2):
        if np.shares_memory(a, b):
            raise BindingError(f"{first} and {second} share memory, expected a buffer of its own for each result")


def _numpy_views(out: Any, where: str) -> Iterator[tuple[str, np.ndarray]]:
    """The buffers in host memory, with their names in messages."""
    if isinstance(out, np.ndarray):
        yield where, out
    elif isinstance(out, _Tensor) or hasattr(out, "__dlpack__"):
        tensor = out if isinstance(out, _Tensor) else from_dlpack(out)
        if is_host(tensor.device):
            yield where, bytes_of(tensor)
    else:
        for index, part in enumerate(out):
            yield from _numpy_views(part, f"{where}[{index}]")


def _buffer(out: Any, where: str, spec: TensorSpec) -> runtime.Tensor:
    tensor = as_tensor(out, where, spec)
    if isinstance(tensor, np.ndarray):
        raise BindingError(f"{where} ({type(out).__name__}) gives no memory to write to")
    return tensor


def fill_out_buffers(out: Any, result: Any, where: str = "out") -> Any:
    """Copy a result into checked buffers; returns the buffers, tuples as Python tuples.

    Raises BindingError if an extent that only the result determines differs.
    """
    if not isinstance(result, _Tensor):
        pairs = enumerate(zip(out, result, strict=True))
        return tuple(fill_out_buffers(buffer, part, f"{where}[{i}]") for i, (buffer, part) in pairs)
    target = out if isinstance(out, np.ndarray | _Tensor) else from_dlpack(out)
    if tuple(target.shape) != tuple(result.shape):
        raise BindingError(f"{where} has shape {tuple(target.shape)}, the result has {tuple(result.shape)}")
    contiguous = from_array(target) if isinstance(target, np.ndarray) and target.flags.c_contiguous else target
    if isinstance(contiguous, _Tensor):
        copy_into(result, contiguous)
    elif target.nbytes:
        elements = unpacked(result) if str(result.dtype) in PACKED else bytes_of(result)
        target[...] = elements.view(target.dtype.newbyteorder("=")).reshape(target.shape)
    return out
