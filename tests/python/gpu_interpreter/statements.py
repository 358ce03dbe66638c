"""Compilation of statements to functions or, if threads may wait in them, to generators of waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from . import ptx
from .calls import name_of
from .dtypes import lanes_of, scalar_type
from .expressions import Expressions, both
from .faults import KernelFault
from .memory import ADDRESS_BITS, SHARED, Local, View, memory_of
from .names import Names
from .waiting import WAITING, concurrently

MOST_ROUNDS = 1_000_000
"""Iterations of a while loop after which it counts as endless."""


class Code(NamedTuple):
    """A compiled statement: `run(lanes, mask)` is a generator if it `waits`."""

    run: Callable[[Any, Any], Any]
    waits: bool = False


def _strides(shape: list[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


class Statements:
    """Compiles the statements of a kernel.

    Attributes
    ----------
    shared_bytes : int
        Shared memory of a block.
    """

    def __init__(self, names: Names) -> None:
        self.names, self.expressions = names, Expressions(names)
        self.shared_bytes = 0
        self._jumps = False

    def compiled(self, stmt: Any) -> Code:
        """The code of a statement."""
        method = getattr(self, f"_{type(stmt).__name__.lower()}", None)
        if method is None:
            raise NotImplementedError(f"statements of kind {type(stmt).__name__}")
        return method(stmt)

    def _located(self, stmt: Any, run: Callable[[Any, Any], None]) -> Code:
        def guarded(lanes: Any, mask: Any) -> None:
            try:
                run(lanes, mask)
            except KernelFault as fault:
                fault.locate(stmt)
                raise

        return Code(guarded)

    def _seqstmt(self, stmt: Any) -> Code:
        parts = [self.compiled(part) for part in stmt.seq]
        jumps = self._jumps
        if not any(part.waits for part in parts):
            runs = [part.run for part in parts]

            def plain(lanes: Any, mask: Any) -> None:
                for run in runs:
                    run(lanes, mask)
                    if jumps and lanes.jumped is not None:
                        mask = both(mask, ~lanes.jumped)
                        if not mask.any():
                            return

            return Code(plain)

        def waiting(lanes: Any, mask: Any) -> Iterator[Any]:
            for part in parts:
                if part.waits:
                    yield from part.run(lanes, mask)
                else:
                    part.run(lanes, mask)
                if jumps and lanes.jumped is not None:
                    mask = both(mask, ~lanes.jumped)
                    if not mask.any():
                        return

        return Code(waiting, True)

    def _bind(self, stmt: Any) -> Code:
        slot, value = self.names.slot(stmt.var), self.expressions.compiled(stmt.value)

        def run(lanes: Any, mask: Any) -> None:
            lanes.slots[slot] = value(lanes, mask)

        return self._located(stmt, run)

    def _bufferstore(self, stmt: Any) -> Code:
        self.names.written.add(self.names.slot(stmt.buffer))
        view, index = self.expressions.element(stmt.buffer, stmt.indices)
        value = self.expressions.compiled(stmt.value)

        def run(lanes: Any, mask: Any) -> None:
            place = view(lanes)
            stored = value(lanes, mask)
            place.memory.store(lanes, mask, place, index(lanes, mask), stored)

        return self._located(stmt, run)

    def _evaluate(self, stmt: Any) -> Code:
        name = name_of(stmt.value) if type(stmt.value).__name__ == "Call" else ""
        handler = ptx.waiting(stmt.value) if name.startswith("tirx.ptx.") else WAITING.get(name)
        if handler is not None:
            wait = handler(self.expressions, stmt.value)

            def waiting(lanes: Any, mask: Any) -> Iterator[Any]:
                try:
                    yield from wait(lanes, mask)
                except KernelFault as fault:
                    fault.locate(stmt)
                    raise

            return Code(waiting, True)
        if name in ("tirx.thread_return", "tirx.break_loop", "tirx.continue_loop", "tirx.ret"):
            return self._jump({"tirx.break_loop": "broken", "tirx.continue_loop": "continued"}.get(name, "returned"))
        value = self.expressions.compiled(stmt.value)
        return self._located(stmt, lambda lanes, mask: value(lanes, mask))

    def _return(self, stmt: Any) -> Code:
        return self._jump("returned")

    def _break(self, stmt: Any) -> Code:
        return self._jump("broken")

    def _continue(self, stmt: Any) -> Code:
        return self._jump("continued")

    def _jump(self, kind: str) -> Code:
        self._jumps = True

        def run(lanes: Any, mask: Any) -> None:
            leaving = np.ones(lanes.count, bool) if mask is None else mask
            lanes.leave(kind, leaving)

        return Code(run)

    def _for(self, stmt: Any) -> Code:
        slot = self.names.slot(stmt.loop_var)
        start, extent = self.expressions.compiled(stmt.min), self.expressions.compiled(stmt.extent)
        step = int(stmt.step) if stmt.step is not None else 1
        outer, self._jumps = self._jumps, False
        body = self.compiled(stmt.body)
        jumps, self._jumps = self._jumps, outer or self._jumps
        dtype = scalar_type(str(stmt.loop_var.ty.dtype)).type

        def rounds(lanes: Any, mask: Any) -> Iterator[Any]:
            first, count = start(lanes, mask), extent(lanes, mask)
            if np.ndim(first) == 0 and np.ndim(count) == 0:
                for i in range(0, int(count), step):
                    lanes.slots[slot] = dtype(int(first) + i)
                    yield mask
                return
            active = lanes.active(mask)
            counts = np.broadcast_to(count, (lanes.count,))
            for i in range(0, int(counts[active].max(initial=0)), step):
                lanes.slots[slot] = (np.asarray(first) + dtype(i)).astype(dtype)[()]
                yield mask if (counts > i).all() else both(mask, counts > i)

        return self._loop(rounds, body, jumps)

    def _while(self, stmt: Any) -> Code:
        condition = self.expressions.compiled(stmt.condition)
        outer, self._jumps = self._jumps, False
        body = self.compiled(stmt.body)
        jumps, self._jumps = self._jumps, outer or self._jumps

        def rounds(lanes: Any, mask: Any) -> Iterator[Any]:
            for _ in range(MOST_ROUNDS):
                holds = condition(lanes, mask)
                if np.ndim(holds) == 0:
                    if not holds:
                        return
                else:
                    mask = both(mask, holds)
                    if not mask.any():
                        return
                yield mask
                if jumps and lanes.jumped is not None:
                    mask = both(mask, ~lanes.jumped)
                    if not mask.any():
                        return
            raise KernelFault("a while loop does not end")

        return self._loop(rounds, body, jumps)

    def _loop(self, rounds: Callable[[Any, Any], Iterator[Any]], body: Code, jumps: bool) -> Code:
        def each(lanes: Any, mask: Any) -> Iterator[Any]:
            if not jumps:
                yield from rounds(lanes, mask)
                return
            saved = lanes.enter_loop()
            for round_mask in rounds(lanes, mask):
                current = round_mask
                if lanes.jumped is not None:
                    current = both(round_mask, ~lanes.jumped)
                    if not current.any():
                        break
                yield current
                lanes.next_round()
            lanes.leave_loop(saved)

        if not body.waits:

            def plain(lanes: Any, mask: Any) -> None:
                for current in each(lanes, mask):
                    body.run(lanes, current)

            return Code(plain)

        def waiting(lanes: Any, mask: Any) -> Iterator[Any]:
            for current in each(lanes, mask):
                yield from body.run(lanes, current)

        return Code(waiting, True)

    def _ifthenelse(self, stmt: Any) -> Code:
        condition = self.expressions.compiled(stmt.condition)
        then = self.compiled(stmt.then_case)
        otherwise = self.compiled(stmt.else_case) if stmt.else_case is not None else Code(lambda lanes, mask: None)

        def branches(lanes: Any, mask: Any) -> list[tuple[Code, Any]]:
            which = condition(lanes, mask)
            if np.ndim(which) == 0:
                return [(then if which else otherwise, mask)]
            yes, no = both(mask, which), both(mask, ~which)
            if not no.any():
                return [(then, mask)]
            if not yes.any():
                return [(otherwise, mask)]
            return [(then, yes), (otherwise, no)]

        def located(lanes: Any, mask: Any) -> list[tuple[Code, Any]]:
            try:
                return branches(lanes, mask)
            except KernelFault as fault:
                fault.locate(f"if {stmt.condition}")
                raise

        if not (then.waits or otherwise.waits):

            def plain(lanes: Any, mask: Any) -> None:
                for code, part in located(lanes, mask):
                    code.run(lanes, part)

            return Code(plain)

        def waiting(lanes: Any, mask: Any) -> Iterator[Any]:
            parts = []
            for code, part in located(lanes, mask):
                if code.waits:
                    parts.append(code.run(lanes, part))
                else:
                    code.run(lanes, part)
            if len(parts) == 1:
                yield from parts[0]
            else:
                yield from concurrently(parts)

        return Code(waiting, True)

    def _attrstmt(self, stmt: Any) -> Code:
        return self.compiled(stmt.body)

    def _assertstmt(self, stmt: Any) -> Code:
        condition = self.expressions.compiled(stmt.condition)

        def run(lanes: Any, mask: Any) -> None:
            if not np.all(condition(lanes, mask)):
                raise KernelFault("an assertion does not hold")

        return self._located(stmt, run)

    def _declbuffer(self, stmt: Any) -> Code:
        slot = self.names.slot(stmt.buffer)
        data = stmt.data
        shape = self._shape(stmt.buffer)
        dtype, width = scalar_type(str(stmt.buffer.ty.dtype)), lanes_of(str(stmt.buffer.ty.dtype))[1]
        offset = self.expressions.compiled(stmt.buffer.ty.elem_offset)
        strides = [self.expressions.compiled(one) for one in stmt.buffer.ty.strides]
        name = str(stmt.buffer.name)
        source = None
        if str(getattr(getattr(data, "op", None), "name", "")) == "tirx.buffer_data":
            source = self.names.slot(data.args[0])
            self.names.aliases[slot] = source
            pointer = None
        else:
            pointer = self.expressions.address(data)

        def run(lanes: Any, mask: Any) -> None:
            extents = [int(np.max(extent(lanes, mask))) for extent in shape]
            steps = tuple(int(np.max(one(lanes, mask))) for one in strides) or _strides(extents)
            count = int(np.prod(extents, dtype=np.int64)) * width
            if source is not None:
                of = lanes.slots[source]
                memory, start = of.memory, of.offset
            else:
                assert pointer is not None
                address = np.asarray(pointer(lanes, mask))
                address = np.unique(address[lanes.active(mask)] if address.ndim else address)
                if len(address) > 1:
                    raise NotImplementedError("a buffer declared at addresses that differ between threads")
                memory, start = memory_of(lanes, int(address[0]) >> ADDRESS_BITS), int(address[0]) % (1 << ADDRESS_BITS)
            start += int(np.max(offset(lanes, mask))) * dtype.itemsize
            if strides:
                count = (1 + sum((extent - 1) * step for extent, step in zip(extents, steps, strict=True))) * width
            # A view may declare more elements than exist: only an access beyond the memory is a fault.
            capacity = max(0, (memory.size - start) // dtype.itemsize)
            lanes.slots[slot] = View(memory, start, dtype, min(count, capacity), name, steps)

        return self._located(stmt, run)

    def _shape(self, buffer: Any) -> list[Callable[[Any, Any], Any]]:
        return [self.expressions.compiled(extent) for extent in buffer.ty.shape]

    def _allocbuffer(self, stmt: Any) -> Code:
        buffer = stmt.buffer
        slot, name, scope = self.names.slot(buffer), str(buffer.name), str(buffer.ty.storage_scope)
        dtype, width = scalar_type(str(buffer.ty.dtype)), lanes_of(str(buffer.ty.dtype))[1]
        extents = [int(extent) for extent in buffer.ty.shape]
        count = int(np.prod(extents, dtype=np.int64)) * width
        size = count * dtype.itemsize
        if scope.startswith("shared"):
            align = max(16, 1024 if scope == "shared.dyn" and not self.shared_bytes else 16)
            start = -(-self.shared_bytes // align) * align
            self.shared_bytes = start + size

            def shared(lanes: Any, mask: Any) -> None:
                lanes.slots[slot] = View(lanes.blocks.shared, start, dtype, count, name, _strides(extents))

            return self._located(stmt, shared)
        if scope not in ("local", "warp", ""):
            raise NotImplementedError(f"buffers of scope {scope} allocated in a kernel: {name}")

        def local(lanes: Any, mask: Any) -> None:
            if slot not in lanes.locals:
                lanes.locals[slot] = Local(SHARED + 1000 + slot, name, lanes.count, -(-size // 8) * 8)
            else:
                lanes.locals[slot].forget(mask)
            lanes.slots[slot] = View(lanes.locals[slot], 0, dtype, count, name, _strides(extents))

        return self._located(stmt, local)
