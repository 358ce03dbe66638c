"""Tensors of TVM as arrays: what numpy, Python's operators, ``copy`` and ``pickle`` ask of an array is answered.

Stock tensors have shape, element type and `numpy()` alone. numpy takes such an object for a single value, so that
``np.argmax(result)`` is 0 whatever the result holds, and copying or pickling one ends the process. Importing
`relax_hetero.vm` gives the class ``tvm.runtime.Tensor`` the missing methods. The class is changed, instead of results
being of a class of their own, because TVM's foreign-function layer makes every tensor of this one class: a call costs
nothing more, and its results are TVM tensors in every respect. ``==`` between two tensors stays TVM's, which asks
whether they are the same object: the compiler compares tensors so.

Memory of the host is shared; from other devices `on_host` copies it, the one road from a tensor to numpy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tvm_ffi
from tvm import runtime

from ...artifact.metadata import CPU
from ...target.element_types import numpy_dtype
from .tensors import PACKED, bytes_of, copy_to, empty, is_host, on_host, unpacked

_Tensor = tvm_ffi.core.Tensor

_BINARY = (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor",
)  # fmt: skip
_COMPARISONS = ("lt", "le", "gt", "ge")
_UNARY = ("neg", "pos", "abs", "invert")

_stock_numpy: Callable[[Any], np.ndarray] = runtime.Tensor.numpy
_stock_set: Callable[..., None] = runtime.Tensor.__setitem__
_stock_dlpack: Callable[..., Any] = _Tensor.__dlpack__


def host_array(tensor: runtime.Tensor) -> np.ndarray:
    """A tensor's elements as a numpy array, which keeps their memory alive: the tensor's own on the host, else a copy.

    Types of less than a byte are copied everywhere, an element a byte.
    """
    return _read(tensor)[0]


def _read(tensor: runtime.Tensor) -> tuple[np.ndarray, bool]:
    """A tensor's elements as a numpy array, and whether they lie in the tensor's own memory."""
    host = on_host(tensor)
    try:
        return np.from_dlpack(host), host is tensor
    except (BufferError, RuntimeError):  # an element type that DLPack names and numpy does not
        if str(host.dtype) in PACKED and host.is_contiguous():
            return unpacked(host), False
        if host.dtype.bits % 8 or host.dtype.lanes != 1 or not host.is_contiguous():
            return _stock_numpy(host), False
        return bytes_of(host).view(numpy_dtype(str(host.dtype))).reshape(host.shape), host is tensor


def _to_array(tensor: runtime.Tensor, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    """``np.asarray(tensor)`` (shared memory where that can be), ``np.array(tensor)`` (a copy)."""
    array, is_shared = _read(tensor)
    is_other = dtype is not None and np.dtype(dtype) != array.dtype
    if copy is False and (is_other or not is_shared):
        wanted = f" as {np.dtype(dtype)}" if is_other else ""
        raise ValueError(f"a {tensor.dtype} tensor on {tensor.device} cannot be an array{wanted} without a copy")
    if is_other:
        return array.astype(dtype)
    return array.copy() if copy and is_shared else array


def _numpy(tensor: runtime.Tensor) -> np.ndarray:
    """A copy of the elements as a numpy array; ``np.asarray(tensor)`` makes none where the host has them."""
    array, is_shared = _read(tensor)
    return array.copy() if is_shared else array


def _dlpack(
    tensor: runtime.Tensor,
    *,
    stream: Any = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """A DLPack capsule; a copy on the host, or where the tensor is, for whom asks for that."""
    if dl_device is not None and tuple(map(int, dl_device)) != tensor.__dlpack_device__():
        if int(dl_device[0]) != CPU:
            raise BufferError(f"a tensor on {tensor.device} is exported there or to a CPU, found device {dl_device}")
        if copy is False and not is_host(tensor.device):
            raise BufferError(f"a tensor on {tensor.device} cannot be exported to a CPU without a copy")
        tensor = tensor if is_host(tensor.device) and not copy else copy_to(tensor, runtime.device("cpu", 0))
    elif copy:
        tensor = copy_to(tensor, tensor.device)
    # A consumer of an older version than ours gets the capsule that has none.
    is_old = max_version is None or max_version[0] < 1
    return _stock_dlpack(tensor) if is_old else _stock_dlpack(tensor, stream=stream, max_version=max_version)


class _Size(int):
    """The number of elements, as numpy has it, and TVM's method that gives one extent: ``t.size``, ``t.size(0)``."""

    _shape: tuple[int, ...]

    def __call__(self, axis: int) -> int:
        if not -len(self._shape) <= axis < len(self._shape):
            raise IndexError(f"Dimension {axis} out of range for tensor with {len(self._shape)} dimensions")
        return self._shape[axis]


