"""Encoding of values in messages between processes.

Ray copies numpy arrays once, into shared memory, of which readers get views; all other objects are pickled. So a tensor
is sent as the array that shares its memory, or as bytes if numpy lacks its element type.

Channels of compiled graphs have a fixed size, since closing one that has grown can hang if it leads to another node.
Values that do not fit go through Ray's object store, and the message holds references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tvm_ffi
from tvm import runtime

from ..target.element_types import numpy_dtype
from ..vm.device.memory_pools import receive_buffer
from ..vm.device.tensors import bytes_of, copy_into, copy_to, dtype_name, from_numpy, on_host, view_bytes

CHANNEL_BYTES = 1 << 19
"""Size of channels if the sizes of messages are symbolic."""

STORED_BYTES = 8 << 20
"""Size from which a tensor goes through the object store. Between two nodes, a channel takes 5 ms for 4 MB (actor calls
take 16), 43 ms for 16 MB, and 176 to 220 ms for 64 MB, of which the store needs about half."""

PROBE = ""
"""`Message.function` of a message that only opens the channels."""

HEAD_BYTES = 4096
"""Bytes of a channel for everything besides elements of tensors, and for the message of a failure."""

_VALUE_BYTES = 512
_NATIVE_KINDS = "biuf"

_Tensor = tvm_ffi.core.Tensor
_HOST = runtime.device("cpu", 0)


class RawTensor(NamedTuple):
    """A tensor of an element type that numpy lacks: type, shape, and bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


class Stored(NamedTuple):
    """A tensor in Ray's object store."""

    reference: Any


class Failure(NamedTuple):
    """Error of a step, instead of its results."""

    kind: type[Exception]
    message: str


class Message(NamedTuple):
    """Message of a channel for one call.

    Attributes
    ----------
    function : str
        Function of the user's module.
    call : int
        Number of the call, the key of values that a host keeps.
    values : tuple of object or Failure
        Encoded values, or the failure of an earlier step.
    """

    function: str
    call: int
    values: tuple[Any, ...] | Failure


def encode(value: Any) -> Any:
    """Encode a run-time value or an argument of a call; tensors on CPUs share their memory with the result."""
    if isinstance(value, _Tensor):
        return _encode_tensor(value)
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind in _NATIVE_KINDS and array.dtype.isnative and dtype_name(array.dtype) in _NATIVE:
            return array if array.flags.c_contiguous else np.ascontiguousarray(array).reshape(array.shape)
        return _encode_tensor(from_numpy(array, _HOST))
    if isinstance(value, tvm_ffi.Shape | list | tuple):
        return tuple(int(extent) for extent in value)
    return value


def decode(value: Any) -> Any:
    """Decode a value that is read at once: tensors are in memory of Ray, which must not be kept."""
    if isinstance(value, RawTensor):
        return view_bytes(value.data, value.shape, value.dtype)
    return value


def decode_copy(value: Any) -> Any:
    """Decode a value to keep: tensors are copied to TVM tensors on the CPU."""
    if isinstance(value, np.ndarray):
        return from_numpy(value, _HOST)
    if isinstance(value, RawTensor):
        return copy_to(decode(value), _HOST)
    return value


def copy_value(value: Any) -> Any:
    """Copy an encoded value."""
    if isinstance(value, RawTensor):
        return value._replace(data=value.data.copy())
    return value.copy() if isinstance(value, np.ndarray) else value


def nbytes(value: Any) -> int:
    """Bytes of an encoded value's elements."""
    if isinstance(value, RawTensor):
        return int(value.data.nbytes)
    return int(value.nbytes) if isinstance(value, np.ndarray) else 0


def fit(values: Sequence[Any], channel_bytes: int, put: Callable[[Any], Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """Put values that are large or do not fit into the channel into the object store.

    Parameters
    ----------
    values : sequence of object
        Encoded values.
    channel_bytes : int
        Size of the channel, in bytes.
    put : callable
        Function that puts a value into the store and returns a reference.

    Returns
    -------
    values : tuple of object
        Values, or references to them.
    references : list of object
        References, which the sender must keep until the receiver has read the values.
    """
    sizes = [nbytes(value) for value in values]
    capacity = channel_bytes - HEAD_BYTES - _VALUE_BYTES * len(values)
    if sum(sizes) <= capacity and max(sizes, default=0) < STORED_BYTES:
        return tuple(values), []
    sent, references = list(values), []
    total = sum(sizes)
    for index in sorted(range(len(values)), key=lambda index: -sizes[index]):
        if not sizes[index] or (total <= capacity and sizes[index] < STORED_BYTES):
            break
        references.append(put(values[index]))
        sent[index] = Stored(references[-1])
        total -= sizes[index]
    return tuple(sent), references


def fetch(values: Iterable[Any], get: Callable[[Any], Any]) -> list[Any]:
    """Read values that are in the object store."""
    return [get(value.reference) if isinstance(value, Stored) else value for value in values]


def channel_bytes_for(sizes: Iterable[int]) -> int:
    """Size of a channel for values of these sizes, some of which go through the object store."""
    sizes = list(sizes)
    return HEAD_BYTES + _VALUE_BYTES * len(sizes) + sum(size for size in sizes if size < STORED_BYTES)


def _copy_to_pinned(tensor: runtime.Tensor) -> runtime.Tensor:
    """Copy a GPU's tensor to pinned memory, for full bandwidth; small tensors are returned as they are."""
    buffer = receive_buffer(tensor, _HOST)
    if buffer is None:
        return tensor
    copy_into(tensor, buffer)
    return buffer


def _encode_tensor(tensor: runtime.Tensor) -> np.ndarray | RawTensor:
    tensor = on_host(_copy_to_pinned(tensor))
    data, dtype, shape = bytes_of(tensor), str(tensor.dtype), tuple(tensor.shape)
    return data.view(numpy_dtype(dtype)).reshape(shape) if dtype in _NATIVE else RawTensor(dtype, shape, data)


_NATIVE = frozenset(
    (
        "bool",
        "float16",
        "float32",
        "float64",
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    )
)
