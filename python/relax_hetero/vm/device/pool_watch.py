"""A watch that keeps TVM's buffer pool from growing with every shape it meets.

The pool serves a request only from freed buffers of exactly that size (rounded to pages), and returns none to the
system. A model called with ever new extents would hold the buffers of all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi

from .tensors import address_ranges

# Pools are emptied after calls with this many different extents, or with this much in their arguments and results.
MANY_SHAPES = 64
MANY_BYTES = 64 << 20

clear_pools = tvm_ffi.get_global_func("vm.builtin.memory_manager.clear")
"""Returns to the system what no tensor uses, of all machines."""


@dataclass
class PoolWatch:
    """The extents that calls of one machine had since the pools were emptied."""

    shapes: set[Hashable] = field(default_factory=set)
    nbytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, extents: Hashable, values: Sequence[Any]) -> None:
        """A call has ended, with these extents of its symbolic dimensions and these arguments and results.

        Emptying frees buffers that nothing uses, of all machines: they allocate again, and are otherwise untouched.
        """
        if extents in self.shapes:
            return
        with self.lock:
            self._add(extents, values)

    def _add(self, extents: Hashable, values: Sequence[Any]) -> None:
        self.shapes.add(extents)
        self.nbytes += sum(end - begin for begin, end in address_ranges(values))
        if len(self.shapes) > MANY_SHAPES or self.nbytes > MANY_BYTES:
            clear_pools()
            self.shapes.clear()
            self.nbytes = 0