def _size(tensor: runtime.Tensor) -> _Size:
    size = _Size(tensor.numel())
    size._shape = tensor.shape
    return size


def _length(tensor: runtime.Tensor) -> int:
    if tensor.ndim == 0:
        raise TypeError("len() of a tensor without dimensions")
    return int(tensor.shape[0])


def _rows(tensor: runtime.Tensor) -> Iterator[Any]:
    return iter(host_array(tensor))


def _element(tensor: runtime.Tensor, key: Any) -> Any:
    return host_array(tensor)[_plain(key)]


def _set_elements(tensor: runtime.Tensor, key: Any, value: Any) -> None:
    """``tensor[key] = value`` in memory of the host; elsewhere for the whole tensor only, as in stock TVM."""
    if isinstance(key, slice) and key == slice(None) and isinstance(value, _Tensor | np.ndarray | np.generic):
        _stock_set(tensor, key, value)
        return
    array, is_shared = _read(tensor)
    if not is_shared:
        raise ValueError(f"a {tensor.dtype} tensor on {tensor.device} can be set as a whole only: t[:] = array")
    array[_plain(key)] = _plain(value)


def _holds(tensor: runtime.Tensor, value: Any) -> bool:
    return _plain(value) in host_array(tensor)


def _plain(value: Any) -> Any:
    """An operand as numpy knows it."""
    if isinstance(value, _Tensor):
        return host_array(value)
    return tuple(map(_plain, value)) if type(value) is tuple else value


def _unary(apply: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda tensor: apply(host_array(tensor))


def _binary(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda tensor, other: apply(host_array(tensor), _plain(other))


def _reflected(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda tensor, other: apply(_plain(other), host_array(tensor))


def _equal(tensor: runtime.Tensor, other: Any) -> Any:
    """Element by element with arrays, numbers and sequences; another tensor is equal if it is the same object."""
    return tensor.same_as(other) if not _is_array_like(other) else host_array(tensor) == other


def _not_equal(tensor: runtime.Tensor, other: Any) -> Any:
    return not tensor.same_as(other) if not _is_array_like(other) else host_array(tensor) != other


def _is_array_like(value: Any) -> bool:
    is_array = isinstance(value, np.ndarray | np.generic | int | float | complex | list | tuple)
    return is_array or (hasattr(value, "__array__") and not isinstance(value, _Tensor))


def _reduce(tensor: runtime.Tensor) -> Any:
    """The parts of a copy in another process, for ``pickle``: it is made on the host there."""
    return _rebuild, (bytes_of(tensor).tobytes(), tuple(tensor.shape), str(tensor.dtype))


def _rebuild(data: bytes, shape: tuple[int, ...], dtype: str) -> runtime.Tensor:
    tensor = empty(shape, dtype, runtime.device("cpu", 0))
    bytes_of(tensor)[:] = np.frombuffer(data, "uint8")
    return tensor


def _copied(tensor: runtime.Tensor, _memo: Any = None) -> runtime.Tensor:
    return copy_to(tensor, tensor.device)


_METHODS: dict[str, Any] = {
    "__array__": _to_array,
    "numpy": _numpy,
    "__dlpack__": _dlpack,
    "size": property(_size),
    "__len__": _length,
    "__iter__": _rows,
    "__getitem__": _element,
    "__setitem__": _set_elements,
    "__contains__": _holds,
    "__eq__": _equal,
    "__ne__": _not_equal,
    "__reduce__": _reduce,
    "__copy__": _copied,
    "__deepcopy__": _copied,
    "__divmod__": _binary(divmod),
    "__rdivmod__": _reflected(divmod),
    "__format__": lambda tensor, spec: format(host_array(tensor), spec),
    **{f"__{kind.__name__}__": _unary(kind) for kind in (bool, int, float, complex)},
    **{f"__{name}__": _unary(getattr(operator, f"__{name}__")) for name in (*_UNARY, "index")},
    **{f"__{name}__": _binary(getattr(operator, f"__{name}__")) for name in (*_BINARY, *_COMPARISONS)},
    **{f"__r{name}__": _reflected(getattr(operator, f"__{name}__")) for name in _BINARY},
}


def make_tensors_arrays() -> None:
    """Give ``tvm.runtime.Tensor`` the methods of this module; again changes nothing."""
    for name, method in _METHODS.items():
        setattr(runtime.Tensor, name, method)
