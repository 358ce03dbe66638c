"""Memory of tensors: aliases under another device id, and copies between any two devices.

All CPU device ids share memory, yet kernels check the id. An alias changes only the id, so one host buffer serves
``cpu(0)`` and ``cpu(1)`` without a copy.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tvm_ffi
from tvm import runtime

from ...artifact.metadata import CPU
from ...target.backend import backend_of_type
from ...target.element_types import bits_of, numpy_dtype
from .cuda_library import CUDA_HOST

ALIGNMENT = 64  # bytes of alignment of TVM's allocations (kAllocAlignment), on which its kernels rely by default

AddressRange: TypeAlias = tuple[int, int]

PACKED = frozenset(("int4", "uint4", "int2", "uint2", "float4_e2m1fn"))  # element types of less than a byte, packed

_empty = tvm_ffi.get_global_func("runtime.TVMTensorAllocWithScope")
_copy = tvm_ffi.get_global_func("runtime.TVMTensorCopyFromTo")
_copy_from_bytes = tvm_ffi.get_global_func("runtime.TVMTensorCopyFromBytes")
_view = tvm_ffi.get_global_func("runtime.TVMTensorCreateView")


class _DLTensor(ctypes.Structure):
    """The head of an unversioned DLPack capsule (dlpack.h, DLTensor)."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
capsule_pointer.restype = ctypes.c_void_p
capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _head(capsule: object) -> _DLTensor:
    return _DLTensor.from_address(capsule_pointer(capsule, b"dltensor"))


def nbytes_of(tensor: runtime.Tensor) -> int:
    """Bytes of a contiguous tensor's elements."""
    return (int(tensor.numel()) * bits_of(tensor.dtype) + 7) // 8


def address_range(tensor: runtime.Tensor) -> AddressRange:
    """The begin and end addresses of a contiguous tensor."""
    begin = tensor.data_ptr()
    return begin, begin + nbytes_of(tensor)


def address_ranges(values: Any) -> list[AddressRange]:
    """The address ranges of all tensors in run-time values, including nested tuples."""
    if isinstance(values, tvm_ffi.core.Tensor):
        return [address_range(values)]
    if isinstance(values, Sequence) and not isinstance(values, str | tvm_ffi.Shape):
        return [memory for value in values for memory in address_ranges(value)]
    return []


def same_device(a: runtime.Device, b: runtime.Device) -> bool:
    """Return whether two devices are the same physical one."""
    return bool(a.dlpack_device_type() == b.dlpack_device_type() and a.index == b.index)


def is_host(device: runtime.Device) -> bool:
    """Return whether a device is a CPU of any id, or DLPack's type for pinned host memory."""
    return device.dlpack_device_type() in (CPU, CUDA_HOST)


def alias(tensor: runtime.Tensor, device: runtime.Device) -> runtime.Tensor:
    """A tensor on `device` over the memory of `tensor`, with its byte offset folded into the pointer.

    `device` must be able to access the memory: the same device, another CPU id, or a GPU for pinned host memory.
    """
    capsule = tensor._to_dlpack()
    head = _head(capsule)
    head.device_type, head.device_id = device.dlpack_device_type(), device.index
    if head.byte_offset:
        head.data += head.byte_offset
        head.byte_offset = 0
    return tvm_ffi.from_dlpack(capsule)


def has_offset(tensor: runtime.Tensor) -> bool:
    """Return whether a tensor has a byte offset, which kernels do not accept."""
    capsule = tensor._to_dlpack()  # keeps the head alive
    return bool(_head(capsule).byte_offset)


def on_host(tensor: runtime.Tensor) -> runtime.Tensor:
    """The tensor itself if the host can read it, else a copy, made after the device's earlier work."""
    return tensor if tensor.__dlpack_device__()[0] in (CPU, CUDA_HOST) else copy_to(tensor, runtime.device("cpu", 0))


def view_bytes(data: np.ndarray, shape: tuple[int, ...], dtype: str) -> runtime.Tensor:
    """A tensor over the bytes of `data` (one-dimensional ``uint8``), kept alive; read-only if `data` is."""
    return _view(from_array(data), tvm_ffi.Shape(shape), dtype, 0)


def part_of(tensor: runtime.Tensor, shape: tuple[int, ...], dtype: str, begin: int) -> runtime.Tensor:
    """A tensor over part of a contiguous tensor's memory, from byte `begin` on, without a byte offset."""
    return alias(_view(tensor, tvm_ffi.Shape(shape), dtype, begin), tensor.device)


