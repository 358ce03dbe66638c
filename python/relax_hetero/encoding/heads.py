"""Positions of the heads of an attention in its tensors.

They are written as text in attributes and messages::

    (b, m, h*d) * (b, n, h*d+384) * (b, n, h*e+768) -> (b, m, h*e); b=1, h=12, g=12, m=128, n=128, d=32, e=32

that is: query, key and value, then the result; for each dimension of a tensor the iteration dimensions that it runs
along, outermost first, and their offset; the iteration sizes, "?" where symbolic. "b" is the batch, "h" heads, "g"
heads of key and value, "m" queries, "n" keys, "d" the width of query and key, "e" that of value and result. "1" is a
dimension of which only index 0 is used, "1+2" one of which only index 2 is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from ..errors import EncodingError
from .encoding import DYNAMIC

NAMES = ("b", "h", "g", "m", "n", "d", "e")  # iteration dimensions, in the order of sizes
STATIC = ("h", "g", "d", "e")  # iteration dimensions whose size is always a number

_OPERANDS = {"query": "bhmd", "key": "bgnd", "value": "bgne", "result": "bhme"}
_TEXT = re.compile(r"\((.*)\) \* \((.*)\) \* \((.*)\) -> \((.*)\); (.+)")
_DIM = re.compile(r"(1|[a-z](?:\*[a-z])*)(?:\+([0-9]+))?")


@dataclass(frozen=True)
class HeadsMap:
    """Positions of the heads in one tensor."""

    # Iteration dimensions that each dimension of the tensor runs along, outermost first; empty: one index.
    dims: tuple[tuple[str, ...], ...]
    starts: tuple[int, ...]  # offset in each dimension

    def __str__(self) -> str:
        parts = ["*".join(names) or "1" for names in self.dims]
        return ", ".join(f"{part}+{start}" if start else part for part, start in zip(parts, self.starts, strict=True))

    @property
    def index_map(self) -> tuple[str, ...]:
        """Index map of a problem's operand: ``("b", "m", "h*d")``."""
        return tuple("*".join(names) or "1" for names in self.dims)

    def shifted(self, offset: int) -> HeadsMap:
        """The map for a tensor with `offset` more elements at the front of its last dimension."""
        return HeadsMap(self.dims, (*self.starts[:-1], self.starts[-1] + offset))


@dataclass(frozen=True)
class Heads:
    """Positions of the heads of an attention in its tensors, and the extents."""

    query: HeadsMap
    key: HeadsMap
    value: HeadsMap
    result: HeadsMap
    sizes: tuple[int, ...]  # extents in the order of `NAMES`; b, m and n may be `DYNAMIC` (symbolic)

    def __str__(self) -> str:
        sizes = ", ".join(
            f"{name}={'?' if size == DYNAMIC else size}" for name, size in zip(NAMES, self.sizes, strict=True)
        )
        return f"({self.query}) * ({self.key}) * ({self.value}) -> ({self.result}); {sizes}"

    @staticmethod
    def parse(text: str) -> Heads:
        """Parse the text that `str` wrote; EncodingError for other text, and for one that contradicts itself."""
        return _parse(text)

    @property
    def operands(self) -> tuple[HeadsMap, HeadsMap, HeadsMap]:
        """Maps of query, key and value."""
        return self.query, self.key, self.value

    def size(self, name: str) -> int:
        """Extent of an iteration dimension."""
        return self.sizes[NAMES.index(name)]


@cache
def _parse(text: str) -> Heads:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise EncodingError(f"{text!r} is not a map of heads; expected '(query) * (key) * (value) -> (result); sizes'")
    *maps, sizes = match.groups()
    pairs = [item.partition("=") for item in sizes.split(", ")]
    if [name for name, _, _ in pairs] != list(NAMES):
        raise EncodingError(f"map of heads {text!r}: expected sizes of {', '.join(NAMES)}, in this order")
    if not all(re.fullmatch(r"[0-9]{1,18}|\?", size) for _, _, size in pairs):
        raise EncodingError(f"map of heads {text!r}: a size is a number or '?'")
    numbers = tuple(DYNAMIC if size == "?" else int(size) for _, _, size in pairs)
    query, key, value, result = (_map(part, text) for part in maps)
    heads = Heads(query, key, value, result, numbers)
    _check(heads, text)
    return heads


def _map(text: str, heads: str) -> HeadsMap:
    dims, starts = [], []
    for part in text.split(", "):
        match = _DIM.fullmatch(part)
        if match is None:
            raise EncodingError(f"map of heads {heads!r}: found dimension {part!r}, expected one like 'h*d+64'")
        names, start = match.groups()
        dims.append(() if names == "1" else tuple(names.split("*")))
        starts.append(int(start or 0))
    return HeadsMap(tuple(dims), tuple(starts))


def _check(heads: Heads, text: str) -> None:
    for (operand, names), heads_map in zip(_OPERANDS.items(), (*heads.operands, heads.result), strict=True):
        dims = [name for names_of_dim in heads_map.dims for name in names_of_dim]
        missing = [name for name in names if name not in dims and heads.size(name) != 1]
        if len(set(dims)) != len(dims) or missing or not set(dims) <= set(names):
            raise EncodingError(f"map of heads {text!r}: {operand} runs along {dims}, expected {list(names)}")
    if any(heads.size(name) <= 0 for name in STATIC) or heads.size("h") % heads.size("g"):
        raise EncodingError(f"map of heads {text!r}: h, g, d and e are numbers, and h is a multiple of g")
    if any(heads.result.starts):
        raise EncodingError(f"map of heads {text!r}: the result is not a slice")
