"""The elements that one thread computes, its lanes: read in vectors where memory allows, computed one by one.

A vector is nothing but a copy between memory and registers, by words of 32 bits; what is computed is computed on single
numbers, of which the compiler keeps each in a register. So every type and every function works in every lane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer
from tvm_ffi import StructuralKey, WalkResult, structural_map, structural_walk

from ....target.element_types import bytes_of
from ...core.builder import Expr, int64, lane_indices
from ...loops.boxes import is_choice
from ...loops.flat import FlatBox, Loop, is_step, stride
from ...loops.stages import Load, loads, node_count, replaced, sources, variables, with_loads
from .arithmetic import NARROW, for_cuda

LANE = tirx.Var("lane", "int64")
"""Stands in expressions for the number of a lane."""

WORD = 4
"""Bytes of what vectors are copied by."""

_WIDEST = 16
"""Bytes that one instruction loads or stores."""

# An expression of more nodes is computed before it is used: TVM's simplifier and its walks are slow on large ones.
_MAX_NODES = 64

# A value of a choice of so many nodes is more than a number that is there.
_LONG = 4

Registers = Mapping[tirx.Buffer, tirx.Buffer]
"""Registers of a thread, one a lane, by the buffer that they hold values of."""


def register(dtype: str, lanes: int) -> tirx.Buffer:
    """Memory of a thread with an element for each lane; the compiler makes registers of it."""
    return T.alloc_buffer((lanes,), dtype, scope="local")


@dataclass(frozen=True)
class VectorRead:
    """Neighbouring elements that a thread reads at once.

    Attributes
    ----------
    stand_in : Buffer
        Buffer that expressions read in its place, at `LANE`.
    offset : PrimExpr
        Offset of the first element, an expression over the loops in which the vectorized one counts elements.
    condition : PrimExpr or None
        When they may be read.
    """

    stand_in: tirx.Buffer
    source: tirx.Buffer
    offset: Expr
    condition: Expr | None


@dataclass(frozen=True)
class LaneBox:
    """A box whose points along one loop are computed by some lanes of a thread.

    Attributes
    ----------
    box : FlatBox
        Its expressions read the stand-ins of `reads`.
    var : Var or None
        The loop that the lanes are along.
    lanes : int
    reads : tuple of VectorRead
    stores : frozenset of Buffer
        Which results are stored as vectors.
    """

    box: FlatBox
    var: tirx.Var | None
    lanes: int
    reads: tuple[VectorRead, ...] = ()
    stores: frozenset[tirx.Buffer] = field(default_factory=frozenset)


def widest(types: Sequence[str]) -> int:
    """How many lanes make vectors of 16 bytes of the widest type, and at least a word of the narrowest."""
    sizes: list[int] = [int(bytes_of(dtype)) for dtype in types]
    if not sizes or min(sizes) == 0:
        return 1
    return max(_WIDEST // max(sizes), WORD // min(sizes), 1)


def vectorized(box: FlatBox, loop: Loop, lanes: int, along_results: bool) -> LaneBox:
    """The box with what is contiguous along a loop read, and stored, in vectors.

    Parameters
    ----------
    lanes : int
        A vector begins at a multiple of them along the loop.
    along_results : bool
        Whether the loop is one of results, which are then stored in vectors too.
    """
    if lanes == 1:
        return LaneBox(box, loop.var, 1)
    guards = Guards(box.nest.computed)
    for value in box.nest.expressions():
        guards.visit(value, ())
    found: dict[Any, VectorRead] = {}
    units = {loop.var: tirx.Var(loop.var.name, "int64") * lanes}

    def change(load: Load) -> Expr:
        key = load_key(load)
        if key in found:
            return tirx.BufferLoad(found[key].stand_in, [LANE])
        conditions = guards.of.get(key)
        if conditions is None or not is_vector(load.indices[0], load.source, loop.var, units, lanes):
            return load
        if any(loop.var in variables(condition) for condition in conditions):
            return load
        stand_in = tirx.decl_buffer((lanes,), str(load.ty.dtype), scope="local")
        condition = tirx.all(*conditions) if conditions else None
        found[key] = VectorRead(stand_in, load.source, load.indices[0], condition)
        return tirx.BufferLoad(stand_in, [LANE])

    nest = replace(
        box.nest,
        sums=[replace(s, value=with_loads(s.value, change)) for s in box.nest.sums],
        steps=[(buffer, with_loads(value, change)) for buffer, value in box.nest.steps],
    )
    stores = [
        buffer
        for buffer, place in box.places.items()
        if along_results and is_vector(place, buffer, loop.var, units, lanes)
    ]
    return LaneBox(replace(box, nest=nest), loop.var, lanes, tuple(found.values()), frozenset(stores))


def is_vector(offset: Expr, buffer: tirx.Buffer, var: tirx.Var, units: Mapping[tirx.Var, Expr], lanes: int) -> bool:
    """Return whether lanes along a loop are neighbours in memory, whole words, and begin where vectors may.

    Parameters
    ----------
    units : mapping
        Expressions for the loop's variable where it counts vectors.
    """
    if bytes_of(str(buffer.dtype)) * lanes % WORD or not is_step(stride(offset, var), 1):
        return False
    start = Analyzer().modular_set(replaced(offset, units))
    return int(start.coeff) % lanes == 0 and int(start.base) % lanes == 0


def load_key(load: Load) -> Any:
    """Key that reads of the same element share."""
    return load.source, StructuralKey(load.indices[0])


class Guards:
    """Under which conditions each read of memory happens; of those that happen in any case, none."""

    def __init__(self, made: Sequence[tirx.Buffer]) -> None:
        self._made = made
        self.of: dict[Any, tuple[Expr, ...]] = {}

    def visit(self, expr: Expr, conditions: tuple[Expr, ...]) -> None:
        """Note where an expression loads elements of the buffers, given the conditions that hold there."""

        def on_load(load: Load) -> None:
            if any(load.source.same_as(buffer) for buffer in self._made):
                return
            key = load_key(load)
            known = self.of.get(key)
            if known is None:
                self.of[key] = conditions
            elif known and conditions and known != conditions:
                self.of[key] = (tirx.any(tirx.all(*known), tirx.all(*conditions)),)
            elif not conditions:
                self.of[key] = ()

        def on_call(call: tvm.ir.Call) -> WalkResult | None:
            if not is_choice(call):
                return None
            condition, then, otherwise = call.args
            self.visit(condition, conditions)
            self.visit(then, (*conditions, condition))
            self.visit(otherwise, (*conditions, tirx.Not(condition)))
            return WalkResult.SKIP

        structural_walk(expr, [(Load, on_load), (tvm.ir.Call, on_call)], order="pre")


def copy_words(
    target: tirx.Buffer, at: Expr, source: tirx.Buffer, start: Expr, count: int, to_memory: bool = False
) -> None:
    """Copy neighbouring elements between memory and registers, 16 bytes at once.

    Parameters
    ----------
    at, start : PrimExpr
        The first element of either, where a vector may begin.
    count : int
        Elements; whole words.
    """
    size = bytes_of(str(target.dtype))
    words = count * size // WORD
    per_access = next(n for n in (_WIDEST // WORD, 2, 1) if words % n == 0)
    into, out_of = _words(target), _words(source)
    for word in range(0, words, per_access):
        read = tirx.BufferLoad(out_of, [lane_indices(_word(start, size) + word, per_access)])
        T.buffer_store(into, read, [lane_indices(_word(at, size) + word, per_access)])


def _words(buffer: tirx.Buffer) -> tirx.Buffer:
    count = tirx.floordiv(buffer.shape[0] * bytes_of(str(buffer.dtype)), WORD)
    return T.decl_buffer((count,), "uint32", data=buffer.data, scope=buffer.scope())


def _word(element: Expr, size: int) -> Expr:
    element = int64(element)
    return element * (size // WORD) if size >= WORD else tirx.floordiv(element, WORD // size)


def read_vectors(
    box: LaneBox, position: Mapping[tirx.Var, Expr], expressions: Sequence[Expr]
) -> dict[tirx.Buffer, tirx.Buffer]:
    """Read the vectors that some expressions need at a position; returned by what stands for them there."""
    held: dict[tirx.Buffer, tirx.Buffer] = {}
    used = {source for value in expressions for source in sources(value)}
    for read in box.reads:
        if read.stand_in not in used:
            continue
        held[read.stand_in] = registers = register(str(read.source.dtype), box.lanes)
        offset = replaced(read.offset, position)
        if read.condition is None:
            copy_words(registers, int64(0), read.source, offset, box.lanes)
        else:
            with T.If(replaced(read.condition, position)), T.Then():
                copy_words(registers, int64(0), read.source, offset, box.lanes)
    return held


def reading(expr: Expr, held: Registers, inline: Mapping[tirx.Buffer, Expr]) -> Expr:
    """`expr` with what the thread made itself taken from registers, or computed where it is read."""

    def change(load: Load) -> Expr:
        if load.source in inline:
            return inline[load.source]
        return tirx.BufferLoad(held[load.source], [LANE]) if load.source in held else load

    return with_loads(expr, change)


def each_lane(lanes: int, write: Callable[[Expr], None]) -> None:
    """Write code for every lane."""
    if lanes == 1:
        write(int64(0))
        return
    with T.unroll(int64(lanes)) as lane:
        write(lane)


def set_lanes(registers: tirx.Buffer, lanes: int, value: Expr) -> None:
    """Compute an expression of `LANE` in every lane."""
    each_lane(lanes, lambda lane: T.buffer_store(registers, in_lane(value, lane), [lane]))


def in_lane(expr: Expr, lane: Expr) -> Expr:
    """An expression of `LANE` in one lane, as CUDA can compute it."""
    return for_cuda(replaced(expr, {LANE: lane}))


def compute_steps(
    box: FlatBox, lanes: int, position: Mapping[tirx.Var, Expr], held: Registers
) -> dict[tirx.Buffer, tirx.Buffer]:
    """Compute the steps of some points in registers, and return those of the results.

    Parameters
    ----------
    position : mapping
        Expressions for the variables of the loops; `LANE` in them is the lane.
    held : mapping
        Registers of reduced values and of vectors that were read.
    """
    here = box.at(position)
    steps = here.nest.steps
    known: dict[tirx.Buffer, tirx.Buffer] = dict(held)
    inline: dict[tirx.Buffer, Expr] = {}
    results = {buffer: known[buffer] for buffer in here.places if buffer in known}
    last = {buffer: n for n, (buffer, _) in enumerate(steps)}
    for n, (buffer, value) in enumerate(steps):
        value = _branchless(reading(value, known, inline), lanes)
        known.pop(buffer, None)
        inline.pop(buffer, None)
        uses = sum(source.same_as(buffer) for _, later in steps[n + 1 :] for source in sources(later))
        is_stored = buffer in here.places and last[buffer] == n
        if is_stored or uses > 1 or (uses and node_count(value) > _MAX_NODES):
            registers = register(str(buffer.dtype), lanes)
            set_lanes(registers, lanes, value)
            known[buffer] = registers
            if is_stored:
                results[buffer] = registers
        else:
            inline[buffer] = value
    return results


def _branchless(expr: Expr, lanes: int) -> Expr:
    """`expr` where choices by data are between registers that hold both values of 16 bits.

    Threads of a warp would choose differently and compute one value after the other, lane by lane. The functions of
    these types are short; a value that reads memory stays behind its condition.
    """

    def chosen(condition: Expr, *values: Expr) -> Expr | None:
        narrow = all(str(value.ty.dtype) in NARROW for value in values)
        if not narrow or not loads(condition) or max(map(node_count, values)) < _LONG:
            return None
        if any(str(source.scope()) != "local" for value in values for source in sources(value)):
            return None
        return tirx.Cast(str(values[0].ty.dtype), tirx.Select(condition, *map(held, values)))

    def held(value: Expr) -> Expr:
        # Rounded behind the choice, two at once: a conversion under a condition is as slow as an exponential.
        exact = for_cuda(value)
        is_wide = isinstance(exact, tirx.Cast) and str(exact.value.ty.dtype) == "float32"
        registers = register("float32", lanes)
        set_lanes(registers, lanes, exact.value if is_wide else tirx.Cast("float32", exact))
        return tirx.BufferLoad(registers, [LANE])

    def on_call(call: tvm.ir.Call) -> Expr:
        found = chosen(*call.args) if is_choice(call) else None
        return call if found is None else found

    def on_select(node: tirx.Select) -> Expr:
        found = chosen(node.condition, node.true_value, node.false_value)
        return node if found is None else found

    return structural_map(expr, [(tvm.ir.Call, on_call), (tirx.Select, on_select)])


def store_lanes(
    box: LaneBox,
    position: Mapping[tirx.Var, Expr],
    results: Registers,
    is_there: Callable[[Expr], Expr] | None = None,
) -> None:
    """Store what was computed: in vectors where a result is contiguous, else lane by lane.

    Parameters
    ----------
    is_there : callable, optional
        Whether there is a point for a lane.
    """
    for buffer, place in box.box.places.items():
        at = replaced(place, position)
        if buffer in box.stores:
            copy_words(buffer, replaced(at, {LANE: int64(0)}), results[buffer], int64(0), box.lanes)
            continue

        def write(lane: Expr, buffer: tirx.Buffer = buffer, at: Expr = at) -> None:
            value = tirx.BufferLoad(results[buffer], [lane])
            if is_there is None:
                T.buffer_store(buffer, value, [replaced(at, {LANE: lane})])
                return
            with T.If(is_there(lane)), T.Then():
                T.buffer_store(buffer, value, [replaced(at, {LANE: lane})])

        each_lane(box.lanes, write)


def element_types(box: FlatBox) -> list[str]:
    """Element types of everything that a box reads and stores."""
    made = box.nest.computed
    read = [load for value in box.nest.expressions() for load in loads(value) if load.source not in made]
    return sorted({str(load.ty.dtype) for load in read} | {str(buffer.dtype) for buffer in box.places})
