"""Values as they travel between processes, and back.

Ray writes numpy arrays into shared memory by one copy and hands readers views of it; any other object is pickled. So a
tensor travels as the array that shares its memory, and one of an element type that numpy lacks as its bytes.

Channels of compiled graphs are made for messages of a size (`CHANNEL_BYTES`), as closing one that was enlarged can hang
where it leads to another node. What does not fit goes through Ray's object store, and the message holds a reference.
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
"""Room in a channel where the sizes of messages are not known."""

STORED_BYTES = 8 << 20
"""A tensor of this size or more goes through the object store. Of 4 MB between two nodes, a channel takes 5 ms and
actor calls 16; of 16 MB the channel takes 43 ms, of 64 MB 176 to 220, the store's transfer about half of that."""

PROBE = ""
"""In place of a function: a message that only shows that the channels are there."""

HEAD_BYTES = 4096
"""Room in a channel for what a message holds besides its tensors' elements, and for what says how a step failed."""

_VALUE_BYTES = 512
_NATIVE_KINDS = "biuf"

_Tensor = tvm_ffi.core.Tensor
_HOST = runtime.device("cpu", 0)


class Packed(NamedTuple):
    """A tensor of an element type that numpy lacks: TVM's name of it, the shape, and the bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


class Stored(NamedTuple):
    """A tensor in Ray's object store."""

    reference: Any


class Failure(NamedTuple):
    """A step that failed, in the place of the values that it would have made."""

    kind: type[Exception]
    message: str


class Message(NamedTuple):
    """Contents of a channel for one call.

    Attributes
    ----------
    function : str
        Function of the user's module.
    call : int
        The number of the call; what a host keeps of a call is under it.
    values : tuple of object or Failure
        Or the failure of a step before.
    """

    function: str
    call: int
    values: tuple[Any, ...] | Failure


def encode(value: Any) -> Any:
    """A run-time value, or an argument of the caller's, as it travels; tensors on CPUs share their memory with it."""
    if isinstance(value, _Tensor):
        return _encoded_tensor(value)
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.kind in _NATIVE_KINDS and array.dtype.isnative and dtype_name(array.dtype) in _NATIVE:
            return array if array.flags.c_contiguous else np.ascontiguousarray(array).reshape(array.shape)
        return _encoded_tensor(from_numpy(array, _HOST))
    if isinstance(value, tvm_ffi.Shape | list | tuple):
        return tuple(int(extent) for extent in value)
    return value


def decode(value: Any) -> Any:
    """A value that arrived, to be read at once: tensors lie in memory that Ray writes to again, or never lets go of."""
    if isinstance(value, Packed):
        return view_bytes(value.data, value.shape, value.dtype)
    return value


def decode_copy(value: Any) -> Any:
    """A value that arrived, for good: tensors of TVM on the host, in memory of their own."""
    if isinstance(value, np.ndarray):
        return from_numpy(value, _HOST)
    if isinstance(value, Packed):
        return copy_to(decode(value), _HOST)
    return value


def copied(value: Any) -> Any:
    """An encoded value in memory of its own."""
    if isinstance(value, Packed):
        return value._replace(data=value.data.copy())
    return value.copy() if isinstance(value, np.ndarray) else value


def nbytes(value: Any) -> int:
    """The bytes of an encoded value's elements."""
    if isinstance(value, Packed):
        return int(value.data.nbytes)
    return int(value.nbytes) if isinstance(value, np.ndarray) else 0


def fit(values: Sequence[Any], channel_bytes: int, put: Callable[[Any], Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """Values with the large ones, and those that have no room in the channel, put into the object store.

    Parameters
    ----------
    channel_bytes : int
        Size of the channel, in bytes.
    put : callable
        Puts a value into the store and returns a reference.

    Returns
    -------
    tuple
        The values; and the references, which the sender keeps until the receiver has read.
    """
    sizes = [nbytes(value) for value in values]
    left = channel_bytes - HEAD_BYTES - _VALUE_BYTES * len(values)
    if sum(sizes) <= left and max(sizes, default=0) < STORED_BYTES:
        return tuple(values), []
    sent, references = list(values), []
    total = sum(sizes)
    for index in sorted(range(len(values)), key=lambda index: -sizes[index]):
        if not sizes[index] or (total <= left and sizes[index] < STORED_BYTES):
            break
        references.append(put(values[index]))
        sent[index] = Stored(references[-1])
        total -= sizes[index]
    return tuple(sent), references


def fetched(values: Iterable[Any], get: Callable[[Any], Any]) -> list[Any]:
    """Values with those that are in the object store brought here."""
    return [get(value.reference) if isinstance(value, Stored) else value for value in values]


def channel_bytes_for(sizes: Iterable[int]) -> int:
    """The room of a channel for a message of values of these sizes in bytes; what goes through the store takes none."""
    found = list(sizes)
    return HEAD_BYTES + _VALUE_BYTES * len(found) + sum(size for size in found if size < STORED_BYTES)


def _pinned(tensor: runtime.Tensor) -> runtime.Tensor:
    """A tensor of a GPU in pinned memory of this host, to which the GPU copies at full rate; small ones stay there."""
    room = receive_buffer(tensor, _HOST)
    if room is None:
        return tensor
    copy_into(tensor, room)
    return room


def _encoded_tensor(tensor: runtime.Tensor) -> np.ndarray | Packed:
    tensor = on_host(_pinned(tensor))
    data, dtype, shape = bytes_of(tensor), str(tensor.dtype), tuple(tensor.shape)
    return data.view(numpy_dtype(dtype)).reshape(shape) if dtype in _NATIVE else Packed(dtype, shape, data)


_NATIVE = frozenset(
    (
        "bool",
        "float16",
        "float32",
        "float64",
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    )
)
