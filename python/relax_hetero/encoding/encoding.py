"""What a tensor is for: the operand of a matrix product, before any device has said how it wants it laid out.

An encoding is written as text, in attributes of ops and in messages::

    batch_matmul[1]<uint8 * int8 -> int32; (b0, m, k) * (b0, k, n) -> (b0, m, n); b0=12, m=128, n=?, k=64>

that is: operand 1 (the right one) of a batched product; element types; which iteration dimension each dimension of
each operand runs along; the iteration sizes, "?" where they are symbolic. (Source: the data-tiling design document's
encoding attribute: operand index, op type, element types, user indexing maps, iteration sizes.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

from ..errors import EncodingError

DYNAMIC = -1
"""Size of an iteration dimension that is symbolic."""

LHS, RHS, RESULT = 0, 1, 2
"""Operand indices of a matrix product."""

OPERAND_NAMES = ("lhs", "rhs", "result")
OP_TYPES = ("matmul", "batch_matmul")

_ELEMENT_TYPE = re.compile(r"u?int(8|16|32|64)|float(16|32|64)|bfloat16|bool|float8_e[0-9]m[0-9][a-z0-9]*")

_TEXT = re.compile(r"(\w+)\[([0-9])\]<([^;]+); ([^;]+); ([^;]+)>")
_SIDES = re.compile(r"(.+) \* (.+) -> (.+)")

IndexMap = tuple[str, ...]
"""One name per dimension of an operand: "b0", "b1", ... (batch), "m", "n", "k", or "1" for a size of one that is
broadcast."""


@dataclass(frozen=True)
class Encoding:
    """What a tensor is for; says nothing about storage.

    Attributes
    ----------
    op_type : str
        "matmul", or "batch_matmul" where there are batch dimensions.
    operand_index : int
        0 for the left operand, 1 for the right one, 2 for the result.
    element_types : tuple of str
        TVM dtypes of left operand, right operand and accumulator.
    index_maps : tuple of IndexMap
        Of left operand, right operand and result: a transposed right operand has ("n", "k").
    iteration_sizes : tuple of (str, int)
        Of every iteration dimension, batch dimensions first, then m, n, k; `DYNAMIC` where symbolic.
    """

    op_type: str
    operand_index: int
    element_types: tuple[str, str, str]
    index_maps: tuple[IndexMap, IndexMap, IndexMap]
    iteration_sizes: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        types = "{} * {} -> {}".format(*self.element_types)
        maps = "{} * {} -> {}".format(*(f"({', '.join(names)})" for names in self.index_maps))
        sizes = ", ".join(f"{name}={'?' if size == DYNAMIC else size}" for name, size in self.iteration_sizes)
        return f"{self.op_type}[{self.operand_index}]<{types}; {maps}; {sizes}>"

    @staticmethod
    def parse(text: str) -> Encoding:
        """The encoding that `str` wrote.

        Raises
        ------
        EncodingError
            If the text is not an encoding, or one that contradicts itself.
        """
        return _parse(text)

    def of(self, operand_index: int) -> Encoding:
        """The encoding of another operand of the same op."""
        return replace(self, operand_index=operand_index)

    @property
    def index_map(self) -> IndexMap:
        """The index map of the operand itself."""
        return self.index_maps[self.operand_index]

    @property
    def element_type(self) -> str:
        """The element type of the operand itself."""
        return self.element_types[self.operand_index]

    @property
    def sizes(self) -> dict[str, int]:
        """Iteration sizes by name."""
        return dict(self.iteration_sizes)

    @property
    def batch_dims(self) -> tuple[str, ...]:
        """Names of the batch dimensions, outermost first."""
        return tuple(name for name, _ in self.iteration_sizes if name.startswith("b"))

    def shape(self) -> tuple[int, ...]:
        """Shape of the operand itself as the iteration sizes have it, `DYNAMIC` where symbolic."""
        return tuple(1 if name == "1" else self.sizes[name] for name in self.index_map)


def is_element_type(text: str) -> bool:
    """Whether text is a TVM dtype that tensors have elements of: one lane, whole bytes."""
    return _ELEMENT_TYPE.fullmatch(text) is not None


@cache
def _parse(text: str) -> Encoding:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise EncodingError(f"{text!r} is not an encoding; expected op[operand]<types; index maps; sizes>")
    op_type, operand, types, maps, sizes = match.groups()
    type_sides, map_sides = _SIDES.fullmatch(types), _SIDES.fullmatch(maps)
    if type_sides is None or map_sides is None:
        raise EncodingError(f"encoding {text!r}: types and index maps have the form 'lhs * rhs -> result'")
    pairs = []
    for item in sizes.split(", "):
        name, _, size = item.partition("=")
        if not re.fullmatch(r"[0-9]+|\?", size):
            raise EncodingError(f"encoding {text!r}: found size {item!r}, expected a name and a number or '?'")
        pairs.append((name, DYNAMIC if size == "?" else int(size)))
    index_maps = tuple(tuple(side.strip("()").split(", ")) for side in map_sides.groups())
    encoding = Encoding(op_type, int(operand), type_sides.groups(), index_maps, tuple(pairs))  # type: ignore[arg-type]
    _check(encoding, text)
    return encoding


def _check(encoding: Encoding, text: str) -> None:
    strange = [ty for ty in encoding.element_types if not is_element_type(ty)]
    if strange:
        raise EncodingError(f"encoding {text!r}: found element types {strange}, expected TVM's, of whole bytes")
    if encoding.op_type not in OP_TYPES:
        raise EncodingError(f"encoding {text!r}: found op type {encoding.op_type!r}, expected one of {OP_TYPES}")
    if encoding.operand_index not in (LHS, RHS, RESULT):
        raise EncodingError(f"encoding {text!r}: found operand {encoding.operand_index}, expected 0, 1 or 2")
    if (encoding.op_type == "matmul") != (not encoding.batch_dims):
        raise EncodingError(f"encoding {text!r}: a matmul has no batch dimensions, a batch_matmul has some")
    for operand, wanted in zip(OPERAND_NAMES, ("mk", "kn", "mn"), strict=True):
        names = [n for n in encoding.index_maps[OPERAND_NAMES.index(operand)] if n != "1" and not n.startswith("b")]
        if sorted(names) != sorted(wanted):
            raise EncodingError(f"encoding {text!r}: {operand} runs along {names}, expected {list(wanted)}")
    for index_map in encoding.index_maps:
        if len({n for n in index_map if n != "1"}) != len([n for n in index_map if n != "1"]):
            raise EncodingError(f"encoding {text!r}: an operand runs along a dimension twice: {index_map}")
        unknown = [n for n in index_map if n != "1" and n not in encoding.sizes]
        if unknown:
            raise EncodingError(f"encoding {text!r}: no size for {unknown}")
    _check_dimensions(encoding, text)


def _check_dimensions(encoding: Encoding, text: str) -> None:
    names, batch = [name for name, _ in encoding.iteration_sizes], encoding.batch_dims
    if sorted(names) != sorted({*batch, "m", "n", "k"}) or not all(re.fullmatch("b[0-9]+", name) for name in batch):
        raise EncodingError(f"encoding {text!r}: found sizes of {names}, expected one each of b0, b1, ..., m, n and k")
    lhs, rhs, result = encoding.index_maps
    for name in batch:
        if name not in result or name not in (*lhs, *rhs):
            raise EncodingError(f"encoding {text!r}: {name} has to be a dimension of the result and of an operand")
