"""Donated arguments: a call may overwrite their memory, so nothing else may use it meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import runtime

from ...artifact.signature import FunctionSignature
from ...errors import BindingError
from ..device.tensors import AddressRange, address_ranges, copy_to, map_tensors


def check_donated(signature: FunctionSignature, values: Sequence[Any]) -> None:
    """Require memory of its own for every donated argument of a call; BindingError where it has none.

    Parameters
    ----------
    values: What the function takes, in the order of its inputs.
    """
    ranges = [(spec.name, address_ranges(value)) for spec, value in zip(signature.inputs, values, strict=True)]
    for name, mine in ranges:
        if name not in signature.donated:
            continue
        (own,) = mine
        for other, theirs in ranges:
            if other != name and any(begin < own[1] and own[0] < end for begin, end in theirs):
                raise BindingError(
                    f"argument {name!r} of {signature.name!r} is donated, and argument {other!r} shares memory with "
                    "it, expected memory that nothing else of the call reads"
                )


@dataclass(frozen=True)
class ArgumentMemory:
    """The memory of a call's arguments while it is under way.

    Attributes
    ----------
    read, consumed: By the names of inputs: what it leaves as it is, and what it may overwrite.
    """

    function: str
    read: tuple[tuple[str, AddressRange], ...]
    consumed: tuple[tuple[str, AddressRange], ...]


def argument_memory(signature: FunctionSignature, values: Sequence[Any]) -> ArgumentMemory:
    """The memory of a function's `values`, in the order of its inputs."""
    read: list[tuple[str, AddressRange]] = []
    consumed: list[tuple[str, AddressRange]] = []
    for spec, value in zip(signature.inputs, values, strict=True):
        found = consumed if spec.name in signature.donated else read
        found += [(spec.name, where) for where in address_ranges(value)]
    return ArgumentMemory(signature.name, tuple(read), tuple(consumed))


def check_apart(mine: ArgumentMemory, others: Iterable[ArgumentMemory]) -> None:
    """Require that no call under way overwrites what another one takes; BindingError where one does."""
    for other in others:
        pairs = [(a, b) for a in mine.consumed for b in (*other.consumed, *other.read)]
        pairs += [(a, b) for a in mine.read for b in other.consumed]
        for (name, (begin, end)), (other_name, (other_begin, other_end)) in pairs:
            if begin < other_end and other_begin < end:
                gives_away = "this call" if (name, (begin, end)) in mine.consumed else "that one"
                raise BindingError(
                    f"argument {name!r} of {mine.function!r} shares memory with argument {other_name!r} of a call of "
                    f"{other.function!r} that is under way, and {gives_away} consumes it; expected memory of its own, "
                    "or that call's fence, or its result, in its place"
                )


def kept_ranges(signature: FunctionSignature, values: Sequence[Any]) -> list[AddressRange]:
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
