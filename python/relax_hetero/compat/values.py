"""Values with ONNX Runtime's interface: arrays on the host, tensors on devices, and memory given by its address."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import tvm
import tvm_ffi
from onnx import helper

from relax_hetero.compat.devices import DEVICE_TYPES
from relax_hetero.compat.errors import InvalidArgument
from relax_hetero.vm.device.tensors import _DLTensor

_ELEMENTS = "tensor("


def type_text(elem_type: int) -> str:
    """ONNX Runtime's text of an element type of ONNX: ``tensor(float)``."""
    return f"tensor({onnx.TensorProto.DataType.Name(elem_type).lower()})"


def text_of_type(ty: onnx.TypeProto) -> str:
    """ONNX Runtime's text of a type: ``seq(map(int64,tensor(float)))``."""
    kind = ty.WhichOneof("value")
    if kind == "sequence_type":
        return f"seq({text_of_type(ty.sequence_type.elem_type)})"
    if kind == "optional_type":
        return f"optional({text_of_type(ty.optional_type.elem_type)})"
    if kind == "map_type":
        key = onnx.TensorProto.DataType.Name(ty.map_type.key_type).lower()
        return f"map({key},{text_of_type(ty.map_type.value_type)})"
    return type_text(ty.tensor_type.elem_type)


def numpy_dtype_of(text: str) -> np.dtype[Any]:
    """The numpy type of a text such as ``tensor(float)``."""
    name = text.removeprefix(_ELEMENTS).removesuffix(")").upper()
    return np.dtype(helper.tensor_dtype_to_np_dtype(onnx.TensorProto.DataType.Value(name)))


def type_text_of_dtype(dtype: np.dtype[Any]) -> str:
    """ONNX Runtime's text of a numpy type."""
    if dtype.kind in "OUS":
        return "tensor(string)"
    try:
        return type_text(helper.np_dtype_to_tensor_dtype(dtype))
    except (KeyError, ValueError):
        raise InvalidArgument.of(f"numpy's type {dtype} has no type of ONNX, expected numbers, bools or str") from None


def _dtype(element_type: Any) -> np.dtype[Any]:
    """The numpy type of an element type of numpy or ONNX."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(element_type) if isinstance(element_type, int) else element_type)


class _Managed(ctypes.Structure):
    """DLPack's DLManagedTensor."""

    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


_in_use: dict[int, _Memory] = {}


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _release(address: int) -> None:
    """Forget the header of a tensor that is no longer used."""
    _in_use.pop(address, None)


