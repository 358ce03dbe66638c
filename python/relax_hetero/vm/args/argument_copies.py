"""Copies of a call's arguments: of arrays that the caller may overwrite, and of strings as integer codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from tvm import runtime

from ...artifact.signature import FunctionSignature, ShapeSpec, TensorSpec, TupleSpec, ValueSpec
from ...errors import BindingError
from ..device.tensor_arrays import host_array
from ..device.tensors import is_host
from .arguments import from_dlpack


def copy_arguments(
    signature: FunctionSignature,
    devices: Sequence[runtime.Device],  # devices by manifest index
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    # Whether arguments are placed later; if not, those for other devices are copied there at once anyway.
    is_late: bool,
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Copy those arguments of a submitted call that it would read later from the caller's memory.

    TVM tensors stay as they are, so that results can be passed on at no cost; so do donated arguments.
    """
    specs = {spec.name: spec for spec in signature.inputs}

    def copy(name: str, value: Any) -> Any:
        spec = specs.get(name)
        return value if spec is None or name in signature.donated else _copy(value, spec, devices, is_late)

    names = (*signature.input_names, *("" for _ in args))  # surplus arguments are refused later
    by_position = tuple(copy(name, value) for name, value in zip(names, args, strict=False))
    return by_position, {name: copy(name, value) for name, value in kwargs.items()}


def _copy(value: Any, spec: ValueSpec, devices: Sequence[runtime.Device], is_late: bool) -> Any:
    if isinstance(spec, TupleSpec) and isinstance(value, tuple | list) and len(value) == len(spec.fields):
        return tuple(_copy(part, field, devices, is_late) for part, field in zip(value, spec.fields, strict=True))
    if isinstance(value, np.ndarray):
        is_read_later = is_late or not isinstance(spec, TensorSpec) or is_host(devices[spec.device])
        return value.copy() if is_read_later else value
    if isinstance(spec, ShapeSpec) and isinstance(value, list):
        return tuple(value)
    if isinstance(value, tvm_ffi.core.Tensor) or not (hasattr(value, "__dlpack__") or hasattr(value, "__array__")):
        return value
    try:
        if not hasattr(value, "__dlpack__"):
            return np.array(value)
        tensor = from_dlpack(value)
        return host_array(tensor).copy() if is_host(tensor.device) else tensor
    except Exception:  # libraries raise different exceptions; the later check of arguments reports the error
        return value


# String arguments and results, which compiled functions handle as integer codes.


class StringArray(np.ndarray):
    """An array of `str` objects that a function returns in place of a tensor; `numpy()` gives the plain array."""

    def numpy(self) -> np.ndarray:
        """The strings as an array of objects."""
        return self.view(np.ndarray)


def encode_strings(
    signature: FunctionSignature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any], list[str]]:
    """Replace strings by codes; returns positional arguments, named ones, and all strings by code.

    Raises BindingError for elements that are not strings.
    """
    codes = {text: code for code, text in enumerate(signature.strings)}

    def encode(name: str, value: Any) -> Any:
        if name not in signature.string_inputs:
            return value
        array = np.asarray(value, dtype=object)
        texts = [text.decode() if isinstance(text, bytes) else text for text in array.reshape(-1).tolist()]
        wrong = next((text for text in texts if not isinstance(text, str)), None)
        if wrong is not None:
            raise BindingError(
                f"function {signature.name!r}: input {name!r} takes strings, found {wrong!r} of {type(wrong).__name__}"
            )
        return np.array([codes.setdefault(text, len(codes)) for text in texts], "int64").reshape(array.shape)

    names = signature.input_names
    positional = [encode(names[i], value) if i < len(names) else value for i, value in enumerate(args)]
    named = {name: encode(name, value) for name, value in kwargs.items()}
    return positional, named, list(codes)


def decode_strings(signature: FunctionSignature, result: Any, texts: Sequence[str]) -> Any:
    """Replace codes by strings in results."""
    table = np.array([*texts, ""], dtype=object)[:-1]  # stays an array of objects even for one string

    def decode(name: str, value: Any) -> Any:
        return (
            table[value.numpy()].reshape(value.shape).view(StringArray) if name in signature.string_outputs else value
        )

    if not signature.output_is_tuple:
        return decode(signature.output_names[0], result)
    return tuple(decode(name, value) for name, value in zip(signature.output_names, result, strict=True))
