"""Pages of a cache of keys and values: their size, shape, and the order of the numbers in them.

The cache of a layer is one tensor ``(pages, kv_heads, elements)``. A page belongs to `PAGE` consecutive tokens of a
sequence; for each head of keys and values it holds the keys, then the values, each in the order that the device's
kernel of ``relax.hetero.cached_attention`` reads. The shape is the same on every device, the order is not.

Orders, of the keys of one head:

- ``"rows"``: ``(PAGE, size)``, a token's key is one row;
- ``"lanes"``: ``(size, PAGE)``, neighbouring tokens are neighbours, as the lanes of a vector that scores 16 of them;
- ``"chunks"``: ``(size / 8, PAGE, 8)``, eight neighbouring numbers of a token are what tensor cores take at once.

Values are ``(PAGE, size)`` in the first two, and like keys in the third. Where keys are the values, a page holds them
once, in the order of values. In ``"int8"`` pages, a number is an integer
from -127 to 127 times a float32 scale, one for each token's key and one for each token's value; the scales of the keys,
then those of the values, follow the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import EncodingError

PAGE = 64  # tokens of a page
EXPERT_COUNTS = "expert_counts_"  # begin of the names of a language model's counters, before the number of the layer

TABLES = {False: "table_full", True: "table_window"}
"""Names of the page tables of layers that see all tokens (False), and of layers with a window (True)."""

PAGE_TYPES = ("float16", "bfloat16", "float32", "int8")  # element types that a cache may have
ORDERS = ("rows", "lanes", "chunks")  # orders of the keys of a page

_SCALE_BYTES = 4


def head_elements(
    size: int,  # numbers of a head's key, and of its value
    dtype: str,  # one of `PAGE_TYPES`
    shared: bool = False,  # True if keys are the values, so that a page holds them once
) -> int:
    """Elements of a page for one head of keys and values: 2 * 64 * size numbers, and the scales of "int8".

    Raises EncodingError if `dtype` is not one of `PAGE_TYPES`.
    """
    if dtype not in PAGE_TYPES:
        raise EncodingError(f"pages of {dtype}: expected one of {', '.join(PAGE_TYPES)}")
    scale_bytes = _SCALE_BYTES if dtype == "int8" else 0
    return (1 if shared else 2) * PAGE * (size + scale_bytes)


def pages_of_window(window: int, chunk: int) -> int:
    """Pages that a sequence has at once in a layer with a window, where at most `chunk` tokens are added at a time."""
    return -(-(window + chunk) // PAGE) + 1


def page_shape(
    pages: Any, kv_heads: int, size: int, dtype: str = "float16", shared: bool = False
) -> tuple[Any, int, int]:
    """The shape of a layer's cache of a number of pages (an int, or an expression)."""
    return pages, kv_heads, head_elements(size, dtype, shared)


def page_bytes(kv_heads: int, size: int, dtype: str = "float16", shared: bool = False) -> int:
    """Bytes of one page of one layer."""
    width = {"float32": 4, "int8": 1}.get(dtype, 2)
    return kv_heads * head_elements(size, dtype, shared) * width


@dataclass(frozen=True)
class LayerCache:
    """Sizes of what a layer caches: keys and values of each token in pages, or a state of each sequence."""

    # Number of key-value heads, and elements of one; 0 for a state.
    kv_heads: int
    size: int
    window: int = 0  # number of latest tokens that the layer sees; 0: all
    shared: bool = False  # True if keys are the values, so that pages hold them once
    state: int = 0  # elements of the state of a sequence, of float32; 0: the layer has pages

    def shape(
        self,
        pages: Any,  # number of pages
        slots: int,  # number of sequences
        dtype: str,  # one of `PAGE_TYPES`
    ) -> tuple[Any, ...]:
        """Shape of the cache."""
        if self.state:
            return slots, self.state
        return page_shape(pages, self.kv_heads, self.size, dtype, self.shared)

    def dtype(self, page_type: str) -> str:
        """Element type of the cache, given that of pages. `page_type`: one of `PAGE_TYPES`."""
        return "float32" if self.state else page_type

    def unit_bytes(self, dtype: str) -> int:
        """Bytes of a page, or of the state of a sequence. `dtype`: element type of the cache, one of `PAGE_TYPES`."""
        return 4 * self.state or page_bytes(self.kv_heads, self.size, dtype, self.shared)
