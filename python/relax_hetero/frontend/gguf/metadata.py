"""The metadata of a GGUF file, long lists included.

The reader of the package ``gguf`` makes an object for each string of a list. A tokenizer has hundreds of thousands of
them, which takes seconds and some 60 bytes each; here a list is one object, and a text is read where it lies.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

_LONG = 256
"""A list of more numbers stays an array, one of more texts stays in the file."""


class Texts(Sequence[str]):
    """A list of texts as a file has it: each is its number of bytes in 8 bytes, then the bytes.

    Parameters
    ----------
    view: Bytes of the file.
    begins: Where each text's own bytes begin, and where that of one more would.
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


def open_reader(path: str | os.PathLike[str]) -> tuple[Any, dict[str, Any]]:
    """A file's `gguf.GGUFReader`, whose fields of lists are not to be asked, and all metadata by key.

    Texts are ``str``, lists of texts ``list``, long ones `Texts`, long lists of numbers arrays.

    Raises
    ------
    ImportError
        If the package gguf is not installed.
    OSError, ValueError, KeyError, IndexError, OverflowError
        As the package raises them for a file that it cannot read.
    """
    from gguf import GGUFReader, GGUFValueType

    class QuickReader(GGUFReader):  # type: ignore[misc]
        """Reads a list at once."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
            count = int(self._get(orig_offs + 4, np.uint64)[0])
            begin = orig_offs + 12
            if kind == GGUFValueType.STRING:
                values, end = _texts(self.data, begin, count, self.byte_order != "S")
                return end - orig_offs, [values], [0], [GGUFValueType.ARRAY, kind]
            if kind not in self.gguf_scalar_to_np:
                return super()._get_field_parts(orig_offs, raw_type)
            numbers = self._get(begin, self.gguf_scalar_to_np[kind], count)
            if len(numbers) != count:
                raise ValueError(f"found {len(numbers)} numbers of a list, expected {count}")
            return numbers.nbytes + 12, [numbers], [0], [GGUFValueType.ARRAY, kind]

    reader = QuickReader(path)
    return reader, {name: _value(field) for name, field in reader.fields.items()}


def _value(field: Any) -> Any:
    values: Any = field.parts[field.data[0]] if field.data else []
    if len(field.types) < 2:
        return field.contents()
    if isinstance(values, Texts):
        return values if len(values) > _LONG else list(values)
    return values if len(values) > _LONG else values.tolist()


def _texts(data: np.ndarray, begin: int, count: int, little: bool) -> tuple[Texts, int]:
    """A list of texts, and where it ends."""
    begins = array("q", [begin + 8])
    view, order = data.data, "little" if little else "big"
    for _ in range(count):
        first = begin + 8
        end = first + int.from_bytes(view[begin:first], order)  # type: ignore[arg-type]
        if end > len(view):
            raise ValueError(f"found a text that ends at byte {end:,}, expected the file's {len(view):,} at most")
        str(view[first:end], "utf-8")  # raises for other bytes
        begin = end
        begins.append(begin + 8)
    return Texts(view, begins), begin
