"""Strings of callers as the codes that a function computes with, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...artifact.signature import FunctionSignature
from ...errors import BindingError


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
