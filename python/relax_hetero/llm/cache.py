"""`rh.llm.KVCache`: the keys and values of several sequences, in pages on the devices of their layers.

Layers that see the same positions are a group: they share a table of pages, ``table_full`` for those that see all,
``table_window`` for those that see a window. A page number means a page of every layer of the group. A sequence that is
forked shares its pages; the last one is copied when one of both writes to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import runtime

from ..encoding.pages import PAGE, TABLES, page_bytes, page_shape, pages_of_window
from ..errors import CacheError
from ..vm.device.devices import bind_devices

if TYPE_CHECKING:
    from ..vm.file.executable import Executable
    from .description import ModelDescription


# The pages of layers that see the same positions: which of them a sequence has, and who else has them.
#
# Everything here is numbers; the memory is the cache's.

NO_PAGE = -1


@dataclass(frozen=True)
class PageExtension:
    """Pages that an extension of a sequence takes from a group.

    Attributes
    ----------
    out_of_window : tuple of int
        Columns whose pages the window cannot reach any more.
    copied : int or None
        The column of a page that is shared, and will be written to.
    missing : tuple of int
        Columns that have no page yet.
    pages : int
        Pages that it needs, less those that it gives back.
    """

    out_of_window: tuple[int, ...]
    copied: int | None
    missing: tuple[int, ...]
    pages: int


class PageGroup:
    """Pages by slot and column: column j holds the tokens at positions 64 * j to 64 * j + 63.

    Parameters
    ----------
    window : int
        How many of the latest tokens are seen; 0: all.
    pages, slots, columns : int

    Attributes
    ----------
    table : array of int32, (slots, columns)
        The page of a slot's column, -1 where there is none; what kernels read.
    users : array of int32, (pages,)
        How many sequences have a page.
    """

    def __init__(self, window: int, pages: int, slots: int, columns: int) -> None:
        self.window, self.pages = window, pages
        self.table = np.full((slots, columns), NO_PAGE, "int32")
        self.users = np.zeros(pages, "int32")
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that no sequence has."""
        return len(self._free)

    def first_needed(self, length: int) -> int:
        """The first column that the token behind `length` others sees."""
        return max(0, length - self.window + 1) // PAGE if self.window else 0

    def plan(self, slot: int, length: int, count: int) -> PageExtension:
        """Plan pages for `count` tokens after the first `length` of a slot; changes nothing."""
        row, first = self.table[slot], self.first_needed(length)
        # Columns with pages follow each other, so that most often a look at one of them tells.
        held = first > 0 and row[first - 1] != NO_PAGE
        behind = tuple(int(column) for column in np.flatnonzero(row[:first] != NO_PAGE)) if held else ()
        if not count:
            return PageExtension(behind, None, (), 0)
        begin, end = length // PAGE, -(-(length + count) // PAGE)
        missing = tuple(column for column in range(begin, end) if row[column] == NO_PAGE)
        shared = length % PAGE != 0 and row[begin] != NO_PAGE and self.users[row[begin]] > 1
        given_back = sum(self.users[row[column]] == 1 for column in behind)
        return PageExtension(behind, begin if shared else None, missing, len(missing) + shared - int(given_back))

    def extend(self, slot: int, extension: PageExtension) -> tuple[int, int] | None:
        """Carry out a plan for which there are pages.

        Returns
        -------
        tuple of int, or None
            The page to copy, and the one to copy it to.
        """
        row = self.table[slot]
        for column in extension.out_of_window:
            self._release(row, column)
        copy = None
        if extension.copied is not None:
            source = int(row[extension.copied])
            self._release(row, extension.copied)
            self._take(row, extension.copied)
            copy = source, int(row[extension.copied])
        for column in extension.missing:
            self._take(row, column)
        return copy

    def share(self, source: int, target: int) -> None:
        """Give an empty slot the pages of another."""
        self.table[target] = self.table[source]
        held = self.table[target]
        self.users[held[held != NO_PAGE]] += 1

    def lost(self, slot: int, length: int) -> int | None:
        """The first column that the token behind `length` others sees, and that was given back; None if none was."""
        columns = range(self.first_needed(length), -(-length // PAGE))
        return next((column for column in columns if self.table[slot, column] == NO_PAGE), None)

    def cut(self, slot: int, length: int) -> None:
        """Give back the pages behind the first `length` tokens."""
        row = self.table[slot]
        for column in range(-(-length // PAGE), len(row)):
            if row[column] != NO_PAGE:
                self._release(row, column)

    def _take(self, row: np.ndarray, column: int) -> None:
        page = self._free.pop()
        self.users[page] = 1
        row[column] = page

    def _release(self, row: np.ndarray, column: int) -> None:
        page = int(row[column])
        row[column] = NO_PAGE
        self.users[page] -= 1
        if not self.users[page]:
            self._free.append(page)


FULL, WINDOW = TABLES[False], TABLES[True]


@dataclass(frozen=True)
class CacheLayer:
    """A layer's part of a cache.

    Attributes
    ----------
    kv_heads, size : int
        Heads of keys and values, and the numbers of one.
    window : int
        How many of the latest tokens the layer sees; 0: all.
    device : runtime.Device
        Where its pages are.
    """

    kv_heads: int
    size: int
    window: int = 0
    device: runtime.Device = tvm.cpu(0)  # noqa: RUF009


class KVCache:
    """Keys and values of several sequences.

    Memory is taken once, when the cache is made. No method writes anything before it knows that there is room.

    Parameters
    ----------
    layers : sequence of CacheLayer
        Those with a window have the same one.
    slots : int
        Most sequences.
    length : int
        Most tokens of a sequence.
    chunk : int
        Most tokens that a sequence is extended by at once; says how many pages a window needs.
    pages : int or mapping of str to int, optional
        Pages of each layer, by the name of its table; an int: of layers that see all tokens. By default as many as all
        slots fill.
    memory : int or mapping of str to int, optional
        Most bytes on each device, or by device ("cpu:0", "cuda:0"); in place of `pages`.
    dtype : str
        One of `relax_hetero.encoding.pages.PAGE_TYPES`.

    Attributes
    ----------
    tables : dict of str to array of int32, (slots, columns)
        Tables that functions of the model are given; changed in place.

    Raises
    ------
    CacheError
        If layers have windows that differ, or `memory` does not hold a page.
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
                "1 or more of each, and one window"
            )
        self.layers, self.slots, self.dtype = tuple(layers), slots, dtype
        self._columns = -(-length // PAGE)
        window = windows[0] if windows else 0
        per_slot = min(self._columns, pages_of_window(window, chunk))
        self._max_pages = {FULL: slots * self._columns, WINDOW: slots * per_slot}
        counts = self._counts(pages, memory)
        self._groups = {
            name: PageGroup(window if name == WINDOW else 0, counts[name], slots, self._columns)
            for name in (FULL, WINDOW)
            if any(_table(layer) == name for layer in layers)
        }
        self.tables = {name: group.table for name, group in self._groups.items()}
        self._lengths: list[int | None] = [None] * slots
        self._arrays: list[runtime.Tensor] | None = [
            runtime.empty(self._shape(layer, counts), dtype, layer.device) for layer in layers
        ]

    @classmethod
    def of(cls, executable: Executable, description: ModelDescription, devices: object = None) -> KVCache:
        """The cache that an executable of `relax_hetero.from_gguf` was compiled for.

        Parameters
        ----------
        executable : Executable
            Executable with functions ``decode_B``.
        description : ModelDescription
            Description of the model, as `from_gguf` gives it.
        devices : optional
            As `VirtualMachine` takes them.

        Raises
        ------
        CacheError
            If the executable's functions take no pages.
        """
        function = next((name for name in executable.metadata.signatures if name.startswith("decode_")), None)
        if function is None:
            raise CacheError(f"found functions {list(executable.metadata.signatures)}, expected one named decode_*")
        inputs: dict[str, Any] = {spec.name: spec for spec in executable.signature(function).inputs}
        places = bind_devices(executable.metadata, devices)
        names = [f"pages_{layer}" for layer in range(len(description.windows))]
        table = inputs.get(FULL) or inputs.get(WINDOW)
        if table is None or any(name not in inputs for name in names):
            raise CacheError(
                f"function {function!r} has inputs {list(inputs)}, expected tables and pages of each layer"
            )
        specs = [inputs[name] for name in names]
        layers = [
            CacheLayer(description.kv_heads, description.size, window, places[spec.device])
            for spec, window in zip(specs, description.windows, strict=True)
        ]
        pages = {_table(layer): int(spec.shape[0]) for layer, spec in zip(layers, specs, strict=True)}
        slots, columns = map(int, table.shape)
        return cls(layers, slots=slots, length=columns * PAGE, pages=pages, dtype=description.page_type)

    # -- memory

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes that the cache takes, by device."""
        return self._bytes({name: group.pages for name, group in self._groups.items()})

    @property
    def pages(self) -> dict[str, tuple[int, int]]:
        """Pages in use, and all, by table."""
        return {name: (group.pages - group.free, group.pages) for name, group in self._groups.items()}

    def take(self) -> list[runtime.Tensor]:
        """The pages of each layer, for a call that writes to them and gives them back.

        Raises
        ------
        CacheError
            If a call has them.
        """
        if self._arrays is None:
            raise CacheError("the pages of the cache are taken already; expected them to be given back first")
        taken, self._arrays = self._arrays, None
        return taken

    def release(self, pages: Sequence[runtime.Tensor]) -> None:
        """Take the pages of each layer back: those that a call returned, or that `take` gave.

        Parameters
        ----------
        pages : sequence of runtime.Tensor
            Pages of each layer, in order.
        """
        if len(pages) != len(self.layers):
            raise CacheError(f"found {len(pages)} layers' pages, expected {len(self.layers)}")
        self._arrays = list(pages)

    # -- sequences

    def add(self) -> int:
        """An empty sequence's slot; CacheError if all are in use."""
        slot = next((slot for slot, length in enumerate(self._lengths) if length is None), None)
        if slot is None:
            raise CacheError(f"all {self.slots} slots of the cache are in use; expected a free one")
        self._lengths[slot] = 0
        return slot

    def length(self, slot: int) -> int:
        """How many tokens a sequence has.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        """
        length = self._lengths[slot] if 0 <= slot < self.slots else None
        if length is None:
            raise CacheError(f"slot {slot} has no sequence; those in use are {self._in_use()}")
        return length

    def extend(self, slot: int, count: int) -> None:
        """Make room for more tokens of a sequence, which are part of its length from here on.

        Pages that a window cannot reach any more are given back; `cut` to the length before brings back all else.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        count : int
            Number of tokens.

        Raises
        ------
        CacheError
            If there are no such tokens, or no pages for them; nothing has changed then.
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
        if any(plan.copied is not None for plan in plans.values()) and self._arrays is None:
            raise CacheError(f"sequence {slot} shares its last page, which cannot be copied while a call has the pages")
        for name, plan in plans.items():
            copy = self._groups[name].extend(slot, plan)
            if copy is not None:
                self._copy_page(name, *copy)
        self._lengths[slot] = length + count

    def fork(self, slot: int) -> int:
        """The slot of a new sequence with the same tokens; pages are shared. CacheError if no slot is free.

        Parameters
        ----------
        slot : int
            Slot of the sequence to share.
        """
        length = self.length(slot)
        new = self.add()
        for group in self._groups.values():
            group.share(slot, new)
        self._lengths[new] = length
        return new

    def cut(self, slot: int, length: int) -> None:
        """Forget the tokens behind the first `length`.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        length : int
            Number of tokens that stay.

        Raises
        ------
        CacheError
            If there are no so many, or a window's page that is needed then was given back.
        """
        now = self.length(slot)
        if not 0 <= length <= now:
            raise CacheError(f"sequence {slot} of {now} tokens: cannot be cut to {length}")
        for name, group in self._groups.items():
            lost = group.lost(slot, length)
            if lost is not None:
                raise CacheError(
                    f"sequence {slot} of {now} tokens cannot be cut to {length}: the window of {group.window} sees "
                    f"positions from {lost * PAGE} on then, which {name} gave back"
                )
        for group in self._groups.values():
            group.cut(slot, length)
        self._lengths[slot] = length

    def free(self, slot: int) -> None:
        """Forget a sequence.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        """
        self.length(slot)
        for group in self._groups.values():
            group.cut(slot, 0)
        self._lengths[slot] = None

    def _in_use(self) -> list[int]:
        return [slot for slot, length in enumerate(self._lengths) if length is not None]

    # -- how many pages, and where

    def _counts(self, pages: int | Mapping[str, int] | None, memory: int | Mapping[str, int] | None) -> dict[str, int]:
        if pages is not None and memory is not None:
            raise CacheError("found pages= and memory=, expected one of both")
        if isinstance(pages, Mapping):
            return {**self._max_pages, **pages}
        max_pages = self._max_pages[FULL] if pages is None else pages
        if memory is None:
            return self._bounded(max_pages)
        count = next((count for count in range(max_pages, 0, -1) if self._fits(count, memory)), 0)
        if not count:
            raise CacheError(
                f"memory={memory}: expected room for a page of each layer, {self._bytes(self._bounded(1))}"
            )
        return self._bounded(count)

    def _bounded(self, count: int) -> dict[str, int]:
        """As many pages for both groups, if all slots together may need them."""
        return {name: max(1, min(count, pages)) for name, pages in self._max_pages.items()}

    def _fits(self, count: int, memory: int | Mapping[str, int]) -> bool:
        for device, size in self._bytes(self._bounded(count)).items():
            limit = memory.get(device) if isinstance(memory, Mapping) else memory
            if limit is not None and size > limit:
                return False
        return True

    def _bytes(self, counts: Mapping[str, int]) -> dict[str, int]:
        found: dict[str, int] = {}
        for layer in self.layers:
            size = counts[_table(layer)] * page_bytes(layer.kv_heads, layer.size, self.dtype)
            found[str(layer.device)] = found.get(str(layer.device), 0) + size
        return found

    def _shape(self, layer: CacheLayer, counts: Mapping[str, int]) -> tuple[int, int, int]:
        return page_shape(counts[_table(layer)], layer.kv_heads, layer.size, self.dtype)

    def _copy_page(self, name: str, source: int, target: int) -> None:
        """Copy a page of every layer of a group, each on its device."""
        assert self._arrays is not None, "a call has the pages"
        for layer, array in zip(self.layers, self._arrays, strict=True):
            if _table(layer) == name:
                size = page_bytes(layer.kv_heads, layer.size, self.dtype)
                shape = tuple(map(int, array.shape))[1:]
                views = [array._create_view(shape, self.dtype, page * size) for page in (source, target)]
                layer.device.sync()  # what the last call writes
                views[0].copyto(views[1])
                layer.device.sync()


def _table(layer: CacheLayer) -> str:
    return WINDOW if layer.window else FULL
