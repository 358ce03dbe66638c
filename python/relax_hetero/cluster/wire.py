"""Encoding of values in messages, and of messages, between processes.

Connections send the elements of numpy arrays from and into their memory; all other objects are pickled. So a tensor is
sent as the array that shares its memory, or as bytes if numpy lacks its element type.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import tvm_ffi
from tvm import runtime

from ..artifact.metadata import CPU
from ..target.element_types import numpy_dtype
from ..vm.device.memory_pools import receive_buffer
from ..vm.device.tensors import bytes_of, copy_into, copy_to, from_numpy, on_host, share_or_copy, view_bytes

_Tensor = tvm_ffi.core.Tensor
_HOST = runtime.device("cpu", 0)

_BODY = struct.Struct("<Q?")
"""Number of arrays of a message, and whether all its values are arrays; followed by the bytes of each, and a pickle."""
_MAX_KINDS = 256
"""Maximum number of bodies that a codec remembers in each direction."""


class RawTensor(NamedTuple):
    """A tensor of an element type that numpy lacks: type, shape, and bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


class Failure(NamedTuple):
    """Error of a step, instead of its results."""

    kind: type[Exception]
    message: str


class Message(NamedTuple):
    """Message between two tasks, or a task and the caller, for one call.

    Attributes
    ----------
    source, target : int
        Indices of the tasks in the function's route; `CALL` and `END` for the caller.
    function : str
        Function of the user's module.
    call : int
        Number of the call among those of the route.
    values : tuple of object or Failure
        Encoded values, or the failure of an earlier step.
    """

    source: int
    target: int
    function: str
    call: int
    values: tuple[Any, ...] | Failure


class Kind(NamedTuple):
    """Messages with the same body.

    Attributes
    ----------
    sizes : tuple of int
        Bytes of each array.
    content : object
        Source, target and function of the message, and the element types and shapes of its values, if all values are
        arrays; else these three and the values, pickled, with arrays out of band.
    has_only_arrays : bool
        Whether all values are arrays.
    """

    sizes: tuple[int, ...]
    content: Any
    has_only_arrays: bool


class MessageCodec:
    """Encodes and decodes the messages of a connection.

    The *body* of a message is all but the call's number and the arrays' elements. Bodies of messages that have only
    arrays are remembered, since later calls send the same ones, and pickling takes longer than sending.
    """

    def __init__(self) -> None:
        self._bodies: dict[Hashable, bytes] = {}
        self._kinds: dict[Hashable, Kind] = {}

    def encode(self, message: Message) -> tuple[bytes, list[memoryview]]:
        """Encode a message; returns its body, and the bytes of its arrays, which must be contiguous."""
        source, target, function, _, values = message
        if all([type(value) is np.ndarray for value in values]):  # a list is faster than a generator
            kinds: Any = [(array.dtype, array.shape) for array in values]
            arrays = [pickle.PickleBuffer(array).raw() for array in values]
            key = (source, target, function, *kinds)
            body = self._bodies.get(key)
            if body is None:
                body = _make_body(arrays, True, pickle.dumps((source, target, function, kinds)))
                _remember(self._bodies, key, body)
            return body, arrays
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps((source, target, function, values), protocol=5, buffer_callback=buffers.append)
        arrays = [buffer.raw() for buffer in buffers]
        return _make_body(arrays, False, pickled), arrays

    def kind_of(self, body: bytes) -> Kind:
        """Kind of a message, by its body."""
        kind = self._kinds.get(body)
        if kind is None:
            count, has_only_arrays = _BODY.unpack_from(body)
            begin = _BODY.size + 8 * count
            kind = Kind(struct.unpack_from(f"<{count}Q", body, _BODY.size), body[begin:], has_only_arrays)
            if has_only_arrays:
                kind = kind._replace(content=pickle.loads(kind.content))
                _remember(self._kinds, body, kind)
        return kind

    @staticmethod
    def decode(kind: Kind, call: int, buffers: Sequence[np.ndarray]) -> Message:
        """Decode a message of a kind, from the number of its call and the bytes of its arrays."""
        if kind.has_only_arrays:
            source, target, function, kinds = kind.content
            pairs = zip(buffers, kinds, strict=True)
            values: Any = tuple([np.ndarray(shape, dtype, buffer) for buffer, (dtype, shape) in pairs])
        else:
            source, target, function, values = pickle.loads(kind.content, buffers=buffers)
        return Message(source, target, function, call, values)


def _make_body(arrays: Sequence[memoryview], has_only_arrays: bool, pickled: bytes) -> bytes:
    sizes = [array.nbytes for array in arrays]
    return _BODY.pack(len(sizes), has_only_arrays) + struct.pack(f"<{len(sizes)}Q", *sizes) + pickled


def _remember(cache: dict[Hashable, Any], key: Hashable, value: object) -> None:
    if len(cache) >= _MAX_KINDS:
        cache.clear()
    cache[key] = value


def is_plain(array: np.ndarray) -> bool:
    """Return whether an array is sent as it is: contiguous, with elements of a type that numpy has."""
    return array.dtype in _NATIVE_DTYPES and array.flags.c_contiguous


def encode(value: Any) -> Any:
    """Encode a run-time value or an argument of a call; tensors on CPUs share their memory with the result."""
    if isinstance(value, _Tensor):
        return _encode_tensor(value)
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype in _NATIVE_DTYPES:
            return array if array.flags.c_contiguous else np.ascontiguousarray(array).reshape(array.shape)
        return _encode_tensor(from_numpy(array, _HOST))
    if isinstance(value, tvm_ffi.Shape | list | tuple):
        return tuple(int(extent) for extent in value)
    return value


def decode(value: Any) -> Any:
    """Decode a value for a step, which may read arrays as they are."""
    if isinstance(value, RawTensor):
        return view_bytes(value.data, value.shape, value.dtype)
    return value


def decode_received(value: Any) -> Any:
    """Decode a value of a connection, whose memory nothing else uses: arrays become TVM tensors on the CPU."""
    return share_or_copy(value) if isinstance(value, np.ndarray) else decode(value)


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


def _copy_to_pinned(tensor: runtime.Tensor) -> runtime.Tensor:
    """Copy a GPU's tensor to pinned memory, for full bandwidth; small tensors are returned as they are."""
    buffer = receive_buffer(tensor, _HOST)
    if buffer is None:
        return tensor
    copy_into(tensor, buffer)
    return buffer


def _encode_tensor(tensor: runtime.Tensor) -> np.ndarray | RawTensor:
    if tensor.__dlpack_device__()[0] == CPU:
        with suppress(BufferError, RuntimeError):  # element types that numpy lacks
            array = np.from_dlpack(tensor)
            if is_plain(array):
                return array
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
_NATIVE_DTYPES = frozenset(map(np.dtype, _NATIVE))
