"""Array methods of TVM tensors, for numpy, Python's operators, ``copy`` and ``pickle``.

Stock tensors have only shape, element type and `numpy()`. numpy treats such an object as a scalar, so that
``np.argmax(result)`` is always 0, and copying or pickling one crashes the process. Importing `relax_hetero.vm` adds the
missing methods to the class ``tvm.runtime.Tensor``, because TVM's foreign-function layer creates all tensors of this
class: calls cost nothing more, and results are TVM tensors in every respect. ``==`` between two tensors remains object
identity, on which the compiler relies.

Host memory is shared with numpy; `on_host` copies from other devices.
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
    """A tensor's elements as a numpy array: shared memory on the host, else a copy.

    Types of less than a byte are always copied, one byte per element.
    """
    try:
        return np.from_dlpack(on_host(tensor))
    except (BufferError, RuntimeError):
        return _read(tensor)[0]


def _read(tensor: runtime.Tensor) -> tuple[np.ndarray, bool]:
    """A tensor's elements as a numpy array, and whether they share the tensor's memory."""
    host = on_host(tensor)
    try:
        return np.from_dlpack(host), host is tensor
    except (BufferError, RuntimeError):  # an element type that numpy lacks
        if str(host.dtype) in PACKED and host.is_contiguous():
            return unpacked(host), False
        if host.dtype.bits % 8 or host.dtype.lanes != 1 or not host.is_contiguous():
            return _stock_numpy(host), False
        return bytes_of(host).view(numpy_dtype(str(host.dtype))).reshape(host.shape), host is tensor


def _to_array(tensor: runtime.Tensor, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    """``np.asarray(tensor)`` (shared memory if possible) and ``np.array(tensor)`` (a copy)."""
    array, is_shared = _read(tensor)
    needs_cast = dtype is not None and np.dtype(dtype) != array.dtype
    if copy is False and (needs_cast or not is_shared):
        suffix = f" as {np.dtype(dtype)}" if needs_cast else ""
        raise ValueError(f"a {tensor.dtype} tensor on {tensor.device} cannot be an array{suffix} without a copy")
    if needs_cast:
        return array.astype(dtype)
    return array.copy() if copy and is_shared else array


def _numpy(tensor: runtime.Tensor) -> np.ndarray:
    """A copy of the elements as a numpy array; ``np.asarray(tensor)`` shares host memory instead."""
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
    """A DLPack capsule, of a copy if `dl_device` or `copy` require one."""
    if dl_device is not None and tuple(map(int, dl_device)) != tensor.__dlpack_device__():
        if int(dl_device[0]) != CPU:
            raise BufferError(f"a tensor on {tensor.device} is exported there or to a CPU, found device {dl_device}")
        if copy is False and not is_host(tensor.device):
            raise BufferError(f"a tensor on {tensor.device} cannot be exported to a CPU without a copy")
        tensor = tensor if is_host(tensor.device) and not copy else copy_to(tensor, runtime.device("cpu", 0))
    elif copy:
        tensor = copy_to(tensor, tensor.device)
    # Consumers of older versions get an unversioned capsule.
    is_old = max_version is None or max_version[0] < 1
    return _stock_dlpack(tensor) if is_old else _stock_dlpack(tensor, stream=stream, max_version=max_version)


class _Size(int):
    """The number of elements, as numpy's ``t.size``, that can also be called as TVM's method ``t.size(0)``."""

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
    """``tensor[key] = value`` in host memory; on other devices only for the whole tensor, as in stock TVM."""
    if isinstance(key, slice) and key == slice(None) and isinstance(value, _Tensor | np.ndarray | np.generic):
        _stock_set(tensor, key, value)
        return
    array, is_shared = _read(tensor)
    if not is_shared:
        raise ValueError(f"a {tensor.dtype} tensor on {tensor.device} can be set as a whole only: t[:] = array")
    array[_plain(key)] = _plain(value)


def _contains(tensor: runtime.Tensor, value: Any) -> bool:
    return _plain(value) in host_array(tensor)


def _plain(value: Any) -> Any:
    """An operand with tensors replaced by arrays."""
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
    """Elementwise comparison with arrays, numbers and sequences; identity with tensors."""
    return tensor.same_as(other) if not _is_array_like(other) else host_array(tensor) == other


def _not_equal(tensor: runtime.Tensor, other: Any) -> Any:
    return not tensor.same_as(other) if not _is_array_like(other) else host_array(tensor) != other


def _is_array_like(value: Any) -> bool:
    is_array = isinstance(value, np.ndarray | np.generic | int | float | complex | list | tuple)
    return is_array or (hasattr(value, "__array__") and not isinstance(value, _Tensor))


def _reduce(tensor: runtime.Tensor) -> Any:
    """Pickle support: the copy is a host tensor."""
    return _rebuild, (bytes_of(tensor).tobytes(), tuple(tensor.shape), str(tensor.dtype))


def _rebuild(data: bytes, shape: tuple[int, ...], dtype: str) -> runtime.Tensor:
    tensor = empty(shape, dtype, runtime.device("cpu", 0))
    bytes_of(tensor)[:] = np.frombuffer(data, "uint8")
    return tensor


def _copy(tensor: runtime.Tensor, _memo: Any = None) -> runtime.Tensor:
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
    "__contains__": _contains,
    "__eq__": _equal,
    "__ne__": _not_equal,
    "__reduce__": _reduce,
    "__copy__": _copy,
    "__deepcopy__": _copy,
    "__divmod__": _binary(divmod),
    "__rdivmod__": _reflected(divmod),
    "__format__": lambda tensor, spec: format(host_array(tensor), spec),
    **{f"__{kind.__name__}__": _unary(kind) for kind in (bool, int, float, complex)},
    **{f"__{name}__": _unary(getattr(operator, f"__{name}__")) for name in (*_UNARY, "index")},
    **{f"__{name}__": _binary(getattr(operator, f"__{name}__")) for name in (*_BINARY, *_COMPARISONS)},
    **{f"__r{name}__": _reflected(getattr(operator, f"__{name}__")) for name in _BINARY},
}


def add_array_methods() -> None:
    """Add the methods of this module to ``tvm.runtime.Tensor``; idempotent."""
    for name, method in _METHODS.items():
        setattr(runtime.Tensor, name, method)
