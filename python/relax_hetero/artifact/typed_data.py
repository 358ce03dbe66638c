"""Dataclasses as JSON data, and checks of those from a file against their annotations.

Dataclasses become objects of the fields that their constructors take. Class attributes choose other forms: ``IS_ROW =
True`` a list of the values, which is shorter; ``KIND = "tensor"`` an object that says its kind, by which `from_data`
knows it among the members of a union. Methods `to_data` and `from_data` of a class replace those of this module.

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

_Check = Callable[[Any], "str | None"]  # function that returns an error text for a value, or None


def read_json(text: str | bytes) -> Any:
    """Parse JSON data; ValueError for invalid or too deeply nested text."""
    try:
        return json.loads(text)
    except (RecursionError, MemoryError) as error:
        raise ValueError("its JSON is nested too deep") from error


def to_data(value: Any) -> Any:
    """A value as JSON data, in which dataclasses, lists, tuples and mappings may be nested."""
    if dataclasses.is_dataclass(value):
        return value.to_data() if hasattr(value, "to_data") else fields_data(value)
    if isinstance(value, (list, tuple)):
        return [to_data(each) for each in value]
    return {key: to_data(each) for key, each in value.items()} if isinstance(value, dict) else value


def fields_data(value: Any) -> Any:
    """The fields of a dataclass as JSON data."""
    names = [field.name for field in dataclasses.fields(value) if field.init]
    if getattr(value, "IS_ROW", False):
        return [to_data(getattr(value, name)) for name in names]
    kind = {"kind": value.KIND} if hasattr(value, "KIND") else {}
    return {**kind, **{name: to_data(getattr(value, name)) for name in names}}


def from_data(annotation: Any, data: Any) -> Any:
    """A value of a type, the inverse of `to_data`; various exceptions for anything else.

    Types of numbers and texts are not checked (`check_types`).
    """
    return _reader_of(annotation)(data)


@functools.cache
def _reader_of(annotation: Any) -> Callable[[Any], Any]:
    origin, args = get_origin(annotation), get_args(annotation)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return getattr(annotation, "from_data", None) or functools.partial(fields_from_data, annotation)
    if origin in (Union, types.UnionType):
        return _union_reader([option for option in args if option is not types.NoneType])
    if origin in (tuple, list) and args[1:] in ((), (Ellipsis,)):
        read = _reader_of(args[0])
        return lambda data: origin(map(read, data))
    if origin in (dict, Mapping):
        read = _reader_of(args[1])
        return lambda data: {key: read(value) for key, value in data.items()}
    return lambda data: data


def _union_reader(options: list[Any]) -> Callable[[Any], Any]:
    if len(options) == 1:
        read = _reader_of(options[0])
        return lambda data: None if data is None else read(data)
    kinds = {option.KIND: option for option in options if hasattr(option, "KIND")}
    if kinds:
        return lambda data: from_data(kinds[data["kind"]], {key: data[key] for key in data if key != "kind"})
    with_readers = [option for option in options if hasattr(option, "from_data")]
    return with_readers[0].from_data if with_readers else lambda data: data


def fields_from_data(cls: Any, data: Any) -> Any:
    """A dataclass, the inverse of `fields_data`; KeyError for a missing field, TypeError for an unknown one."""
    readers = _field_readers(cls)
    if getattr(cls, "IS_ROW", False):
        if not isinstance(data, list) or len(data) != len(readers):
            raise TypeError(f"{cls.__name__}: {_shown(data)}, expected a list of {', '.join(readers)}")
        return cls(*(read(value) for read, value in zip(readers.values(), data, strict=True)))
    if not isinstance(data, dict):
        raise TypeError(f"{cls.__name__}: {_shown(data)}, expected an object")
    if missing := _required_fields(cls) - data.keys():
        raise KeyError(min(missing))
    if unknown := data.keys() - readers.keys():
        raise TypeError(f"{cls.__name__}: found {min(unknown)!r}, expected only {', '.join(readers)}")
    return cls(**{name: readers[name](value) for name, value in data.items()})


@functools.cache
def _field_readers(cls: Any) -> dict[str, Callable[[Any], Any]]:
    hints = typing.get_type_hints(cls)
    return {field.name: _reader_of(hints[field.name]) for field in dataclasses.fields(cls) if field.init}


@functools.cache
def _required_fields(cls: Any) -> frozenset[str]:
    fields = (field for field in dataclasses.fields(cls) if field.init)
    return frozenset(field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING)


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
