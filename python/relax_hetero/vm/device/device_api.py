"""TVM's device API (`tvm/runtime/device_api.h`) for kinds of devices whose memory is managed in Python.

TVM's runtime allocates and copies through a C++ object for each DLPack device type, which it asks the global function
``device_api.<type>`` for. Here that object is made of ctypes functions that call a `DeviceMemory`. Its table of virtual
functions is a copy of the base class's, with the entries that `_Methods` names replaced.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any, NamedTuple

import tvm_ffi
from tvm.base import _LOADED_LIBS

from ...errors import HeteroError
from ...target.backend import CPU, DeviceMemory, Location

_log = logging.getLogger("relax_hetero")

_EXIST, _NUM_UNITS, _TOTAL_MEMORY = 0, 7, 14  # DeviceAttrKind
_INT = 1  # TVMFFITypeIndex::kTVMFFIInt


class _Any(ctypes.Structure):
    """An integer as ``tvm::ffi::Any``."""

    _fields_ = [("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", c_int64)]


class _Method(NamedTuple):
    """An entry of the table of virtual functions, which is in the order of the class (Itanium C++ ABI)."""

    entry: int
    type: Any


# A DLDevice is passed as one number (device type in the lower half), and a DLDataType as another.
_METHODS = {
    "set_device": _Method(2, ctypes.CFUNCTYPE(None, c_void_p, c_int64)),
    "get_attribute": _Method(3, ctypes.CFUNCTYPE(None, c_void_p, c_int64, c_int, ctypes.POINTER(_Any))),
    "allocate": _Method(6, ctypes.CFUNCTYPE(c_void_p, c_void_p, c_int64, c_size_t, c_size_t, c_uint32)),
    "free": _Method(8, ctypes.CFUNCTYPE(None, c_void_p, c_int64, c_void_p)),
    "synchronize": _Method(12, ctypes.CFUNCTYPE(None, c_void_p, c_int64, c_void_p)),
    "supports_address_arithmetic": _Method(18, ctypes.CFUNCTYPE(ctypes.c_bool, c_void_p)),
    "copy": _Method(
        19,
        ctypes.CFUNCTYPE(
            None, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_size_t, c_int64, c_int64, c_uint32, c_void_p
        ),
    ),
}
_NUM_ENTRIES = 20
_CLASS = "N3tvm7runtime9DeviceAPIE"
# Entries that the base class defines, which show whether this TVM's table has the order of `_METHODS`.
_ANCHORS = {
    10: "12CreateStreamE8DLDevice",
    14: "16GetCurrentStreamE8DLDevice",
    17: "13FreeWorkspaceE8DLDevicePv",
    18: "38SupportsDevicePointerArithmeticsOnHostEv",
}


class _ThreadState(threading.local):
    """Device that host code of the thread has chosen for launches, and the first error that TVM went on after."""

    device = 0
    error: BaseException | None = None


class DeviceApi:
    """The device API of a type (`install`).

    Exceptions cannot pass through TVM's C++ functions: they are kept, and raised by the next launch or copy, or instead
    of TVM's own error (`cause_of`). Memory that could not be allocated has the address 0.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self._thread = _ThreadState()
        self._functions = [method.type(self._guarded(name)) for name, method in _METHODS.items()]
        self._table = (c_void_p * _NUM_ENTRIES)(*_base_table())
        for method, function in zip(_METHODS.values(), self._functions, strict=True):
            self._table[method.entry] = ctypes.cast(function, c_void_p).value
        self._object = (c_void_p * 1)(ctypes.addressof(self._table))

    @property
    def address(self) -> int:
        """The address of the C++ object."""
        return ctypes.addressof(self._object)

    def launching(
        self, launch: Callable[[int, Sequence[Any], Sequence[int]], None], num_params: int
    ) -> Callable[..., None]:
        """The function that host code calls for a launch, on the device that it has chosen in this thread."""

        def call(*args: Any) -> None:
            self.raise_error()
            launch(self._thread.device, args[:num_params], args[num_params:])

        return call

    def submitting(self, launch: Callable[[int, Sequence[Any]], None]) -> Callable[..., None]:
        """The function that host code calls for the launches of a command buffer, like `launching`."""

        def call(*args: Any) -> None:
            self.raise_error()
            launch(self._thread.device, args)

        return call

    def take_error(self) -> BaseException | None:
        """The error of an earlier call of TVM, once."""
        error, self._thread.error = self._thread.error, None
        return error

    def raise_error(self) -> None:
        """Raise the error that `take_error` returns, if any."""
        error = self.take_error()
        if error is not None:
            raise error

    def _guarded(self, name: str) -> Callable[..., Any]:
        method = getattr(self, f"_{name}")

        def call(_this: int, *args: Any) -> Any:
            try:
                return method(*args)
            except BaseException as error:
                self._thread.error = self._thread.error or error
                return 0

        return call

    def _set_device(self, device: int) -> None:
        self._thread.device = device >> 32

    def _get_attribute(self, device: int, kind: int, result: Any) -> None:
        index = device >> 32
        exists = 0 <= index < self.memory.count()
        ask = {_NUM_UNITS: self.memory.num_units, _TOTAL_MEMORY: self.memory.memory_bytes}.get(kind)
        if kind == _EXIST:
            result[0] = _Any(_INT, 0, int(exists))
        elif ask is not None and exists and (number := ask(index)):
            result[0] = _Any(_INT, 0, number)

    def _allocate(self, device: int, nbytes: int, alignment: int, _dtype: int) -> int:
        return self.memory.allocate(device >> 32, nbytes, alignment) if nbytes else 0

    def _free(self, device: int, address: int | None) -> None:
        try:
            if address:
                self.memory.free(device >> 32, address)
        except Exception:  # of a memory that nobody uses any more: no later call fails for it
            _log.exception("device %d: memory at %d cannot be freed", device >> 32, address)

    def _synchronize(self, device: int, _stream: int) -> None:
        self.memory.synchronize(device >> 32)

    def _supports_address_arithmetic(self) -> bool:
        return True

    def _copy(
        self, source: int | None, source_offset: int, target: int | None, target_offset: int, nbytes: int,
        from_device: int, to_device: int, _dtype: int, _stream: int,
    ) -> None:  # fmt: skip
        def located(address: int | None, offset: int, device: int) -> Location:
            return Location(None if (device & 0xFFFFFFFF) == CPU else device >> 32, (address or 0) + offset)

        begin, end = located(source, source_offset, from_device), located(target, target_offset, to_device)
        if nbytes:
            self.memory.copy(begin, end, nbytes)


