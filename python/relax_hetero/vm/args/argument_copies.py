"""Arguments of submitted calls as they are now: a caller may write to its arrays before the call has read them."""

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
    devices: Sequence[runtime.Device],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_late: bool,
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of a call, with copies of the arrays that it would read later in the caller's memory.

    Tensors of TVM are left as they are, so that results can be handed on at no cost; so are arguments that are donated.

    Parameters
    ----------
    devices : sequence of runtime.Device
        Devices by manifest index.
    is_late : bool
        Whether arguments are placed later; else those for other devices than the host are copied there anyway.
    """
    specs = {spec.name: spec for spec in signature.inputs}

    def own(name: str, value: Any) -> Any:
        spec = specs.get(name)
        return value if spec is None or name in signature.donated else _copied(value, spec, devices, is_late)

    names = (*signature.input_names, *("" for _ in args))  # too many are refused later
    by_position = tuple(own(name, value) for name, value in zip(names, args, strict=False))
    return by_position, {name: own(name, value) for name, value in kwargs.items()}


def _copied(value: Any, spec: ValueSpec, devices: Sequence[runtime.Device], is_late: bool) -> Any:
    if isinstance(spec, TupleSpec) and isinstance(value, tuple | list) and len(value) == len(spec.fields):
        return tuple(_copied(part, field, devices, is_late) for part, field in zip(value, spec.fields, strict=True))
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
    except Exception:  # each library raises its own; the check of arguments asks again, and words the error
        return value


# Strings of callers as the codes that a function computes with, and back.


class StringArray(np.ndarray):
    """An array of `str` objects, which `numpy()` gives as such: what a function returns in the place of a tensor."""

    def numpy(self) -> np.ndarray:
        """The strings as an array of objects."""
        return self.view(np.ndarray)


def encoded(
    signature: FunctionSignature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any], list[str]]:
    """Arguments with codes for strings, and all strings of the call by code.

    Raises
    ------
    BindingError
        For elements that are no strings.
    """
    codes = {text: code for code, text in enumerate(signature.strings)}

    def of(name: str, value: Any) -> Any:
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
    given = [of(names[place], value) if place < len(names) else value for place, value in enumerate(args)]
    named = {name: of(name, value) for name, value in kwargs.items()}
    return given, named, list(codes)


def decoded(signature: FunctionSignature, result: Any, texts: Sequence[str]) -> Any:
    """Results with strings for codes."""
    table = np.array([*texts, ""], dtype=object)[:-1]  # an array of objects, also of one string

    def of(name: str, value: Any) -> Any:
        return (
            table[value.numpy()].reshape(value.shape).view(StringArray) if name in signature.string_outputs else value
        )

    if not signature.output_is_tuple:
        return of(signature.output_names[0], result)
    return tuple(of(name, value) for name, value in zip(signature.output_names, result, strict=True))
