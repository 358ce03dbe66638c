"""Execution of a PrimFunc: its host code once, its kernels block after block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from tvm import tirx

from . import clusters, copies, fragments, mbarriers, tensor_cores, warps  # noqa: F401 (they register operators)
from .dtypes import lanes_of, scalar_type
from .faults import KernelFault
from .lanes import Blocks, Lanes
from .lowering import lowered
from .memory import NOTHING, SHARED, Addressed, View
from .names import Names
from .statements import Code, Statements, _strides
from .waiting import to_the_end

GROUP = 128
"""Threads of a warpgroup, which run together if warps of a block have different work."""

LANES = 2048
"""Approximate number of threads that run at a time if blocks are independent."""


def run(
    func: tirx.PrimFunc,
    *arguments: Any,
    arch: str = "sm_90a",
    style: str | None = None,
    strict: bool = True,
    leave_out: tuple[str, ...] = (),
) -> None:
    """Run the kernels of a PrimFunc, as TVM lowers it for CUDA, in place on numpy arrays.

    Parameters
    ----------
    func : tirx.PrimFunc
        A function whose loops are bound to ``blockIdx`` and ``threadIdx``.
    arguments : numpy.ndarray or int
        One per parameter; extents of arrays give symbolic extents their values.
    arch : str
        The architecture that it is lowered for.
    style : "s_tir", "tirx" or None
        The pipeline; None: by the function's form.
    strict : bool
        Whether reading memory that nobody wrote is a fault; else it gives NaN, or -1 in integers: for kernels that
        compute with such values and drop the results.
    leave_out : tuple of str
        Passes of TVM's pipeline that are left out, e.g. ``s_tir.ThreadSync``, which adds barriers.

    Raises
    ------
    KernelFault
        The kernel would compute wrong numbers, hang or crash on a GPU.
    NotImplementedError
        It uses something that the interpreter does not know.
    """
    low = lowered(func, arch, style, leave_out)
    with np.errstate(all="ignore"):
        _Run(low, arguments, strict).host(low.body)


class _Run:
    def __init__(self, func: tirx.PrimFunc, arguments: Any, strict: bool) -> None:
        self.strict = strict
        self.names = Names()
        self.statements = Statements(self.names)
        assert len(arguments) == len(func.params), f"{len(func.params)} arguments wanted, {len(arguments)} given"
        blocks = Blocks(0, 1, 1, 1)
        self.memories: dict[int, Any] = {}
        blocks.memories = self.memories
        self.lanes = Lanes(blocks, np.zeros(1, np.int32), np.zeros(1, np.int64), [None] * 100_000)
        self.arrays: list[tuple[int, Any, np.ndarray]] = []
        self.scratch: set[int] = set()
        self.registers: list[Any] = []
        for parameter, value in zip(func.params, arguments, strict=True):
            slot = self.names.slot(parameter)
            if not self.names.is_buffer(parameter):
                self.lanes.slots[slot] = scalar_type(str(parameter.ty.dtype)).type(value)
                continue
            self._bind(parameter, value)
            self.arrays.append((slot, parameter, value))

    def _bind(self, parameter: Any, array: np.ndarray) -> None:
        kind = parameter.ty
        dtype = scalar_type(str(kind.dtype))
        assert isinstance(array, np.ndarray) and array.dtype == dtype, f"{parameter.name}: wants {dtype}"
        assert array.flags.c_contiguous and array.ndim == len(kind.shape), f"{parameter.name}: shape {array.shape}"
        for extent, dim in zip(array.shape, kind.shape, strict=True):
            if type(dim).__name__ == "Var":
                slot = self.names.slot(dim)
                bound = self.lanes.slots[slot]
                assert bound is None or int(bound) == extent, f"{parameter.name}: {dim} is {bound}, not {extent}"
                self.lanes.slots[slot] = scalar_type(str(dim.ty.dtype)).type(extent)
            elif type(dim).__name__ == "IntImm":
                assert int(dim) == extent, f"{parameter.name}: shape {array.shape}"
        for dim, number in ((kind.elem_offset, 0), *zip(kind.strides, _strides(list(array.shape)), strict=False)):
            if type(dim).__name__ == "Var":
                self.lanes.slots[self.names.slot(dim)] = scalar_type(str(dim.ty.dtype)).type(number)

    def host(self, stmt: Any) -> None:
        """Execute a statement of the host code, and launch the kernels in it."""
        kind = type(stmt).__name__
        if kind == "SeqStmt":
            for part in stmt.seq:
                self.host(part)
        elif kind == "AttrStmt" and str(stmt.attr_key) == "thread_extent":
            self.launch(stmt)
        elif kind == "AttrStmt":
            self.host(stmt.body)
        elif kind == "IfThenElse" and _launches(stmt):
            if self.statements.expressions.compiled(stmt.condition)(self.lanes, None):
                self.host(stmt.then_case)
            elif stmt.else_case is not None:
                self.host(stmt.else_case)
        elif kind == "For" and _launches(stmt):
            slot = self.names.slot(stmt.loop_var)
            compiled = self.statements.expressions.compiled
            for i in range(int(compiled(stmt.extent)(self.lanes, None))):
                self.lanes.slots[slot] = compiled(stmt.min)(self.lanes, None) + i
                self.host(stmt.body)
        elif kind == "AllocBuffer" and str(stmt.buffer.ty.storage_scope) == "local":
            self.registers.append(stmt)
        elif kind == "AllocBuffer":
            shape = [int(self.statements.expressions.compiled(e)(self.lanes, None)) for e in stmt.buffer.ty.shape]
            name, width = lanes_of(str(stmt.buffer.ty.dtype))
            array = np.empty([*shape, width] if width > 1 else shape, scalar_type(name))
            array.reshape(-1).view(np.uint8)[...] = NOTHING
            self.arrays.append((self.names.slot(stmt.buffer), stmt.buffer, array))
            self.scratch.add(self.names.slot(stmt.buffer))
            self._views()
        else:
            self._views()
            code = self.statements.compiled(stmt)
            assert not code.waits
            code.run(self.lanes, None)

    def _views(self) -> None:
        """Give each array without a view one."""
        for slot, buffer, array in self.arrays:
            number = SHARED + 1 + slot
            if number not in self.memories:
                data = array.reshape(-1).view(np.uint8).reshape(1, -1)
                cell = array.dtype.itemsize
                self.memories[number] = Addressed(
                    number,
                    str(buffer.name),
                    data,
                    cell,
                    defined=slot not in self.scratch,
                    tracked=True,
                    shared=False,
                )
            steps = _strides(list(array.shape))
            self.lanes.slots[slot] = View(self.memories[number], 0, array.dtype, array.size, str(buffer.name), steps)

    def launch(self, stmt: Any) -> None:
        """Run a kernel: a nest of thread extents and the statements in it."""
        self._views()
        extents, variables = _thread_extents(stmt)
        compiled = self.statements.expressions.compiled
        for bound in _binds_before(stmt):
            try:
                self.lanes.slots[self.names.slot(bound.var)] = compiled(bound.value)(self.lanes, None)
            except (KernelFault, AttributeError):
                pass  # made of threads or of memory: no extent depends on it
        size = {tag: int(compiled(extent)(self.lanes, None)) for tag, extent in extents.items()}
        slots = {tag: [self.names.slot(var) for var in variables[tag]] for tag in extents}
        types = {self.names.slot(v): scalar_type(str(v.ty.dtype)) for tag in extents for v in variables[tag]}
        threads = [size.get(f"threadIdx.{axis}", 1) for axis in "xyz"]
        grid = [size.get(f"blockIdx.{axis}", 1) for axis in "xyz"]
        statements = Statements(self.names)
        # Arrays of threads may be declared before the launch that uses them.
        code = statements.compiled(tirx.SeqStmt([*self.registers, stmt]) if self.registers else stmt)
        for slot, _, array in self.arrays:
            # A launch begins when the one before has ended: its accesses are ordered.
            own = array.dtype.itemsize
            self.memories[SHARED + 1 + slot].begin(self.names.is_written(slot), self.names.cell_of(slot, own))
        per_block = int(np.prod(threads))
        total = int(np.prod(grid))
        cluster = int(np.prod([size.get(f"clusterCtaIdx.{axis}", 1) for axis in "xyz"]))
        if total % cluster or per_block > 1024:
            raise KernelFault(f"{total} blocks in clusters of {cluster}, {per_block} threads a block")
        roles = self.names.roles or cluster > 1
        together = cluster if roles else max(1, LANES // per_block)
        for first in range(0, total, together):
            count = min(together, total - first)
            blocks = Blocks(first, count, per_block, cluster)
            blocks.memories, blocks.strict = self.memories, self.strict
            data = np.full((count, -(-statements.shared_bytes // 16) * 16), NOTHING, np.uint8)
            blocks.shared = Addressed(
                SHARED,
                "shared memory",
                data,
                self.names.cell,
                defined=False,
                tracked=True,
                shared=True,
                size=statements.shared_bytes,
            )
            thread, instance = np.tile(np.arange(per_block), count), np.repeat(np.arange(count), per_block)
            width = GROUP if roles else len(thread)
            groups = [
                np.arange(start + part, min(start + part + width, start + per_block if roles else len(thread)))
                for start in (range(0, len(thread), per_block) if roles else (0,))
                for part in range(0, per_block if roles else 1, width)
            ]
            if roles:
                blocks.running[:] = len(groups) // count
            running = []
            for own in groups:
                lanes = Lanes(
                    blocks, thread[own].astype(np.int32), instance[own], list(self.lanes.slots[: len(self.names)])
                )
                number = first + lanes.instance
                places = {
                    "blockIdx.x": number % grid[0],
                    "blockIdx.y": number // grid[0] % grid[1],
                    "blockIdx.z": number // grid[0] // grid[1],
                    "clusterCtaIdx.x": number % cluster,
                    "threadIdx.x": lanes.thread % threads[0],
                    "threadIdx.y": lanes.thread // threads[0] % threads[1],
                    "threadIdx.z": lanes.thread // threads[0] // threads[1],
                }
                is_one_block = roles or count == 1
                for tag, targets in slots.items():
                    for slot in targets:
                        value = places[tag].astype(types[slot])
                        lanes.slots[slot] = value if tag.startswith("thread") or not is_one_block else value[0]
                running.append(_to_the_end(code, lanes))
            to_the_end(running)
            copies.check_copies(blocks.mbarriers.values())


def _to_the_end(code: Code, lanes: Lanes) -> Iterator[Any]:
    """Run a group of threads."""
    if code.waits:
        yield from code.run(lanes, None)
    else:
        code.run(lanes, None)
    copies.check_end(lanes)
    tensor_cores.check_end(lanes)
    for instance in np.unique(lanes.instance):
        lanes.blocks.running[instance] -= 1


def _launches(stmt: Any) -> bool:
    return any(str(part.attr_key) == "thread_extent" for part in _attributes(stmt))


def _attributes(stmt: Any) -> Iterator[Any]:
    kind = type(stmt).__name__
    if kind == "AttrStmt":
        yield stmt
        yield from _attributes(stmt.body)
    elif kind == "SeqStmt":
        for part in stmt.seq:
            yield from _attributes(part)
    elif kind in ("For", "While"):
        yield from _attributes(stmt.body)
    elif kind == "IfThenElse":
        yield from _attributes(stmt.then_case)
        if stmt.else_case is not None:
            yield from _attributes(stmt.else_case)


def _binds_before(stmt: Any) -> Iterator[Any]:
    """Variables that are bound between the thread extents of a nest."""
    kind = type(stmt).__name__
    if kind == "AttrStmt":
        yield from _binds_before(stmt.body)
    elif kind == "SeqStmt":
        for part in stmt.seq:
            if type(part).__name__ == "Bind":
                yield part
            else:
                yield from _binds_before(part)


def _thread_extents(stmt: Any) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    extents: dict[str, Any] = {}
    variables: dict[str, list[Any]] = {}
    for part in _attributes(stmt):
        if str(part.attr_key) == "thread_extent":
            tag = str(part.node.thread_tag)
            extents.setdefault(tag, part.value)
            variables.setdefault(tag, []).append(part.node.var)
    return extents, variables
