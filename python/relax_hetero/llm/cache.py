"""`rh.llm.KVCache`: what layers cache of several sequences, on their devices: keys and values in pages, or states.

Layers with the same window form a group and share a page table (a block table in vLLM): ``table_full`` for layers
without a window, ``table_window`` for layers with one. A page number names a page in every layer of the group. A forked
sequence shares its pages; the last one is copied on write.

Layers with the gated delta rule have a state of each sequence in place of pages. A forked sequence has a copy of it.
Tokens cannot be removed from it: such a sequence can only be truncated to nothing, or to what calls have computed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tvm
from tvm import runtime

from ..encoding.pages import PAGE, TABLES, LayerCache, pages_of_window
from ..errors import CacheError
from ..vm.device.devices import bind_devices

if TYPE_CHECKING:
    from ..vm.file.executable import Executable
    from .description import ModelDescription


# `PageGroup` does the bookkeeping of page numbers and reference counts; `KVCache` owns the memory.

NO_PAGE = -1


class PageExtension(NamedTuple):
    """Plan of a sequence's extension in a group."""

    out_of_window: range  # columns whose pages have left the window
    copied_column: int | None  # column of a shared page that will be written to, and so is copied
    missing: range  # columns without a page
    pages: int  # pages that it takes, less the pages that it frees


