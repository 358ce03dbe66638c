"""Options and parameters of the functions of a language model, and of their cache of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from tvm import relax

from ..encoding.pages import PAGE, PAGE_TYPES, TABLES, page_shape, pages_of_window
from ..errors import FrontendError

DECODE, CHUNK = "decode", "chunk"
"""Kinds of functions, as `cached_attention` names the kinds of their rows."""


@dataclass(frozen=True)
class PagedCache:
    """The functions and the cache that `from_onnx` makes of a decoder (``cache=``), and `from_gguf` of any file.

    Attributes
    ----------
    batches : tuple of int
        Rows of the functions ``decode_B``: one token of each of B sequences.
    chunks : tuple of int
        Rows of the functions ``prefill_C``: tokens that follow each other in one sequence.
    slots : int, optional
        Sequences that the cache holds at once; by default as many as the largest batch.
    context : int
        Most positions of a sequence.
    page_type : str
        Element type of the cache: "float16", "float32" or "int8".
    all_logits : bool
        Whether ``prefill_C`` gives the logits of all its rows, and not of one.

    Raises
    ------
    FrontendError
        If a number is none above 0, or there are no such pages.
    """

    batches: tuple[int, ...] = (1,)
    chunks: tuple[int, ...] = (128,)
    slots: int | None = None
    context: int = 4096
    page_type: str = "float16"
    all_logits: bool = False

    def __post_init__(self) -> None:
        for field in fields(self)[:4]:
            value = getattr(self, field.name)
            if value is None and field.name == "slots":
                continue
            numbers = list(value) if isinstance(value, (tuple, list)) else [value]
            is_list = field.name in ("batches", "chunks")
            is_right = isinstance(value, (tuple, list)) == is_list and numbers
            if not is_right or any(not isinstance(number, int) or number < 1 for number in numbers):
                raise FrontendError(f"PagedCache: {field.name} is {value!r}, expected whole numbers above 0")
        if self.page_type not in PAGE_TYPES:
            raise FrontendError(f"PagedCache: page_type is {self.page_type!r}, expected one of {', '.join(PAGE_TYPES)}")

    @property
    def sequences(self) -> int:
        """How many the cache holds at once."""
        return max(self.batches) if self.slots is None else self.slots

    @property
    def max_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.context // PAGE)

    def pages(self, window: int) -> int:
        """Pages of a layer's cache: for each sequence those that a window and a chunk may touch, or all.

        Parameters
        ----------
        window : int
            Number of latest positions that the layer sees; 0: all.
        """
        touched = pages_of_window(window, max(self.chunks))
        return self.sequences * (min(self.max_pages, touched) if window else self.max_pages)

    @property
    def functions(self) -> list[tuple[str, int, str]]:
        """The name, rows and kind of each function."""
        kinds = ((DECODE, "decode", self.batches), (CHUNK, "prefill", self.chunks))
        return [(f"{name}_{rows}", rows, kind) for kind, name, sizes in kinds for rows in sizes]

    def parameters(
        self, rows: int, kind: str, windows: Sequence[int], kv_heads: Sequence[int], size: int
    ) -> dict[str, relax.Var]:
        """The parameters of a function, in their order, by their names.

        Parameters
        ----------
        rows : int
            Number of tokens of a call.
        kind : str
            `DECODE` or `CHUNK`.
        windows, kv_heads : sequence of int
            Window of each layer, and its heads of keys and values.
        size : int
            Numbers of a head's key.
        """
        shapes: dict[str, list[int]] = {name: [rows] for name in ("tokens", "positions", "sequences")}
        if kind == CHUNK and not self.all_logits:
            shapes["last"] = [1]
        for is_window in dict.fromkeys(map(bool, windows)):
            shapes[TABLES[is_window]] = [self.sequences, self.max_pages]
        found = {name: relax.Var(name, relax.TensorType(shape, "int32")) for name, shape in shapes.items()}
        for layer, (heads, window) in enumerate(zip(kv_heads, windows, strict=True)):
            pages = page_shape(self.pages(window), heads, size, self.page_type)
            found[f"pages_{layer}"] = relax.Var(f"pages_{layer}", relax.TensorType(list(pages), self.page_type))
        return found