def bytes_of(tensor: runtime.Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor as ``uint8``; shared memory on a CPU."""
    tensor = on_host(tensor)
    if nbytes_of(tensor) == 0:
        return np.empty(0, "uint8")
    flat = _view(tensor, tvm_ffi.Shape((nbytes_of(tensor),)), "uint8", 0)
    return np.from_dlpack(alias(flat, runtime.device("cpu", 0)))


def from_numpy(array: np.ndarray, device: runtime.Device, scope: str | None = None) -> runtime.Tensor:
    """A copy of `array` (any strides, byte order, and element type of TVM) on `device`."""
    dtype = dtype_name(array.dtype)
    bits = bits_of(tvm_ffi.dtype(dtype)) if dtype in PACKED else 8
    if bits < 8:
        packed = tvm_ffi.from_dlpack(_pack(array, bits))
        tensor = _empty(array.shape, dtype, device, scope)
        if array.size:
            copy_into(packed, _view(tensor, tvm_ffi.Shape(packed.shape), "uint8", 0))
        return tensor
    if not (array.flags.c_contiguous and array.dtype.isnative):
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")).reshape(array.shape)
    tensor = _empty(array.shape, dtype, device, scope)
    source = None if is_host(device) else from_array(array)
    if source is not None:
        copy_into(source, tensor)
    elif array.nbytes:
        _copy_from_bytes(tensor, ctypes.c_void_p(array.__array_interface__["data"][0]), array.nbytes)
    return tensor


def _pack(array: np.ndarray, bits: int) -> np.ndarray:
    """Pack elements of `bits` bits into bytes, the first one in the highest bits, as stock TVM does."""
    per_byte = 8 // bits
    codes = np.zeros(-(-array.size // per_byte) * per_byte, "uint8")
    codes[: array.size] = np.ascontiguousarray(array).view("uint8").reshape(-1) & ((1 << bits) - 1)
    shifts = np.arange(per_byte - 1, -1, -1, dtype="uint8") * np.uint8(bits)
    return np.bitwise_or.reduce(codes.reshape(-1, per_byte) << shifts, axis=1).astype("uint8")


def unpacked(tensor: runtime.Tensor) -> np.ndarray:
    """A copy of a contiguous packed tensor with one byte per element, in the ml_dtypes type of that name."""
    dtype = numpy_dtype(str(tensor.dtype))
    bits = bits_of(tensor.dtype)
    shifts = np.arange(8 // bits - 1, -1, -1, dtype="uint8") * np.uint8(bits)
    codes = (bytes_of(tensor)[:, None] >> shifts).reshape(-1)[: tensor.numel()] & np.uint8((1 << bits) - 1)
    return codes.view(dtype).reshape(tensor.shape)


def from_array(array: np.ndarray) -> runtime.Tensor | None:
    """A tensor over the memory of `array`, not to be written if read-only; None for types that DLPack lacks."""
    try:
        # numpy exports read-only arrays only to consumers of versioned capsules.
        return tvm_ffi.from_dlpack(array if array.flags.writeable else array.__dlpack__(max_version=(1, 0)))
    except (BufferError, TypeError, ValueError):  # dates, text, foreign byte order; numpy 1 and read-only
        return None


def share_or_copy(array: np.ndarray) -> runtime.Tensor:
    """A tensor over the memory of `array`, or a copy if its elements are not in order, or DLPack lacks its type."""
    tensor = from_array(array) if array.flags.c_contiguous else None
    return runtime.tensor(array) if tensor is None else tensor


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """TVM's name of a numpy element type in any byte order; numpy's name for types that TVM lacks."""
    return str(dtype.newbyteorder("="))


def empty(shape: tuple[int, ...], dtype: str, device: runtime.Device, scope: str | None = None) -> runtime.Tensor:
    """An uninitialised tensor on `device`."""
    return _empty(shape, dtype, device, scope)


def copy_into(source: runtime.Tensor, target: runtime.Tensor, wait: bool = True) -> None:
    """Copy between contiguous tensors of equal size on any two devices; waits for the end.

    Without `wait`, a small copy to a GPU, or a copy within one, may only be issued, in order with the GPU's current
    stream; a source on the host may be changed in any case. A copy runs after earlier work of the devices' current
    streams.

    A copy from a GPU to the host raises HeteroError for errors that the GPU's kernels reported. Between two device
    types of which neither is a CPU, bytes go through the host.
    """
    source, target = _on_plain_device(source), _on_plain_device(target)
    from_device, to_device = source.device, target.device
    from_type, to_type = from_device.dlpack_device_type(), to_device.dlpack_device_type()
    if from_type != CPU or to_type != CPU:
        backend = backend_of_type(to_type if from_type == CPU else from_type)
        if to_type in (CPU, backend.device_type) and backend.copy(source, target, wait):
            return
    if from_type != to_type and CPU not in (from_type, to_type):
        source = copy_to(source, runtime.device("cpu", 0))
        from_type = CPU
    _copy(source, target)
    # TVM copies on the device's stream, and between two devices on the source's.
    if from_type != CPU:
        from_device.sync()
    elif to_type != CPU:
        to_device.sync()


def _on_plain_device(tensor: runtime.Tensor) -> runtime.Tensor:
    """A tensor with the CPU's device type instead of DLPack's for pinned memory, which TVM lacks without CUDA."""
    is_pinned = tensor.device.dlpack_device_type() == CUDA_HOST
    return alias(tensor, runtime.device("cpu", 0)) if is_pinned else tensor


def copy_to(tensor: runtime.Tensor, device: runtime.Device, scope: str | None = None) -> runtime.Tensor:
    """A copy of a contiguous tensor on `device`, in new memory."""
    result = _empty(tensor.shape, tensor.dtype, device, scope)
    copy_into(tensor, result)
    return result


def map_tensors(value: Any, change: Callable[[runtime.Tensor], Any]) -> Any:
    """Apply `change` to all tensors of a run-time value, including nested tuples."""
    if isinstance(value, tvm_ffi.core.Tensor):
        return change(value)
    return tvm_ffi.convert(tuple(map_tensors(element, change) for element in value))


class MemoryRanges:
    """A set of address ranges with logarithmic look-up."""

    def __init__(self, ranges: Iterable[AddressRange] = ()) -> None:
        ordered = sorted(ranges)
        self._starts = [start for start, _ in ordered]
        # Ranges may overlap, hence the maximum end so far.
        self._ends = list(itertools.accumulate([end for _, end in ordered], max))

    def contain(self, address: int) -> bool:
        """Return whether an address is inside one of the ranges."""
        position = bisect_right(self._starts, address)
        return position > 0 and address < self._ends[position - 1]