class PageGroup:
    """Page table of a group of layers: column j holds the tokens at positions 64 * j to 64 * j + 63.

    A sequence has pages in consecutive columns, to that of its last token.
    """

    def __init__(
        self,
        window: int,  # number of latest tokens that attention sees (a sliding window); 0: all
        pages: int,  # number of pages
        slots: int,  # rows of the table
        columns: int,  # columns of the table
    ) -> None:
        self.window, self.pages = window, pages
        # Page of each column of a slot, or `NO_PAGE`, ``(slots, columns)``; kernels read it.
        self.table = np.full((slots, columns), NO_PAGE, "int32")
        self.reference_counts = [0] * pages  # number of sequences that share each page
        self.version = 0  # number of changes of the table
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def first_visible_column(self, length: int) -> int:
        """First column that the token at position `length` attends to."""
        return max(0, length - self.window + 1) // PAGE if self.window else 0

    def planned_end(self, before: int, length: int) -> int:
        """Length to which a sequence grows without a plan, after an extension from `before` to `length` tokens.

        The last page takes these tokens, and no page leaves the window; 0 if one has left it.
        """
        end, first = length + -length % PAGE, self.first_visible_column(length)
        if not self.window:
            return end
        return min(end, (first + 1) * PAGE + self.window - 1) if first == self.first_visible_column(before) else 0

    def plan(self, slot: int, length: int, count: int) -> PageExtension:
        """Plan pages for `count` tokens after the first `length` of a slot, without changing anything."""
        row, first = self.table[slot], self.first_visible_column(length)
        out_of_window = range(0)
        if first and row[first - 1] != NO_PAGE:
            out_of_window = range(int(np.argmax(row[:first] != NO_PAGE)), first)
        missing = range(-(-length // PAGE), -(-(length + count) // PAGE))
        last = length // PAGE
        is_shared = bool(count and length % PAGE) and self.reference_counts[row[last]] > 1
        freed = sum(self.reference_counts[row[column]] == 1 for column in out_of_window)
        return PageExtension(out_of_window, last if is_shared else None, missing, len(missing) + is_shared - freed)

    def extend(self, slot: int, extension: PageExtension) -> tuple[int, int] | None:
        """Carry out a plan; the group must have enough free pages.

        Returns the source and destination of a copy-on-write.
        """
        row = self.table[slot]
        if extension.out_of_window:
            self._release(row, extension.out_of_window)
        copy = None
        if extension.copied_column is not None:
            columns = range(extension.copied_column, extension.copied_column + 1)
            source = int(row[extension.copied_column])
            self._release(row, columns)
            self._allocate(row, columns)
            copy = source, int(row[extension.copied_column])
        if extension.missing:
            self._allocate(row, extension.missing)
        return copy

    def share(self, source: int, target: int) -> None:
        """Share a slot's pages with an empty slot."""
        self.table[target] = self.table[source]
        self.version += 1
        for page in self.table[target].tolist():
            if page != NO_PAGE:
                self.reference_counts[page] += 1

    def first_freed_column(self, slot: int, length: int) -> int | None:
        """First column that the token at position `length` attends to and that lacks a page; None if there is none."""
        first = self.first_visible_column(length)
        pages = self.table[slot, first : -(-length // PAGE)].tolist()
        return first + pages.index(NO_PAGE) if NO_PAGE in pages else None

    def truncate(self, slot: int, length: int) -> None:
        """Free the pages after the first `length` tokens."""
        row, first = self.table[slot], -(-length // PAGE)
        columns = [column for column, page in enumerate(row[first:].tolist(), first) if page != NO_PAGE]
        if columns:
            self._release(row, range(columns[0], columns[-1] + 1))

    def _allocate(self, row: np.ndarray, columns: range) -> None:
        pages = [self._free.pop() for _ in columns]
        for page in pages:
            self.reference_counts[page] = 1
        row[columns.start : columns.stop] = pages
        self.version += len(pages)

    def _release(self, row: np.ndarray, columns: range) -> None:
        pages = row[columns.start : columns.stop].tolist()
        for page in pages:
            self.reference_counts[page] -= 1
            if not self.reference_counts[page]:
                self._free.append(page)
        row[columns.start : columns.stop] = NO_PAGE
        self.version += len(pages)


_FULL_TABLE, _WINDOW_TABLE = TABLES[False], TABLES[True]


@dataclass(frozen=True)
class CacheLayer(LayerCache):
    """One layer of a cache.

    Attributes
    ----------
    kv_heads, size, window, shared, state
        As for `LayerCache`.
    device : runtime.Device
        Device of its pages or states.
    """

    device: runtime.Device = tvm.cpu(0)  # noqa: RUF009


class KVCache:
    """Keys and values of several sequences, and states.

    Memory is allocated once, by the constructor. Methods that raise have changed nothing.

    Parameters
    ----------
    layers : sequence of CacheLayer
        Layers; all windows must be equal.
    slots : int
        Maximum number of sequences.
    length : int
        Maximum number of tokens of a sequence.
    chunk : int
        Maximum number of tokens of one extension; determines how many pages a window needs.
    pages : int or mapping of str to int, optional
        Pages of each layer, by table name; an int applies to layers without a window. By default as many as all slots
        can fill.
    memory : int or mapping of str to int, optional
        Maximum number of bytes on each device, or by device ("cpu:0", "cuda:0"), instead of `pages`.
    dtype : str
        One of `relax_hetero.encoding.pages.PAGE_TYPES`.

    Attributes
    ----------
    tables : dict of str to array of int32, (slots, columns)
        Page tables for the model's functions, changed in place.

    Raises
    ------
    CacheError
        If windows of layers differ, or `memory` does not hold a page.
    """

    def __init__(
        self,
        layers: Sequence[CacheLayer],
        *,
        slots: int,
        length: int,
        chunk: int = 256,
        pages: int | Mapping[str, int] | None = None,
        memory: int | Mapping[str, int] | None = None,
        dtype: str = "float16",
    ) -> None:
        windows = sorted({layer.window for layer in layers if layer.window})
        if not layers or slots < 1 or length < 1 or len(windows) > 1:
            raise CacheError(
                f"a cache of {len(layers)} layers, {slots} slots and {length} tokens, with windows {windows}: expected "
                "1 or more of each, and at most one window"
            )
        self.layers, self.slots, self.dtype = tuple(layers), slots, dtype
        self._columns = -(-length // PAGE)
        window = windows[0] if windows else 0
        per_slot = min(self._columns, pages_of_window(window, chunk))
        self._max_pages = {_FULL_TABLE: slots * self._columns, _WINDOW_TABLE: slots * per_slot}
        counts = self._page_counts(pages, memory)
        self._groups = {
            name: PageGroup(window if name == _WINDOW_TABLE else 0, counts[name], slots, self._columns)
            for name in (_FULL_TABLE, _WINDOW_TABLE)
            if any(_table_name(layer) == name for layer in layers if not layer.state)
        }
        self.tables = {name: group.table for name, group in self._groups.items()}
        self._lengths: list[int | None] = [None] * slots
        self._planned_ends: dict[int, int] = {}  # lengths to which sequences grow with their pages as they are
        self._has_states = any(layer.state for layer in layers)
        self._computed = [0] * slots  # tokens that are in the states
        # None while a call has the pages.
        self._layer_pages: list[runtime.Tensor] | None = [
            runtime.empty(layer.shape(counts[_table_name(layer)], slots, dtype), layer.dtype(dtype), layer.device)
            for layer in layers
        ]

    @classmethod
    def from_executable(
        cls, executable: Executable, description: ModelDescription, devices: object = None, chunk: int | None = None
    ) -> KVCache:
        """Make the cache that an executable of `relax_hetero.from_gguf` was compiled for.

        Parameters
        ----------
        executable : Executable
            Executable with functions ``decode_B``.
        description : ModelDescription
            Description of the model, as `from_gguf` gives it.
        devices : optional
            As `VirtualMachine` takes them.
        chunk : int, optional
            Maximum number of tokens of one extension; by default that of the functions.

        Raises
        ------
        CacheError
            If the executable's functions take no pages.
        """
        function = next((name for name in executable.metadata.signatures if name.startswith("decode_")), None)
        if function is None:
            raise CacheError(f"found functions {list(executable.metadata.signatures)}, expected one named decode_*")
        inputs: dict[str, Any] = {spec.name: spec for spec in executable.signature(function).inputs}
        physical_devices = bind_devices(executable.metadata, devices)
        names = [f"pages_{index}" for index in range(len(description.layers))]
        table = inputs.get(_FULL_TABLE) or inputs.get(_WINDOW_TABLE)
        if table is None or any(name not in inputs for name in names):
            raise CacheError(
                f"function {function!r} has inputs {list(inputs)}, expected tables and pages of each layer"
            )
        specs = [inputs[name] for name in names]
        layers = [
            CacheLayer(**asdict(layer), device=physical_devices[spec.device])
            for spec, layer in zip(specs, description.layers, strict=True)
        ]
        with_pages = [pair for pair in zip(layers, specs, strict=True) if not pair[0].state]
        counts = {_table_name(layer): spec.shape[0] for layer, spec in with_pages}
        pages = {name: count for name, count in counts.items() if isinstance(count, int)}
        prefills = [name for name in executable.metadata.signatures if name.startswith("prefill_")]
        return cls(
            layers,
            slots=int(table.shape[0]),
            length=min(description.context, int(table.shape[1]) * PAGE),
            chunk=chunk or max((int(name.rpartition("_")[2]) for name in prefills), default=1),
            pages=pages,
            dtype=description.page_type,
        )

    # -- memory

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of the cache, by device."""
        return self._bytes({name: group.pages for name, group in self._groups.items()})

    @property
    def pages(self) -> dict[str, tuple[int, int]]:
        """Pages in use and number of pages, by table."""
        return {name: (group.pages - group.free, group.pages) for name, group in self._groups.items()}

    def take(self) -> list[runtime.Tensor]:
        """Take the pages of each layer, for a call that donates them; `release` puts them back.

        Raises
        ------
        CacheError
            If they are taken already.
        """
        if self._layer_pages is None:
            raise CacheError("the pages of the cache are taken already; expected them to be given back first")
        arrays, self._layer_pages = self._layer_pages, None
        if self._has_states:
            self._computed = [length or 0 for length in self._lengths]
        return arrays

    def release(self, pages: Sequence[runtime.Tensor]) -> None:
        """Put back the pages of each layer, as a call returned them or as `take` returned them.

        Parameters
        ----------
        pages : sequence of runtime.Tensor
            Pages of each layer, in order.
        """
        if len(pages) != len(self.layers):
            raise CacheError(f"found {len(pages)} layers' pages, expected {len(self.layers)}")
        self._layer_pages = list(pages)

    @property
    def tables_version(self) -> int:
        """Number of changes of the page tables."""
        return sum(group.version for group in self._groups.values())

    # -- sequences

    def add(self) -> int:
        """Add an empty sequence and return its slot; CacheError if all are in use."""
        slot = next((slot for slot, length in enumerate(self._lengths) if length is None), None)
        if slot is None:
            raise CacheError(f"all {self.slots} slots of the cache are in use; expected a free one")
        self._lengths[slot] = self._computed[slot] = 0
        return slot

    def length(self, slot: int) -> int:
        """Return the number of tokens of a sequence.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        """
        length = self._lengths[slot] if 0 <= slot < self.slots else None
        if length is None:
            raise CacheError(f"slot {slot} is not in use; slots in use are {self._used_slots()}")
        return length

    def extend(self, slot: int, count: int) -> None:
        """Allocate pages for more tokens of a sequence, and add them to its length.

        Pages that have left the window are freed; `truncate` to the previous length undoes everything else.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        count : int
            Number of tokens.

        Raises
        ------
        CacheError
            If the sequence would be too long, or pages run out; nothing has changed then.
        """
        length = self.length(slot)
        max_length = self._columns * PAGE
        if count < 0 or length + count > max_length:
            raise CacheError(
                f"sequence {slot} of {length} tokens asks for {count} more, expected at most {max_length} tokens in all"
            )
        plans = {name: group.plan(slot, length, count) for name, group in self._groups.items()}
        for name, plan in plans.items():
            group = self._groups[name]
            if plan.pages > group.free:
                raise CacheError(
                    f"sequence {slot} of {length} tokens asks for {count} more: {plan.pages} pages of {name}, of which "
                    f"{group.free} are free and {group.pages - group.free} of {group.pages} in use"
                )
        if any(plan.copied_column is not None for plan in plans.values()) and self._layer_pages is None:
            raise CacheError(f"sequence {slot} shares its last page, which cannot be copied while a call has the pages")
        for name, plan in plans.items():
            copy = self._groups[name].extend(slot, plan)
            if copy is not None:
                self._copy_page(name, *copy)
        self._lengths[slot] = length + count
        if count:  # then a last page that was shared has been copied
            ends = (group.planned_end(length, length + count) for group in self._groups.values())
            self._planned_ends[slot] = min(ends, default=0)

    def extend_rows(self, slots: Sequence[int]) -> list[int]:
        """Extend sequences by a token for each of their rows in a step, and return the positions of these tokens.

        Parameters
        ----------
        slots : sequence of int
            Slot of each row.

        Raises
        ------
        CacheError
            As for `extend`; then all sequences have their previous lengths.
        """
        counts, before = Counter(slots), dict[int, int]()
        try:
            for slot, count in counts.items():
                before[slot] = length = self.length(slot)
                if length + count <= self._planned_ends.get(slot, 0):
                    self._lengths[slot] = length + count
                else:
                    self.extend(slot, count)
        except BaseException:
            for slot, length in before.items():
                self.truncate(slot, length)
            raise
        if len(counts) == len(slots):
            return list(before.values())
        positions = {slot: itertools.count(length) for slot, length in before.items()}
        return [next(positions[slot]) for slot in slots]

    def fork(self, slot: int) -> int:
        """Add a sequence with the same tokens, which shares the pages; CacheError if no slot is free.

        Parameters
        ----------
        slot : int
            Slot of the sequence to share.
        """
        length = self.length(slot)
        if self._has_states and self._layer_pages is None:
            raise CacheError(f"sequence {slot} has states, which cannot be copied while a call has them")
        new_slot = self.add()
        self._planned_ends.pop(slot, None)
        for group in self._groups.values():
            group.share(slot, new_slot)
        for layer, array in zip(self.layers, self._layer_pages or (), strict=self._layer_pages is not None):
            if layer.state:
                self._copy_unit(layer, array, slot, new_slot)
        self._lengths[new_slot], self._computed[new_slot] = length, self._computed[slot]
        return new_slot

    def truncate(self, slot: int, length: int) -> None:
        """Remove the tokens after the first `length`.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        length : int
            Number of tokens to keep.

        Raises
        ------
        CacheError
            If the sequence is shorter, its window would need a page that was freed, or its states have later tokens.
        """
        current = self.length(slot)
        if not 0 <= length <= current:
            raise CacheError(f"sequence {slot} of {current} tokens: cannot be truncated to {length}")
        if self._has_states and 0 < length < self._computed[slot]:
            raise CacheError(
                f"sequence {slot} of {current} tokens cannot be truncated to {length}: its states have "
                f"{self._computed[slot]}, and none can be removed from them"
            )
        for name, group in self._groups.items():
            freed = group.first_freed_column(slot, length)
            if freed is not None:
                raise CacheError(
                    f"sequence {slot} of {current} tokens cannot be truncated to {length}: the window of "
                    f"{group.window} would see positions from {freed * PAGE} on, whose pages {name} has freed"
                )
        if -(-length // PAGE) < -(-current // PAGE):
            for group in self._groups.values():
                group.truncate(slot, length)
            self._planned_ends.pop(slot, None)
        self._lengths[slot], self._computed[slot] = length, min(self._computed[slot], length)

    def free(self, slot: int) -> None:
        """Remove a sequence.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        """
        self.length(slot)  # raises CacheError if the slot has no sequence
        for group in self._groups.values():
            group.truncate(slot, 0)
        self._lengths[slot] = None
        self._planned_ends.pop(slot, None)

    def _used_slots(self) -> list[int]:
        return [slot for slot, length in enumerate(self._lengths) if length is not None]

    # -- numbers of pages

    def _page_counts(
        self, pages: int | Mapping[str, int] | None, memory: int | Mapping[str, int] | None
    ) -> dict[str, int]:
        if pages is not None and memory is not None:
            raise CacheError("found pages= and memory=, expected one of them")
        if isinstance(pages, Mapping):
            return {**self._max_pages, **pages}
        max_pages = self._max_pages[_FULL_TABLE] if pages is None else pages
        if memory is None:
            return self._limit_counts(max_pages)
        count = next((count for count in range(max_pages, 0, -1) if self._fits(count, memory)), 0)
        if not count:
            raise CacheError(
                f"memory={memory}: expected at least a page of each layer, {self._bytes(self._limit_counts(1))}"
            )
        return self._limit_counts(count)

    def _limit_counts(self, count: int) -> dict[str, int]:
        """Give each group `count` pages, but at most as many as all its slots can fill."""
        return {name: max(1, min(count, pages)) for name, pages in self._max_pages.items()}

    def _fits(self, count: int, memory: int | Mapping[str, int]) -> bool:
        for device, size in self._bytes(self._limit_counts(count)).items():
            limit = memory.get(device) if isinstance(memory, Mapping) else memory
            if limit is not None and size > limit:
                return False
        return True

    def _bytes(self, counts: Mapping[str, int]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for layer in self.layers:
            count = self.slots if layer.state else counts[_table_name(layer)]
            size = count * layer.unit_bytes(self.dtype)
            sizes[str(layer.device)] = sizes.get(str(layer.device), 0) + size
        return sizes

    def _copy_page(self, name: str, source: int, target: int) -> None:
        """Copy a page of every layer of a group, each on its device."""
        assert self._layer_pages is not None, "a call has the pages"
        for layer, array in zip(self.layers, self._layer_pages, strict=True):
            if _table_name(layer) == name and not layer.state:
                self._copy_unit(layer, array, source, target)

    def _copy_unit(self, layer: CacheLayer, array: runtime.Tensor, source: int, target: int) -> None:
        """Copy a page of a layer, or the state of a sequence."""
        size, shape = layer.unit_bytes(self.dtype), tuple(map(int, array.shape))[1:]
        views = [array._create_view(shape, str(array.dtype), index * size) for index in (source, target)]
        layer.device.sync()  # the last call may still write
        views[0].copyto(views[1])
        layer.device.sync()


def _table_name(layer: CacheLayer) -> str:
    return _WINDOW_TABLE if layer.window else _FULL_TABLE
