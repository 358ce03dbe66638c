"""Checks of dataclasses from a file against their annotations.

Files may be damaged or forged. Their data is checked here once, so that later code can rely on types.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Union, get_args, get_origin

_MAX_INT64 = 2**63 - 1

# Function that returns an error text for a value, or None.
_Check = Callable[[Any], "str | None"]


def read_json(text: str | bytes) -> Any:
    """Parse JSON data; ValueError for invalid or too deeply nested text."""
    try:
        return json.loads(text)
    except (RecursionError, MemoryError) as error:
        raise ValueError("its JSON is nested too deep") from error


def check_types(value: Any) -> None:
    """Check a dataclass and nested ones; the ValueError names the first field of a wrong type."""
    kind: Any = type(value)
    wrong = _check_of(kind)(value)
    if wrong is not None:
        raise ValueError(wrong)


@functools.cache
def _check_of(annotation: Any) -> _Check:
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _fields_check(annotation)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _union_check(args)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _sequence_check(tuple, args[0])
    if origin is list:
        return _sequence_check(list, args[0])
    if origin in (dict, Mapping):
        return _mapping_check(args[0], args[1])
    if annotation is int:
        return lambda x: None if type(x) is int and abs(x) <= _MAX_INT64 else f"{_shown(x)}, expected a 64-bit integer"
    if annotation is float:
        return lambda x: None if type(x) in (int, float) else f"{_shown(x)}, expected a number"
    if annotation in (str, bool):
        return lambda x: None if type(x) is annotation else f"{_shown(x)}, expected {annotation.__name__}"
    if annotation in (None, types.NoneType):
        return lambda x: None if x is None else f"{_shown(x)}, expected null"
    return lambda x: None  # any data, or a recursive type, which its reader checks


def _fields_check(cls: type) -> _Check:
    checks: list[tuple[str, _Check]] = []  # made at first use, because types may be recursive

    def check(value: Any) -> str | None:
        if type(value) is not cls:
            return f"{_shown(value)}, expected {cls.__name__}"
        if not checks:
            hints = typing.get_type_hints(cls)
            checks.extend((field.name, _check_of(hints[field.name])) for field in dataclasses.fields(cls))
        for name, check_field in checks:
            wrong = check_field(getattr(value, name))
            if wrong is not None:
                return f"{cls.__name__}.{name}: {wrong}" if "expected" in wrong else wrong
        return None

    return check


def _union_check(options: tuple[Any, ...]) -> _Check:
    checks = [_check_of(option) for option in options]

    def check(value: Any) -> str | None:
        if any(each(value) is None for each in checks):
            return None
        messages = [each(value) for each in checks]
        # The message of the dataclass that matches the value is the most specific one.
        names = " or ".join(getattr(option, "__name__", str(option)) for option in options)
        inner = next((w for w, o in zip(messages, options, strict=True) if type(value) is o and w), None)
        return inner or f"{_shown(value)}, expected {names}"

    return check


def _sequence_check(kind: type[list[Any]] | type[tuple[Any, ...]], item: Any) -> _Check:
    check_item = _check_of(item)

    def check(value: Any) -> str | None:
        if not isinstance(value, kind):
            return f"{_shown(value)}, expected a list"
        return next((wrong for wrong in (check_item(each) for each in value) if wrong is not None), None)

    return check


def _mapping_check(key: Any, item: Any) -> _Check:
    check_key, check_item = _check_of(key), _check_of(item)

    def check(value: Any) -> str | None:
        if not isinstance(value, dict):
            return f"{_shown(value)}, expected an object"
        messages = (wrong for k, v in value.items() for wrong in (check_key(k), check_item(v)))
        return next((wrong for wrong in messages if wrong is not None), None)

    return check


def _shown(value: Any) -> str:
    text = (
        f"an integer of {value.bit_length():,} bits" if type(value) is int and abs(value) > _MAX_INT64 else repr(value)
    )
    return f"found {text[:100]}"
