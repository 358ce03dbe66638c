"""The metadata of a GGUF file, read as llama.cpp reads it (`gguf_init_from_file` in `ggml/src/gguf.cpp`).

Bytes that contradict each other or the file's size are an error before memory is taken for what they announce.

The reader of the package ``gguf`` checks little, and makes an object for each string of a list. A tokenizer has
hundreds of thousands of them, which takes seconds and some 60 bytes each; here a list is one object, and a text is read
where it lies.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

from ...errors import FrontendError

MAX_ENTRIES = 1 << 16
"""Keys, or tensors; files with more are damaged."""
_LONG = 256
"""A list of more numbers stays an array, one of more texts stays in the file."""
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of numbers, as `struct` and numpy name them."""
_BOOL, _TEXT, _LIST, _UINT32 = 7, 8, 9, 4
_LENGTH = struct.Struct("<Q")


class Texts(Sequence[str]):
    """A list of texts as a file has it: each is its number of bytes in 8 bytes, then the bytes.

    Parameters
    ----------
    view : memoryview
        Bytes of the file.
    begins : array of int
        Where each text's own bytes begin, and where that of one more would.
    """

    def __init__(self, view: memoryview, begins: array[int]) -> None:
        self._view, self._begins = view, begins

    def __len__(self) -> int:
        return len(self._begins) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        return str(self._view[self._begins[index] : self._begins[index + 1] - 8], "utf-8")

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))


class Reader:
    """Reads a file's bytes one after the other, never beyond its end.

    Parameters
    ----------
    view : memoryview
        Bytes of the file.
    path : str or PathLike of str
        Named in errors.

    Attributes
    ----------
    at : int
        The byte that is read next.
    """

    def __init__(self, view: memoryview, path: str | os.PathLike[str]) -> None:
        self.view, self.at, self._path = view, 0, path

    def error(self, text: str) -> FrontendError:
        """An error that names the file."""
        return FrontendError(f"{os.fspath(self._path)}: is no GGUF file that can be read: {text}")

    def skip(self, count: int, what: str) -> int:
        """Where the next `count` bytes begin, which need not be looked at."""
        begin, self.at = self.at, self.at + count
        if self.at > len(self.view):
            raise self.error(f"{what} ends at byte {self.at:,}, expected the file's {len(self.view):,} at most")
        return begin

    def number(self, form: str, what: str) -> Any:
        """A number of a type of `struct`."""
        found = struct.unpack_from(f"<{form}", self.view, self.skip(struct.calcsize(form), what))[0]
        if form == "?" and self.view[self.at - 1] > 1:
            raise self.error(f"{what} is {self.view[self.at - 1]}, expected 0 or 1 as it is a truth")
        return found

    def count(self, what: str, size: int) -> int:
        """The number of entries that follow, which take at least `size` bytes each."""
        found: int = self.number("Q", what)
        left = len(self.view) - self.at
        if found * size > left:
            raise self.error(f"{what} is {found:,}, expected at most {left // size:,}: the file has no bytes for more")
        return found

    def text(self, what: str) -> str:
        """A text, which is UTF-8."""
        length = self.number("Q", what)
        return self._decoded(self.skip(length, what), what)

    def texts(self, count: int, what: str) -> Texts:
        """Texts one after the other."""
        begins = array("q", [self.at + 8])
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(self.view, self.skip(8, what))
            self._decoded(self.skip(length, what), what)
            begins.append(self.at + 8)
        return Texts(self.view, begins)

    def _decoded(self, begin: int, what: str) -> str:
        try:
            return str(self.view[begin : self.at], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is no UTF-8 at byte {begin + error.start:,}: {error.reason}") from error


def read_metadata(reader: Reader, count: int) -> dict[str, Any]:
    """All metadata by key.

    Numbers are ``int``, ``float`` and ``bool``, texts ``str``, lists ``list``; long ones are `Texts` and arrays.

    Raises
    ------
    FrontendError
        If a key comes twice, a value's type is not known, or a value is not as its type says.
    """
    fields: dict[str, Any] = {}
    for _ in range(count):
        key = reader.text("the name of a key")
        if not key or key in fields:
            raise reader.error(f"found the key {key!r} {'twice' if key else 'as a name'}, expected names that differ")
        kind = reader.number("I", key)
        if key == "general.alignment" and kind != _UINT32:
            raise reader.error(f"{key} is of type {kind}, expected {_UINT32} (a whole number of 32 bits)")
        fields[key] = _value(reader, kind, key)
    return fields


def _value(reader: Reader, kind: int, key: str) -> Any:
    if kind in _NUMBERS:
        return reader.number(_NUMBERS[kind], key)
    if kind == _TEXT:
        return reader.text(key)
    if kind != _LIST:
        raise reader.error(f"{key} is of type {kind}, expected 0 to 12")
    kind = reader.number("I", key)
    if kind == _TEXT:
        texts = reader.texts(reader.count(f"the length of {key}", 8), key)
        return texts if len(texts) > _LONG else list(texts)
    if kind not in _NUMBERS:
        raise reader.error(f"{key} is a list of type {kind}, expected numbers or texts")
    form = np.dtype(_NUMBERS[kind]).newbyteorder("<")
    count = reader.count(f"the length of {key}", form.itemsize)
    begin = reader.skip(count * form.itemsize, key)
    if kind == _BOOL and max(reader.view[begin : reader.at], default=0) > 1:
        raise reader.error(f"{key} has numbers above 1, expected 0 and 1 as it is a list of truths")
    numbers = np.frombuffer(reader.view, form, count, begin)
    return numbers if count > _LONG else numbers.tolist()
