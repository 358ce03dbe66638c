"""Options and parameters of the functions of a language model with a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from tvm import relax, tirx

from ..encoding.pages import PAGE, PAGE_TYPES, TABLES, LayerCache, pages_of_window
from ..errors import FrontendError

DECODE, VERIFY, CHUNK = "decode", "verify", "chunk"  # kinds of functions: the `rows` argument of `cached_attention`


@dataclass(frozen=True)
class PagedCache:
    """Functions and cache of a language model imported by `from_onnx` (``cache=``) or `from_gguf`.

    Attributes
    ----------
    batches : tuple of int
        Rows of the functions ``decode_B``: one token of each of B sequences.
    chunks : tuple of int
        Rows of the functions ``prefill_C``: consecutive tokens of one sequence.
    slots : int, optional
        Number of sequences in the cache; by default the largest batch.
    context : int
        Maximum number of positions of a sequence.
    page_type : str
        Element type of the cache: "float16", "bfloat16", "float32" or "int8".
    all_logits : bool
        True if ``prefill_C`` returns the logits of all its rows rather than of one.
    verify_rows : int
        Rows of the function ``verify_R``, a decode function whose rows may belong to one sequence; 0 for none.
    masks_tokens : bool
        True if there is a function ``masked_tokens``: greedy tokens of logits among those that masks allow.
    any_pages : bool
        True if the caller chooses the number of pages: functions take any, and the same for layers that share a table.

    Raises
    ------
    FrontendError
        If a number is not above 0, or the page type is invalid.
    """

    batches: tuple[int, ...] = (1,)
    chunks: tuple[int, ...] = (128,)
    slots: int | None = None
    context: int = 4096
    page_type: str = "float16"
    all_logits: bool = False
    any_pages: bool = False
    verify_rows: int = 0
    masks_tokens: bool = False

    def __post_init__(self) -> None:
        for field in fields(self)[:4]:
            value = getattr(self, field.name)
            if value is None and field.name == "slots":
                continue
            numbers = list(value) if isinstance(value, (tuple, list)) else [value]
            is_list = field.name in ("batches", "chunks")
            is_valid = isinstance(value, (tuple, list)) == is_list and numbers
            if not is_valid or any(not isinstance(number, int) or number < 1 for number in numbers):
                raise FrontendError(f"PagedCache: {field.name} is {value!r}, expected whole numbers above 0")
        if self.page_type not in PAGE_TYPES:
            raise FrontendError(f"PagedCache: page_type is {self.page_type!r}, expected one of {', '.join(PAGE_TYPES)}")

    @property
    def sequences(self) -> int:
        """Number of sequences in the cache."""
        return max(self.batches) if self.slots is None else self.slots

    @property
    def max_pages(self) -> int:
        """Number of pages of the longest sequence."""
        return -(-self.context // PAGE)

    def pages(self, window: int) -> int:
        """Number of pages of a layer's cache: for each sequence those that a window and a chunk may touch, or all.

        Parameters
        ----------
        window : int
            Number of latest positions that the layer attends to; 0: all.
        """
        window_pages = pages_of_window(window, max(self.chunks))
        return self.sequences * (min(self.max_pages, window_pages) if window else self.max_pages)

    @property
    def functions(self) -> list[tuple[str, int, str]]:
        """The name, rows and kind of each function."""
        verify = (self.verify_rows,) if self.verify_rows else ()
        kinds = ((DECODE, "decode", self.batches), (VERIFY, "verify", verify), (CHUNK, "prefill", self.chunks))
        return [(f"{name}_{rows}", rows, kind) for kind, name, sizes in kinds for rows in sizes]

    def parameters(self, rows: int, kind: str, layers: Sequence[LayerCache]) -> dict[str, relax.Var]:
        """The parameters of a function in order, by name.

        Parameters
        ----------
        rows : int
            Number of tokens of a call.
        kind : str
            `DECODE`, `VERIFY` or `CHUNK`.
        layers : sequence of LayerCache
            Cache of each layer that has one.
        """
        shapes: dict[str, list[int]] = {name: [rows] for name in ("tokens", "positions", "sequences")}
        if kind == CHUNK and not self.all_logits:
            shapes["last"] = [1]
        for is_window in dict.fromkeys(bool(layer.window) for layer in layers if not layer.state):
            shapes[TABLES[is_window]] = [self.sequences, self.max_pages]
        params = {name: relax.Var(name, relax.TensorType(shape, "int32")) for name, shape in shapes.items()}
        counts = {is_window: tirx.Var(f"{name}_pages", "int64") for is_window, name in TABLES.items()}
        for index, layer in enumerate(layers):
            count = counts[bool(layer.window)] if self.any_pages else self.pages(layer.window)
            ty = relax.TensorType(list(layer.shape(count, self.sequences, self.page_type)), layer.dtype(self.page_type))
            params[f"pages_{index}"] = relax.Var(f"pages_{index}", ty)
        return params
