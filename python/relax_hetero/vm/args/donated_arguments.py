"""Donated arguments: a call may overwrite their memory, so nothing else may use it meanwhile."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tvm_ffi
from tvm import runtime

from ...artifact.signature import FunctionSignature
from ...errors import BindingError
from ..device.tensors import AddressRange, address_ranges, copy_to, map_tensors


def check_donated(signature: FunctionSignature, values: Sequence[Any]) -> None:
    """Require memory of its own for every donated argument of a call; BindingError where it has none.

    Parameters
    ----------
    values : sequence of object
        Arguments as the function takes them, in the order of its inputs.
    """
    ranges = [(spec.name, address_ranges(value)) for spec, value in zip(signature.inputs, values, strict=True)]
    for name, mine in ranges:
        if name not in signature.donated:
            continue
        (own,) = mine
        for other, theirs in ranges:
            if other != name and any(_overlap(own, where) for where in theirs):
                raise BindingError(
                    f"argument {name!r} of {signature.name!r} is donated, and argument {other!r} shares memory with "
                    "it, expected memory that nothing else of the call reads"
                )


class BorrowedRange(NamedTuple):
    """The memory of an argument of a call under way.

    Attributes
    ----------
    name : str
        Name of the input.
    range : AddressRange
        Its addresses.
    owner : object
        Object that keeps the caller's memory: a weak reference to it, or a TVM tensor itself, which cannot be referred
        to weakly. None where the memory is the machine's, or nothing tells when the caller drops it.
    """

    name: str
    range: AddressRange
    owner: Any = None

    def is_retained(self) -> bool:
        """Return whether the caller has the memory still, so that nothing else can have been given it."""
        return (self.owner() if isinstance(self.owner, weakref.ref) else self.owner) is not None


@dataclass(frozen=True)
class ArgumentMemory:
    """The memory of a call's arguments while it is under way.

    Attributes
    ----------
    read, consumed : tuple of BorrowedRange
        Memory that it leaves as it is, and memory that it may overwrite.
    """

    function: str
    read: tuple[BorrowedRange, ...]
    consumed: tuple[BorrowedRange, ...]


def argument_memory(
    signature: FunctionSignature, values: Sequence[Any], given: Mapping[str, Any] | None = None
) -> ArgumentMemory:
    """The memory of a function's `values`, in the order of its inputs; its owners are the arguments `given` by name."""
    read: list[BorrowedRange] = []
    consumed: list[BorrowedRange] = []
    for spec, value in zip(signature.inputs, values, strict=True):
        found = consumed if spec.name in signature.donated else read
        source = None if given is None else given.get(spec.name)
        found += [BorrowedRange(spec.name, where, _owner(source, where[0])) for where in address_ranges(value)]
    return ArgumentMemory(signature.name, tuple(read), tuple(consumed))


def _owner(given: Any, address: int) -> Any:
    """`LentMemory.owner` of an argument whose placed value begins at `address`."""
    if isinstance(given, np.ndarray):
        begin, kind, base = given.__array_interface__["data"][0], np.ndarray, "base"
    else:
        begin, kind, base = given.data_ptr() if hasattr(given, "data_ptr") else None, type(given), "_base"  # of PyTorch
    if begin != address:  # it was copied
        return None
    while isinstance(getattr(given, base, None), kind):  # what a view keeps
        given = getattr(given, base)
    try:
        return weakref.ref(given)
    except TypeError:
        return given if isinstance(given, tvm_ffi.core.Tensor) else None


class ExclusiveCalls:
    """The memory of all calls under way in this process, in which no call overwrites what another one takes.

    A call drops an argument after its last reader: an address may be another array's then. What counts is what the
    call still holds, and what the caller still has of what it gave.

    Attributes
    ----------
    is_needed : bool
        Whether there has been a machine whose calls consume arguments.
    """

    def __init__(self) -> None:
        self.is_needed = False
        self._lock = threading.RLock()  # a signal handler, or a finalizer, may submit while this thread holds it
        self._calls: dict[object, tuple[ArgumentMemory, Callable[[], Iterable[Any]]]] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, key: object, ranges: ArgumentMemory, values: Callable[[], Iterable[Any]]) -> None:
        """Add a call, unless `check` refuses it; `values` gives what it holds at a time."""
        with self._lock:
            self.check(ranges)
            self._calls[key] = ranges, values

    def drop(self, key: object) -> None:
        """Forget a call that has ended."""
        self._calls.pop(key, None)

    def check(self, ranges: ArgumentMemory) -> None:
        """BindingError where the call would overwrite what one under way takes, or take what that one overwrites."""
        for other, values in list(self._calls.values()):
            pairs = [(a, b) for a in ranges.consumed for b in (*other.consumed, *other.read)]
            pairs += [(a, b) for a in ranges.read for b in other.consumed]
            for a, b in pairs:
                if _overlap(a.range, b.range) and (b.is_retained() or _holds(values(), a.range)):
                    gives_away = "this call" if a in ranges.consumed else "that one"
                    raise BindingError(
                        f"argument {a.name!r} of {ranges.function!r} shares memory with argument {b.name!r} of a call "
                        f"of {other.function!r} that is under way, and {gives_away} consumes it; expected memory of "
                        "its own, or that call's fence, or its result, in its place"
                    )


exclusive_calls = ExclusiveCalls()


def _overlap(one: AddressRange, other: AddressRange) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _holds(values: Iterable[Any], memory: AddressRange) -> bool:
    return any(_overlap(found, memory) for value in values for found in address_ranges(value))


def retained_ranges(signature: FunctionSignature, values: Sequence[Any]) -> list[AddressRange]:
    """The memory of the arguments that a call does not overwrite."""
    kept = [value for spec, value in zip(signature.inputs, values, strict=True) if spec.name not in signature.donated]
    return address_ranges(kept)


def for_one_run(signature: FunctionSignature, values: Sequence[Any]) -> list[Any]:
    """The arguments of one of several runs: those that the function's code writes to are copied."""
    specs = signature.inputs

    def copied(tensor: runtime.Tensor) -> runtime.Tensor:
        return copy_to(tensor, tensor.device)

    return [
        map_tensors(value, copied) if spec.name in signature.copied else value
        for spec, value in zip(specs, values, strict=True)
    ]
