"""Checks of arguments, and their placement on the devices of their parameters.

Tensors (TVM's own, numpy arrays, any object with ``__dlpack__``) on the right device, contiguous and aligned, are
borrowed for the call; others, and Python scalars, are copied. Numpy arrays are copied for code that writes in place.
Donated arguments are borrowed for writing; arguments that code writes to without donation are always copied.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm_ffi
from tvm import runtime

from ...artifact.dims import DimValues
from ...artifact.metadata import CPU
from ...artifact.signature import PrimSpec, ShapeSpec, TensorSpec, TupleSpec, ValueSpec, describe
from ...errors import BindingError, HeteroError
from ...target.backend import backend_of_type
from ...target.element_types import bits_of, numpy_dtype
from ..device.cuda_library import CUDA_HOST
from ..device.tensors import (
    ALIGNMENT,
    AddressRange,
    address_range,
    alias,
    copy_to,
    dtype_name,
    from_array,
    from_numpy,
    has_offset,
    is_host,
    same_device,
)

_Tensor = tvm_ffi.core.Tensor
# TVM reads beyond the end of its table for an unknown device type, so types are checked here.
_DEVICE_TYPES = {int(kind): kind.name.removeprefix("kDL").lower() for kind in tvm_ffi.DLDeviceType}


# Exceptions that become a BindingError. Others may come from a signal handler, and must pass through.
_REFUSALS = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)


@dataclass
class Placement:
    """Devices, scopes and rules for placing the arguments of one call."""

    devices: Sequence[runtime.Device]  # devices by manifest index; the last is the host
    scopes: Sequence[str]  # memory scope by manifest index; the last is the host's
    dims: DimValues = field(default_factory=DimValues)  # values of symbolic dimensions so far
    # Whether to copy foreign memory even if it could be borrowed, because the values outlive the call.
    keep: bool = False
    alignment: int = ALIGNMENT  # alignment in bytes that kernels require of a tensor's address
    borrows_arrays: bool = False  # whether numpy arrays may be borrowed, because no kernel writes to an argument
    borrowed: list[AddressRange] = field(default_factory=list)  # address ranges of borrowed tensors
    copies: bool = False  # whether values must be copied, because code writes to them
    donates: bool = False  # whether the argument is donated: its memory may be written, and is not added to `borrowed`


def place(value: Any, spec: ValueSpec, where: str, to: Placement) -> Any:
    """Convert `value` to the runtime object that `spec` describes, on its device.

    Raises
    ------
    BindingError
        A value of another kind, element type, rank, extent or length; the message begins with `where`.
    """
    try:
        if isinstance(spec, TensorSpec):
            return place_tensor(value, spec, where, to)
        if isinstance(spec, TupleSpec):
            return _place_tuple(value, spec, where, to)
        if isinstance(spec, ShapeSpec):
            return _place_shape(value, spec, where, to)
        if isinstance(spec, PrimSpec):
            return _place_prim(value, spec, where, to)
        if spec.is_function and not (callable(value) or isinstance(value, tvm_ffi.Object)):
            raise BindingError(f"{where} is {value!r} ({type(value).__name__}), expected a function")
    except HeteroError:
        raise
    except _REFUSALS as error:  # no memory for a copy; failing methods of the caller's object
        reason = f"{type(error).__name__}: {error}"
        raise BindingError(f"{where} ({type(value).__name__}) cannot be taken as {describe(spec)}: {reason}") from error
    return value


def place_tensor(value: Any, spec: TensorSpec, where: str, to: Placement) -> runtime.Tensor:
    """Place a tensor argument; see `place`."""
    device = to.devices[spec.device]
    scope = None if to.scopes[spec.device] == "global" else to.scopes[spec.device]
    if isinstance(value, np.ma.MaskedArray):
        raise BindingError(f"{where} is a masked array, whose mask would be lost; expected {describe(spec)}")
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        check_tensor(_array_dtype(array, spec, where), array.shape, spec, where, to.dims)
        if to.donates and not array.flags.writeable:
            raise BindingError(f"{where} is donated, found a read-only numpy array, expected one that may be written")
        can_borrow = (to.borrows_arrays or to.donates) and not to.copies and array.flags.c_contiguous
        borrowed = from_array(array) if can_borrow else None
        return from_numpy(array, device, scope) if borrowed is None else _move(borrowed, device, scope, True, where, to)
    if isinstance(value, bool | int | float):
        array = _scalar(value, spec, where)
        check_tensor(spec.dtype or str(array.dtype), (), spec, where, to.dims)
        return from_numpy(array, device, scope)
    tensor = as_tensor(value, where, spec)
    if isinstance(tensor, np.ndarray):
        return place_tensor(tensor, spec, where, to)
    check_tensor(tensor.dtype, tensor.shape, spec, where, to.dims)
    return _move(tensor, device, scope, tensor is not value, where, to)


def as_tensor(value: Any, where: str, spec: TensorSpec) -> runtime.Tensor | np.ndarray:
    """A tvm tensor over an object's memory, or a numpy array if that would need a copy.

    Raises BindingError for an object without readable memory: on an absent device, sparse, or of impossible size.
    """
    if isinstance(value, _Tensor):
        return _check_memory(value, where)
    if hasattr(value, "__dlpack__"):
        try:
            return _check_memory(from_dlpack(value), where)
        except BindingError:
            raise
        except Exception as error:  # each library raises its own
            if isinstance(error, BufferError):
                with suppress(Exception):
                    return np.from_dlpack(value)  # read-only memory, which only newer consumers get
            if not hasattr(value, "__array__"):
                raise BindingError(f"{where} ({type(value).__name__}) gives no DLPack tensor: {error}") from error
    if hasattr(value, "__array__"):
        try:
            return np.asarray(value)
        except Exception as error:  # each library raises its own
            raise BindingError(f"{where} ({type(value).__name__}) gives no array: {error}") from error
    expected = f"expected a tensor {describe(spec)} as numpy array, tvm tensor or DLPack object"
    is_sequence = isinstance(value, (list, tuple, memoryview, bytearray))
    hint = f"; numpy.asarray(value, {spec.dtype!r}) makes one" if is_sequence and spec.dtype else ""
    raise BindingError(f"{where} is a {type(value).__name__}, {expected}{hint}")


def _check_memory(tensor: runtime.Tensor, where: str) -> runtime.Tensor:
    """The tensor; BindingError if its producer claims an impossible device, shape or address."""
    device_type, index = tensor.__dlpack_device__()
    if device_type not in (CPU, CUDA_HOST) and (device_type not in _DEVICE_TYPES or not tensor.device.exist):
        type_name = _DEVICE_TYPES.get(device_type, f"device type {device_type}")
        raise BindingError(f"{where} is on {type_name}:{index}, which this process does not have")
    shape = tensor.shape
    try:
        nbytes = math.prod(shape) * bits_of(tensor.dtype) // 8
    except ValueError as error:
        raise BindingError(f"{where} has an element type that TVM does not know: {error}") from None
    if min(shape, default=0) < 0 or nbytes >= 1 << 63:
        raise BindingError(f"{where} has shape {shape}, expected extents of memory: not negative, below 2^63 bytes")
    if nbytes and not tensor.data_ptr():
        raise BindingError(f"{where} has shape {shape} and no memory: its address is 0")
    return tensor


def from_dlpack(value: Any) -> runtime.Tensor:
    """A tvm tensor over the memory of an object with ``__dlpack__``."""
    if hasattr(value, "is_neg"):
        value = _plain_torch(value)
    stream = backend_of_type(int(value.__dlpack_device__()[0])).dlpack_stream
    # Passing a stream orders our work after the producer's.
    return tvm_ffi.from_dlpack(value if stream is None else value.__dlpack__(stream=stream))


def _plain_torch(value: Any) -> Any:
    """A PyTorch tensor whose memory holds its values; computes negated and conjugated views, refuses other layouts."""
    if str(getattr(value, "layout", "torch.strided")) != "torch.strided":
        raise ValueError(f"layout {value.layout}, expected torch.strided")
    return value.resolve_conj().resolve_neg()


def check_tensor(dtype: str, shape: Sequence[int], spec: TensorSpec, where: str, dims: DimValues) -> None:
    """Require an element type, a rank and extents; BindingError where they differ."""
    if spec.dtype is not None and dtype != spec.dtype:
        raise BindingError(f"{where} has dtype {dtype}, expected {spec.dtype} ({describe(spec)})")
    if spec.ndim >= 0 and len(shape) != spec.ndim:
        raise BindingError(
            f"{where} has {len(shape)} dimensions {tuple(shape)}, expected {spec.ndim} ({describe(spec)})"
        )
    for axis, dim in enumerate(spec.shape or ()):
        if dim != shape[axis]:
            dims.match(dim, shape[axis], where, axis)


def _array_dtype(array: np.ndarray, spec: TensorSpec, where: str) -> str:
    if array.dtype.kind in "OSUMm" or array.dtype.names is not None:
        raise BindingError(f"{where} has numpy dtype {array.dtype}, expected {describe(spec)}")
    return dtype_name(array.dtype)


def _scalar(value: bool | int | float, spec: TensorSpec, where: str) -> np.ndarray:
    """A Python scalar as a 0-d array; BindingError if the element type cannot hold it."""
    dtype = spec.dtype or {bool: "bool", int: "int64", float: "float32"}[type(value)]
    integral = dtype.startswith(("int", "uint"))
    fits = (dtype == "bool") == isinstance(value, bool) and not (integral and not isinstance(value, int))
    if not fits or spec.ndim > 0:
        raise BindingError(f"{where} is the Python {type(value).__name__} {value!r}, expected {describe(spec)}")
    try:
        with np.errstate(over="raise"):  # instead of becoming infinite
            return np.array(value, dtype=numpy_dtype(dtype))
    except (ArithmeticError, TypeError, ValueError) as error:
        raise BindingError(f"{where}: {value!r} does not fit {dtype} ({error})") from None


def _move(
    tensor: runtime.Tensor, device: runtime.Device, scope: str | None, foreign: bool, where: str, to: Placement
) -> runtime.Tensor:
    if not tensor.is_contiguous():
        return from_numpy(_gather(tensor, where), device, scope)
    is_same_device = same_device(tensor.device, device)
    # Some libraries give empty tensors zero strides, which kernels refuse: empty tensors are always copied.
    is_usable = (is_same_device or (is_host(device) and is_host(tensor.device))) and tensor.numel() > 0
    if not is_usable or scope is not None or tensor.data_ptr() % to.alignment or (foreign and to.keep) or to.copies:
        return copy_to(tensor, device, scope)
    if not to.donates:
        to.borrowed.append(address_range(tensor))
    return tensor if is_same_device and not has_offset(tensor) else alias(tensor, device)


def _gather(tensor: runtime.Tensor, where: str) -> np.ndarray:
    """A strided host tensor as a strided array."""
    try:
        if is_host(tensor.device):
            return np.from_dlpack(alias(tensor, runtime.device("cpu", 0)))
    except BufferError:  # an element type that numpy cannot name
        pass
    raise BindingError(
        f"{where} has strides {tensor.strides} ({tensor.dtype} {tensor.shape} on {tensor.device}), expected contiguous"
    )


def _place_tuple(value: Any, spec: TupleSpec, where: str, to: Placement) -> Any:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BindingError(f"{where} is a {type(value).__name__}, expected a tuple {describe(spec)}")
    if len(value) != len(spec.fields):
        raise BindingError(f"{where} has {len(value)} fields, expected {len(spec.fields)}: {describe(spec)}")
    pairs = enumerate(zip(value, spec.fields, strict=True))
    return tvm_ffi.convert(tuple(place(element, field, f"{where}[{i}]", to) for i, (element, field) in pairs))


def _place_shape(value: Any, spec: ShapeSpec, where: str, to: Placement) -> tvm_ffi.Shape:
    try:
        dims = [int(dim) for dim in value if isinstance(dim, numbers.Integral) or _refuse(dim)]
    except TypeError:
        raise BindingError(f"{where} is {value!r}, expected {describe(spec)}: a sequence of integers") from None
    if spec.ndim >= 0 and len(dims) != spec.ndim:
        raise BindingError(f"{where} has {len(dims)} dimensions, expected {spec.ndim}: {describe(spec)}")
    for axis, dim in enumerate(spec.values or ()):
        to.dims.match(dim, dims[axis], where, axis)
    if any(not 0 <= dim < 1 << 63 for dim in dims):
        raise BindingError(f"{where} is {dims}, expected {describe(spec)}: extents from 0 to 2^63 - 1")
    return tvm_ffi.Shape(dims)


def _refuse(dim: object) -> bool:
    raise TypeError(f"{dim!r} is not an integer")


def _place_prim(value: Any, spec: PrimSpec, where: str, to: Placement) -> bool | int | float:
    if isinstance(value, np.ndarray | np.generic | _Tensor) and value.ndim == 0:
        value = np.asarray(value).item()
    kinds: tuple[type, ...] = (bool, int) if spec.dtype == "bool" else (int,)
    if spec.dtype.startswith(("float", "bfloat")):
        kinds = (int, float)
    if not isinstance(value, kinds) or (isinstance(value, bool) and spec.dtype != "bool"):
        raise BindingError(f"{where} is {value!r} ({type(value).__name__}), expected {describe(spec)}")
    if spec.dtype.startswith(("int", "uint")):
        limits = np.iinfo(spec.dtype)
        if isinstance(value, int) and not limits.min <= value <= limits.max:
            raise BindingError(f"{where} is {value}, expected {describe(spec)}: {limits.min} to {limits.max}")
    if spec.value is not None and isinstance(value, int):
        to.dims.match(spec.value, value, where)
    if spec.dtype.startswith(("float", "bfloat")):
        return float(value)
    return bool(value) if spec.dtype == "bool" else int(value)
