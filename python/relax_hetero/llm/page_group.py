"""The pages of layers that see the same positions: which of them a sequence has, and who else has them.

Everything here is numbers; the memory is the cache's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..encoding.pages import PAGE

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
