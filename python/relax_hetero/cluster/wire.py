"""Encoding of values in messages, and of messages, between processes.

Connections send the elements of numpy arrays from and into their memory; all other objects are pickled. So a tensor is
sent as the array that shares its memory, or as bytes if numpy lacks its element type.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Iterator, Sequence
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

_MAX_BODIES = 256  # maximum number of bodies that a codec remembers in each direction


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
    """Message between two tasks, or a task and the caller, for one call."""

    # Indices of the tasks in the function's route; `CALL` and `END` for the caller.
    source: int
    target: int
    function: str  # function of the user's module
    call: int  # number of the call among those of the route
    values: tuple[Any, ...] | Failure  # encoded values, or the failure of an earlier step


class _Array(NamedTuple):
    """Stands for an array in the body of a message."""

    dtype: np.dtype
    shape: tuple[int, ...]


class Body(NamedTuple):
    """All of a message but the number of the call and the elements of arrays."""

    sizes: tuple[int, ...]  # bytes of each array
    # As in `Message`.
    source: int
    target: int
    function: str
    values: Any  # values, with `_Array` and `RawTensor` without data in place of arrays


class MessageCodec:
    """Encodes and decodes the messages of a connection.

    Bodies are remembered, since most calls send those of earlier calls, and pickling takes longer than sending.
    """

    def __init__(self) -> None:
        self._encoded: dict[Hashable, bytes] = {}
        self._decoded: dict[Hashable, Body] = {}

    def encode(self, message: Message) -> tuple[bytes, list[memoryview]]:
        """Encode a message; returns its body, and the bytes of its arrays, which must be contiguous."""
        source, target, function, _, values = message
        arrays: list[np.ndarray] = []
        stands_for: Any = values
        if not isinstance(values, Failure):
            stands_for = tuple([_take_array(value, arrays) for value in values])
        views = [pickle.PickleBuffer(array).raw() for array in arrays]  # type: ignore[arg-type]
        is_repeated = _REMEMBERED.issuperset(map(type, stands_for))
        key = (source, target, function, stands_for)
        text = self._encoded.get(key) if is_repeated else None
        if text is None:
            text = pickle.dumps(Body(tuple([view.nbytes for view in views]), source, target, function, stands_for))
            if is_repeated:
                _remember(self._encoded, key, text)
        return text, views

    def decode_body(self, text: bytes) -> Body:
        """Decode a body."""
        body = self._decoded.get(text)
        if body is None:
            body = pickle.loads(text)
            if _REMEMBERED.issuperset(map(type, body.values)):
                _remember(self._decoded, text, body)
        return body

    @staticmethod
    def decode(body: Body, call: int, buffers: Sequence[np.ndarray]) -> Message:
        """Make a message, from its body, the number of its call and the bytes of its arrays."""
        values = body.values
        if not isinstance(values, Failure):
            left = iter(buffers)
            values = tuple([_put_array(value, left) for value in values])
        return Message(body.source, body.target, body.function, call, values)


_NO_DATA: Any = None
_REMEMBERED = frozenset((_Array, RawTensor, tuple))
"""Types of values that calls repeat, and whose equal instances mean the same."""


def _take_array(value: Any, arrays: list[np.ndarray]) -> Any:
    """Move the array of a value to a list; returns what stands for the value."""
    if type(value) is np.ndarray:
        arrays.append(value)
        return _Array(value.dtype, value.shape)
    if isinstance(value, RawTensor):
        arrays.append(value.data)
        return value._replace(data=_NO_DATA)
    return value


def _put_array(value: Any, buffers: Iterator[np.ndarray]) -> Any:
    """Undo `_take_array`, with the bytes of an array."""
    if type(value) is _Array:
        return np.ndarray(value.shape, value.dtype, next(buffers))
    return value._replace(data=next(buffers)) if isinstance(value, RawTensor) else value


def _remember(cache: dict[Hashable, Any], key: Hashable, value: object) -> None:
    if len(cache) >= _MAX_BODIES:
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
    return view_bytes(value.data, value.shape, value.dtype) if isinstance(value, RawTensor) else value


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