_lock = threading.Lock()
_installed: dict[int, DeviceApi] = {}


def install(device_type: int, type_name: str, memory: DeviceMemory) -> None:
    """Make TVM allocate and copy memory of a DLPack device type with `memory`; TVM calls the type `type_name`.

    TVM keeps the first object of a type for the whole process, so a later memory takes its place in that object.

    Raises
    ------
    HeteroError
        This TVM's class differs from the one that this module was written for.
    """
    with _lock:
        if device_type in _installed:
            _installed[device_type].memory = memory
            return
        api = _installed[device_type] = DeviceApi(memory)
        tvm_ffi.register_global_func(f"device_api.{type_name}", lambda: c_void_p(api.address), override=True)


def cause_of(error: BaseException) -> BaseException:
    """The error of a device's memory that TVM went on after, and that has led to `error`, or else `error` itself."""
    return next(filter(None, (api.take_error() for api in _installed.values())), error)


def installed(device_type: int) -> DeviceApi:
    """The device API of a type; KeyError before `install`."""
    return _installed[device_type]


def _base_table() -> list[int | None]:
    """The entries of TVM's base class; HeteroError if their order is not the one of `_METHODS`."""
    library = _LOADED_LIBS["tvm_runtime"]
    try:
        table = list((c_void_p * (_NUM_ENTRIES + 2)).in_dll(library, f"_ZTV{_CLASS}"))[2:]  # after offset and type
        fits = all(table[entry] == _address(library, f"_Z{_CLASS[:-1]}{name}") for entry, name in _ANCHORS.items())
    except (ValueError, AttributeError):  # no such symbol
        fits = False
    if not fits:
        raise HeteroError(
            "TVM's runtime library has another class DeviceAPI than that of version 0.27 on Linux and macOS, so memory "
            "of this kind of device cannot be managed"
        )
    return table


def _address(library: ctypes.CDLL, symbol: str) -> int | None:
    return ctypes.cast(getattr(library, symbol), c_void_p).value
