"""Donated arguments: a call may overwrite their memory, so nothing else may use it until the call ends."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tvm_ffi

from ...artifact.signature import FunctionSignature
from ...errors import BindingError
from ..device.tensors import AddressRange, address_ranges, copy_to, map_tensors


def check_donated(signature: FunctionSignature, values: Sequence[Any]) -> None:
    """Require that no donated argument of a call shares memory with another; BindingError otherwise.

    `values`: arguments as the function takes them, in the order of its inputs.
    """
    ranges = [(spec.name, address_ranges(value)) for spec, value in zip(signature.inputs, values, strict=True)]
    for name, own_ranges in ranges:
        if name not in signature.donated:
            continue
        (donated_range,) = own_ranges
        for other, other_ranges in ranges:
            if other != name and any(_overlap(donated_range, other_range) for other_range in other_ranges):
                raise BindingError(
                    f"argument {name!r} of {signature.name!r} is donated, and argument {other!r} shares memory with "
                    "it, expected memory that nothing else of the call reads"
                )


class BorrowedRange(NamedTuple):
    """The memory of an argument of a call in flight."""

    name: str  # name of the input
    range: AddressRange  # its addresses
    # Weak reference to the object that owns the caller's memory, or a TVM tensor itself, which does not support weak
    # references. None if the memory is the machine's, or its owner cannot be tracked.
    owner: Any = None

    def is_retained(self) -> bool:
        """Return whether the caller still owns the memory, so that it cannot have been reused."""
        return (self.owner() if isinstance(self.owner, weakref.ref) else self.owner) is not None


@dataclass(frozen=True)
class ArgumentMemory:
    """The memory of the arguments of a call in flight."""

    function: str
    # Memory that the call only reads, and memory that it may overwrite.
    read: tuple[BorrowedRange, ...]
    consumed: tuple[BorrowedRange, ...]


def argument_memory(
    signature: FunctionSignature, values: Sequence[Any], given: Mapping[str, Any] | None = None
) -> ArgumentMemory:
    """The memory of a function's `values`, in the order of its inputs; `given` has the caller's arguments by name."""
    read: list[BorrowedRange] = []
    consumed: list[BorrowedRange] = []
    for spec, value in zip(signature.inputs, values, strict=True):
        ranges = consumed if spec.name in signature.donated else read
        source = None if given is None else given.get(spec.name)
        ranges += [BorrowedRange(spec.name, address, _owner(source, address[0])) for address in address_ranges(value)]
    return ArgumentMemory(signature.name, tuple(read), tuple(consumed))


def _owner(given: Any, address: int) -> Any:
    """`BorrowedRange.owner` of an argument whose placed value begins at `address`."""
    if isinstance(given, np.ndarray):
        begin, kind, base = given.__array_interface__["data"][0], np.ndarray, "base"
    else:
        begin, kind, base = given.data_ptr() if hasattr(given, "data_ptr") else None, type(given), "_base"  # PyTorch
    if begin != address:  # it was copied
        return None
    while isinstance(getattr(given, base, None), kind):  # the base of a view
        given = getattr(given, base)
    try:
        return weakref.ref(given)
    except TypeError:
        return given if isinstance(given, tvm_ffi.core.Tensor) else None


class MemoryInFlight:
    """Registry of the memory of all calls in flight in this process: none may overwrite memory that another uses.

    A call drops an argument after its last reader, and another array may then get its address. A range counts while
    the call still holds its value or the caller still owns it.
    """

    def __init__(self) -> None:
        self.is_enabled = False  # whether calls are registered: some machine has functions that consume arguments
        self._lock = threading.RLock()  # reentrant: a signal handler or a finalizer may submit
        self._calls: dict[object, tuple[ArgumentMemory, Callable[[], Iterable[Any]]]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, key: object, ranges: ArgumentMemory, values: Callable[[], Iterable[Any]]) -> None:
        """Add a call, unless `check` refuses it; `values` returns the values that it currently holds."""
        with self._lock:
            self.check(ranges)
            self._calls[key] = ranges, values

    def drop(self, key: object) -> None:
        """Forget a call that has ended."""
        self._calls.pop(key, None)

    def check(self, ranges: ArgumentMemory) -> None:
        """BindingError if a call and one in flight use the same memory, and either overwrites it."""
        for other, values in list(self._calls.values()):
            pairs = [(a, b) for a in ranges.consumed for b in (*other.consumed, *other.read)]
            pairs += [(a, b) for a in ranges.read for b in other.consumed]
            for a, b in pairs:
                if _overlap(a.range, b.range) and (b.is_retained() or _any_overlap(values(), a.range)):
                    gives_away = "this call" if a in ranges.consumed else "that one"
                    raise BindingError(
                        f"argument {a.name!r} of {ranges.function!r} shares memory with argument {b.name!r} of a call "
                        f"of {other.function!r} that is under way, and {gives_away} consumes it; expected memory of "
                        "its own, or that call's fence, or its result, in its place"
                    )


memory_in_flight = MemoryInFlight()


def _overlap(one: AddressRange, other: AddressRange) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _any_overlap(values: Iterable[Any], memory: AddressRange) -> bool:
    return any(_overlap(part, memory) for value in values for part in address_ranges(value))


def retained_ranges(signature: FunctionSignature, values: Sequence[Any]) -> list[AddressRange]:
    """The memory of the arguments that a call does not overwrite."""
    pairs = zip(signature.inputs, values, strict=True)
    return address_ranges([value for spec, value in pairs if spec.name not in signature.donated])


def arguments_for_run(signature: FunctionSignature, values: Sequence[Any]) -> list[Any]:
    """The arguments of one of several runs: copies of those that the function's code writes to."""
    return [
        map_tensors(value, lambda tensor: copy_to(tensor, tensor.device)) if spec.name in signature.copied else value
        for spec, value in zip(signature.inputs, values, strict=True)
    ]
