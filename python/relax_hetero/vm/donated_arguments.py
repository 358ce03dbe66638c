"""Donated arguments: a call may overwrite them, so that nothing else it is given may lie in their memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi

from ..errors import BindingError
from .signature import FunctionSignature
from .tensors import AddressRange, address_ranges, copy_to


def check_donated(signature: FunctionSignature, values: Sequence[Any]) -> None:
    """Require memory of its own for every donated argument of a call; BindingError where it has none.

    Parameters
    ----------
    signature : FunctionSignature
    values : sequence
        What the function takes, in the order of its inputs.
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


def kept_ranges(signature: FunctionSignature, values: Sequence[Any]) -> list[AddressRange]:
    """Where the arguments that a call leaves as they are lie."""
    kept = [value for spec, value in zip(signature.inputs, values, strict=True) if spec.name not in signature.donated]
    return address_ranges(kept)


def for_one_run(signature: FunctionSignature, values: Sequence[Any]) -> list[Any]:
    """What one of several runs on the same arguments takes: copies of those that the function's code writes to."""
    specs = signature.inputs
    return [_copied(v) if spec.name in signature.copied else v for spec, v in zip(specs, values, strict=True)]


def _copied(value: Any) -> Any:
    if isinstance(value, tvm_ffi.core.Tensor):
        return copy_to(value, value.device)
    return tvm_ffi.convert(tuple(map(_copied, value)))