class _Memory:
    """Memory of a device at an address, which the caller keeps, as an object with DLPack's methods."""

    def __init__(self, address: int, device: tuple[int, int], dtype: np.dtype[Any], shape: Sequence[int]) -> None:
        self._device = device
        self._shape = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        code = {"i": 0, "u": 1, "f": 2, "b": 6}[dtype.kind]
        head = _DLTensor(address, *device, len(shape), code, 8 * dtype.itemsize, 1, ctypes.addressof(self._shape), 0, 0)
        self._managed = _Managed(head, None, ctypes.cast(_release, ctypes.c_void_p))

    def __dlpack__(self, **_: Any) -> Any:
        address = ctypes.addressof(self._managed)
        _in_use[address] = self
        return _new_capsule(address, b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def memory_at(
    address: int,  # address of the first element
    device_type: str,  # name of the device's type
    device_id: int,  # number of the device
    element_type: Any,  # element type of numpy or ONNX
    shape: Sequence[int],  # extents
) -> OrtValue:
    """The value in memory that the caller keeps."""
    dtype, shape = _dtype(element_type), [int(size) for size in shape]
    if device_type == "cpu":
        nbytes = int(np.prod(shape)) * dtype.itemsize
        raw: Any = (ctypes.c_uint8 * nbytes).from_address(address) if nbytes else b""
        return OrtValue(np.frombuffer(raw, dtype).reshape(shape))
    memory = _Memory(address, (_device_type(device_type), device_id), dtype, shape)
    return OrtValue(tvm_ffi.from_dlpack(memory))


def _device_type(name: str) -> int:
    if name not in DEVICE_TYPES:
        raise InvalidArgument.of(f"device type is {name!r}, expected one of {', '.join(DEVICE_TYPES)}")
    return DEVICE_TYPES[name]


class OrtValue:
    """A tensor on the host (a numpy array) or on a device (a TVM tensor), or a list.

    Parameters
    ----------
    value : object
        Array, tensor or list.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    @staticmethod
    def ortvalue_from_numpy(
        numpy_obj: np.ndarray, device_type: str = "cpu", device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """The value of an array: the array itself on the host, else a copy on the device."""
        if device_type == "cpu":
            return OrtValue(numpy_obj)
        return OrtValue(tvm.runtime.tensor(numpy_obj, device=tvm.device(device_type, device_id)))

    @staticmethod
    def ortvalue_from_numpy_with_onnx_type(data: np.ndarray, onnx_element_type: int) -> OrtValue:
        """The value of the array's bits read as an element type of ONNX."""
        return OrtValue(data.view(_dtype(onnx_element_type)))

    @staticmethod
    def ortvalue_from_shape_and_type(
        shape: Sequence[int],
        element_type: Any = None,
        device_type: str = "cpu",
        device_id: int = 0,
        vendor_id: int = -1,
    ) -> OrtValue:
        """New memory on a device, for `IOBinding` and `update_inplace`."""
        dtype = _dtype(element_type)
        if device_type == "cpu":
            return OrtValue(np.empty(tuple(shape), dtype))
        return OrtValue(tvm.runtime.empty(tuple(shape), str(dtype), tvm.device(device_type, device_id)))

    @staticmethod
    def from_dlpack(data: Any, is_bool_tensor: bool = False) -> OrtValue:
        """The value that shares an object's memory."""
        on_host = data.__dlpack_device__()[0] == DEVICE_TYPES["cpu"]
        value = np.from_dlpack(data) if on_host else tvm_ffi.from_dlpack(data)
        return OrtValue(value.view(np.bool_) if is_bool_tensor and on_host else value)

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._value.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return tuple(self._value.__dlpack_device__())

    def to_dlpack(self) -> Any:
        """A DLPack capsule that shares the memory."""
        return self._value.__dlpack__()

    def numpy(self) -> Any:
        """The array; a copy if the value is on a device."""
        return self._value.numpy() if isinstance(self._value, tvm_ffi.core.Tensor) else self._value

    def data_ptr(self) -> int:
        """Address of the first element."""
        value = self._value
        return int(value.ctypes.data if isinstance(value, np.ndarray) else value.data_ptr())

    def shape(self) -> list[int]:
        """Extents."""
        return [int(size) for size in self._value.shape]

    def data_type(self) -> str:
        """Type in ONNX Runtime's words: ``tensor(float)``."""
        if not self.is_tensor():
            return f"seq({OrtValue(self._value[0]).data_type()})" if self._value else "seq()"
        return type_text_of_dtype(np.dtype(str(self._value.dtype)))

    def element_type(self) -> int:
        """Element type of ONNX."""
        return int(onnx.TensorProto.DataType.Value(self.data_type()[len(_ELEMENTS) : -1].upper()))

    def device_name(self) -> str:
        """Name of the device's type."""
        return "cpu" if not self.is_tensor() or self._on_host() else "cuda"

    def is_tensor(self) -> bool:
        """True unless the value is a list."""
        return not isinstance(self._value, list)

    def is_tensor_sequence(self) -> bool:
        """True for a list."""
        return isinstance(self._value, list)

    def is_sparse_tensor(self) -> bool:
        """False: sparse tensors are not supported."""
        return False

    def has_value(self) -> bool:
        """True: there are no empty optionals."""
        return True

    def tensor_size_in_bytes(self) -> int:
        """Bytes of the elements."""
        return int(np.prod(self.shape())) * np.dtype(str(self._value.dtype)).itemsize

    def update_inplace(self, np_arr: np.ndarray) -> None:
        """Overwrite the elements by those of an array of the same shape and type."""
        if list(np_arr.shape) != self.shape() or type_text_of_dtype(np_arr.dtype) != self.data_type():
            raise InvalidArgument.of(
                f"update_inplace: found {np_arr.dtype}{list(np_arr.shape)}, expected {self.data_type()}{self.shape()}"
            )
        self._assign(np_arr)

    def _assign(self, value: Any) -> None:
        """Copy an array or tensor of this shape."""
        if isinstance(self._value, np.ndarray):
            np.copyto(self._value, value.numpy() if hasattr(value, "numpy") else value)
        elif isinstance(value, np.ndarray):
            self._value.copyfrom(value)
        else:
            value.copyto(self._value)

    def _on_host(self) -> bool:
        return isinstance(self._value, np.ndarray) or self._value.device.dlpack_device_type() == DEVICE_TYPES["cpu"]

    @property
    def _ortvalue(self) -> OrtValue:
        """The value itself: programs ask ONNX Runtime's wrapper for it, to call `to_dlpack`."""
        return self
