"""Caller's memory that command buffers use in place: numpy arrays, tvm tensors, objects with ``__dlpack__``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm_ffi
from tvm import runtime

from ...artifact.metadata import CPU
from ...errors import BindingError
from ...target.backend import backend_of_type
from ..args.arguments import from_dlpack
from ..device.cuda_library import CUDA_HOST
from ..device.tensors import alias, capsule_pointer, dtype_name, has_offset, nbytes_of

BYTES = "uint8"  # element type of untyped memory, which is accepted for any other type

_Tensor = tvm_ffi.core.Tensor


@dataclass(frozen=True)
class BorrowedBuffer:
    """Contiguous memory, which this object keeps alive."""

    address: int
    nbytes: int
    dtype: str  # element type that its owner declares
    writable: bool
    device: tuple[int, int]  # DLPack's device type and id; the id is -1 for host memory without one
    owner: Any = field(repr=False, compare=False)

    def subrange(self, offset: int, length: int | None, where: str) -> BorrowedBuffer:
        """`length` bytes (None: all) from `offset` on; BindingError if there are fewer."""
        end = self.nbytes if length is None else offset + length
        if offset < 0 or not offset <= end <= self.nbytes:
            extent = f"{'the rest' if length is None else length} from byte {offset} on"
            raise BindingError(f"{where} takes {extent} of {self.nbytes} bytes, expected a range within them")
        return BorrowedBuffer(self.address + offset, end - offset, self.dtype, self.writable, self.device, self.owner)


def borrow(value: object, where: str) -> BorrowedBuffer:
    """Borrow the memory of a tensor.

    Raises BindingError unless it is a tensor, contiguous, and in this machine's byte order; the message begins with
    `where`.
    """
    if isinstance(value, _Tensor):
        return _borrow_tensor(value, value, _device(value), True, where)
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        return _borrow_array(value, where)
    if hasattr(value, "__dlpack__") and not isinstance(value, np.generic | np.ma.MaskedArray):
        try:
            tensor = from_dlpack(value)
        except Exception as error:  # each library raises its own
            raise BindingError(f"{where} ({type(value).__name__}) gives no DLPack tensor: {error}") from error
        kind, index = _device(tensor)
        device = kind, -1 if kind == CPU else index
        return _borrow_tensor(tensor, (value, tensor), device, not _is_read_only(value), where)
    expected = "expected memory: a numpy array, a tvm tensor or an object with __dlpack__"
    raise BindingError(f"{where} is a {type(value).__name__}, {expected}")


def check_device(borrowed: BorrowedBuffer, device: runtime.Device, name: str, where: str) -> None:
    """Require memory on `device`, called `name` in messages; host memory without an id is on every CPU."""
    key = device.dlpack_device_type(), device.index
    if borrowed.device == key or borrowed.device == (key[0], -1):
        return
    kind, index = borrowed.device
    actual = f"{backend_of_type(kind).type_name}{f':{index}' if index >= 0 else ''}"
    expected = f"{backend_of_type(key[0]).type_name}:{key[1]} ({name})"
    raise BindingError(f"{where} is on the device {actual}, expected {expected}")


def _borrow_array(array: np.ndarray, where: str) -> BorrowedBuffer:
    if array.dtype.kind in "OSUMm" or array.dtype.names is not None or not array.dtype.isnative:
        raise BindingError(f"{where} has numpy dtype {array.dtype}, expected numbers in this machine's byte order")
    if not array.flags.c_contiguous:
        raise BindingError(f"{where} has strides {array.strides} for shape {array.shape}, expected contiguous memory")
    address = array.__array_interface__["data"][0]
    return BorrowedBuffer(address, array.nbytes, dtype_name(array.dtype), array.flags.writeable, (CPU, -1), array)


def _borrow_tensor(
    tensor: runtime.Tensor, owner: Any, device: tuple[int, int], writable: bool, where: str
) -> BorrowedBuffer:
    if tensor.numel() and not tensor.is_contiguous():
        raise BindingError(
            f"{where} has strides {tensor.strides} for shape {tuple(tensor.shape)}, expected contiguous memory"
        )
    # The pointer of an alias includes the tensor's byte offset.
    pointer = (alias(tensor, tensor.device) if has_offset(tensor) else tensor).data_ptr()
    return BorrowedBuffer(pointer, nbytes_of(tensor), str(tensor.dtype), writable, device, owner)


def _device(tensor: runtime.Tensor) -> tuple[int, int]:
    device = tensor.device
    return (CPU, -1) if device.dlpack_device_type() == CUDA_HOST else (device.dlpack_device_type(), device.index)


class _VersionedHead(ctypes.Structure):
    """The beginning of a versioned DLPack capsule (dlpack.h, DLManagedTensorVersioned)."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    ]


_READ_ONLY_FLAG = 1  # DLPACK_FLAG_BITMASK_READ_ONLY


def _is_read_only(value: Any) -> bool:
    """Return whether an object exports its memory as read-only, which DLPack supports since version 1."""
    try:
        capsule = value.__dlpack__(max_version=(1, 0))  # keeps the structure alive
        return bool(
            _VersionedHead.from_address(capsule_pointer(capsule, b"dltensor_versioned")).flags & _READ_ONLY_FLAG
        )
    except (TypeError, ValueError, BufferError):  # an older producer
        return False
