"""Elements ("lanes") of one thread: loaded and stored in vectors where aligned, computed one by one.

Vectors exist only in copies between memory and registers, as 32-bit words. Arithmetic is scalar, one register per lane,
so every type and every function is supported.
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
from ....target.gpu_target import VECTOR_BYTES
from ...core.builder import Expr, int64, lane_indices
from ...core.walks import replaced
from ...loops.boxes import is_choice
from ...loops.flat import FlatBox, Loop, is_step, stride
from ...loops.stages import Load, loads, node_count, sources, variables, with_loads
from ..core.dialect import has_ptx
from .arithmetic import NARROW, for_cuda

LANE = tirx.Var("lane", "int64")  # variable that stands for the lane number in expressions
WORD_BYTES = 4  # bytes of a word, the unit of vector copies

_MAX_NODES = 64  # larger expressions are stored in registers before use: TVM's simplifier and visitors are slow on them

_MIN_BRANCH_NODES = 4  # a choice between expressions of fewer nodes is left to the compiler: its branches are cheap

Registers = Mapping[tirx.Buffer, tirx.Buffer]
"""Registers of a thread, one per lane, by the buffer whose values they hold."""


def register(dtype: str, lanes: int) -> tirx.Buffer:
    """Allocate thread-local memory with an element per lane, which the compiler keeps in registers."""
    return T.alloc_buffer((lanes,), dtype, scope="local")


@dataclass(frozen=True)
class VectorRead:
    """Neighbouring elements that a thread loads as a vector."""

    stand_in: tirx.Buffer  # buffer that expressions read in its place, at `LANE`
    source: tirx.Buffer
    offset: Expr  # offset of the first element in terms of the loops; the vectorized loop counts elements
    condition: Expr | None  # predicate of the load


@dataclass(frozen=True)
class LaneBox:
    """A box in which the lanes of a thread compute neighbouring points along one loop."""

    box: FlatBox  # its expressions read the stand-ins of `reads`
    var: tirx.Var | None  # the loop whose neighbouring iterations are lanes
    lanes: int
    reads: tuple[VectorRead, ...] = ()
    stores: frozenset[tirx.Buffer] = field(default_factory=frozenset)  # results that are stored as vectors


def max_lanes(types: Sequence[str]) -> int:
    """Number of lanes that fills 16 bytes of the widest type, and at least a word of the narrowest."""
    sizes: list[int] = [int(bytes_of(dtype)) for dtype in types]
    return 1 if not sizes or min(sizes) == 0 else max(VECTOR_BYTES // max(sizes), WORD_BYTES // min(sizes), 1)


def vectorized(box: FlatBox, loop: Loop, lanes: int, along_results: bool) -> LaneBox:
    """Vectorize the accesses of a box that are contiguous along a loop.

    `lanes`: elements of a vector, which begins at a multiple of `lanes` along the loop. `along_results`: whether the
    loop is spatial: results are then stored in vectors too.
    """
    if lanes == 1:
        return LaneBox(box, loop.var, 1)
    guards = Guards(box.nest.computed)
    for value in box.nest.expressions():
        guards.visit(value, ())
    reads: dict[Any, VectorRead] = {}
    units = {loop.var: tirx.Var(loop.var.name, "int64") * lanes}

    def vectorize(load: Load) -> Expr:
        key = load_key(load)
        if key in reads:
            return tirx.BufferLoad(reads[key].stand_in, [LANE])
        conditions = guards.conditions.get(key)
        if conditions is None or not is_vector(load.indices[0], load.source, loop.var, units, lanes):
            return load
        if any(loop.var in variables(condition) for condition in conditions):
            return load
        stand_in = tirx.decl_buffer((lanes,), str(load.ty.dtype), scope="local")
        condition = tirx.all(*conditions) if conditions else None
        reads[key] = VectorRead(stand_in, load.source, load.indices[0], condition)
        return tirx.BufferLoad(stand_in, [LANE])

    nest = replace(
        box.nest,
        sums=[replace(s, value=with_loads(s.value, vectorize)) for s in box.nest.sums],
        steps=[(buffer, with_loads(value, vectorize)) for buffer, value in box.nest.steps],
    )
    stores = [
        buffer
        for buffer, offset in box.places.items()
        if along_results and is_vector(offset, buffer, loop.var, units, lanes)
    ]
    return LaneBox(replace(box, nest=nest), loop.var, lanes, tuple(reads.values()), frozenset(stores))


def is_vector(offset: Expr, buffer: tirx.Buffer, var: tirx.Var, units: Mapping[tirx.Var, Expr], lanes: int) -> bool:
    """Return whether lanes along a loop are contiguous in memory, whole words and aligned to a vector.

    `units`: the loop's variable as a multiple of the number of vectors.
    """
    if bytes_of(str(buffer.dtype)) * lanes % WORD_BYTES or not is_step(stride(offset, var), 1):
        return False
    start = Analyzer().modular_set(replaced(offset, units))
    return int(start.coeff) % lanes == 0 and int(start.base) % lanes == 0


def load_key(load: Load) -> Any:
    """Key that loads of the same element share."""
    return load.source, StructuralKey(load.indices[0])


class Guards:
    """Predicates of the loads in expressions: `conditions` maps the key of each to them, empty if unconditional."""

    def __init__(self, computed: Sequence[tirx.Buffer]) -> None:
        self._computed = computed
        self.conditions: dict[Any, tuple[Expr, ...]] = {}

    def visit(self, expr: Expr, conditions: tuple[Expr, ...]) -> None:
        """Record the loads in an expression that is evaluated under some conditions."""

        def on_load(load: Load) -> None:
            if any(load.source.same_as(buffer) for buffer in self._computed):
                return
            key = load_key(load)
            recorded = self.conditions.get(key)
            if recorded is None:
                self.conditions[key] = conditions
            elif recorded and conditions and recorded != conditions:
                self.conditions[key] = (tirx.any(tirx.all(*recorded), tirx.all(*conditions)),)
            elif not conditions:
                self.conditions[key] = ()

        def on_call(call: tvm.ir.Call) -> WalkResult | None:
            if not is_choice(call):
                return None
            condition, then, otherwise = call.args
            self.visit(condition, conditions)
            self.visit(then, (*conditions, condition))
            self.visit(otherwise, (*conditions, tirx.Not(condition)))
            return WalkResult.SKIP

        structural_walk(expr, [(Load, on_load), (tvm.ir.Call, on_call)], order="pre")


def copy_words(target: tirx.Buffer, offset: Expr, source: tirx.Buffer, start: Expr, count: int) -> None:
    """Copy neighbouring elements between memory and registers, up to 16 bytes at a time.

    `offset`, `start`: first element in the target and in the source, aligned to a vector. `count`: number of elements,
    whole words.
    """
    dtype = str(target.dtype)
    size = bytes_of(dtype)
    if not has_ptx():
        lanes = 1 if dtype == "bool" else min(count, VECTOR_BYTES // size)
        for element in range(0, count, lanes):
            read = tirx.BufferLoad(source, [lane_indices(int64(start) + element, lanes)])
            T.buffer_store(target, read, [lane_indices(int64(offset) + element, lanes)])
        return
    words = count * size // WORD_BYTES
    per_access = next(n for n in (VECTOR_BYTES // WORD_BYTES, 2, 1) if words % n == 0)
    into, out_of = _words(target), _words(source)
    for word in range(0, words, per_access):
        read = tirx.BufferLoad(out_of, [lane_indices(_word(start, size) + word, per_access)])
        T.buffer_store(into, read, [lane_indices(_word(offset, size) + word, per_access)])


def _words(buffer: tirx.Buffer) -> tirx.Buffer:
    count = tirx.floordiv(buffer.shape[0] * bytes_of(str(buffer.dtype)), WORD_BYTES)
    return T.decl_buffer((count,), "uint32", data=buffer.data, scope=buffer.scope())


def _word(element: Expr, size: int) -> Expr:
    element = int64(element)
    return element * (size // WORD_BYTES) if size >= WORD_BYTES else tirx.floordiv(element, WORD_BYTES // size)


def read_vectors(
    box: LaneBox, position: Mapping[tirx.Var, Expr], expressions: Sequence[Expr]
) -> dict[tirx.Buffer, tirx.Buffer]:
    """Load the vectors that some expressions need at a position, and return their registers by stand-in."""
    vectors: dict[tirx.Buffer, tirx.Buffer] = {}
    used = {source for value in expressions for source in sources(value)}
    for read in box.reads:
        if read.stand_in not in used:
            continue
        vectors[read.stand_in] = registers = register(str(read.source.dtype), box.lanes)
        offset = replaced(read.offset, position)
        if read.condition is None:
            copy_words(registers, int64(0), read.source, offset, box.lanes)
        else:
            with T.If(replaced(read.condition, position)), T.Then():
                copy_words(registers, int64(0), read.source, offset, box.lanes)
    return vectors


def from_registers(expr: Expr, registers: Registers, inline: Mapping[tirx.Buffer, Expr]) -> Expr:
    """Replace loads of values that the thread computed by registers or by their inlined expressions."""

    def substitute(load: Load) -> Expr:
        if load.source in inline:
            return inline[load.source]
        return tirx.BufferLoad(registers[load.source], [LANE]) if load.source in registers else load

    return with_loads(expr, substitute)


def each_lane(lanes: int, write: Callable[[Expr], None]) -> None:
    """Write code for each lane."""
    if lanes == 1:
        write(int64(0))
        return
    with T.unroll(int64(lanes)) as lane:
        write(lane)


def set_lanes(registers: tirx.Buffer, lanes: int, value: Expr) -> None:
    """Store an expression of `LANE` for each lane."""
    each_lane(lanes, lambda lane: T.buffer_store(registers, in_lane(value, lane), [lane]))


def in_lane(expr: Expr, lane: Expr) -> Expr:
    """Substitute a lane number for `LANE`, and rewrite the expression for CUDA."""
    return for_cuda(replaced(expr, {LANE: lane}))


def compute_steps(
    box: FlatBox, lanes: int, position: Mapping[tirx.Var, Expr], inputs: Registers
) -> dict[tirx.Buffer, tirx.Buffer]:
    """Compute the steps of a box in registers, and return the registers of the results.

    `position`: values of the loop variables, in terms of `LANE`. `inputs`: registers of reduced values and of loaded
    vectors.
    """
    placed = box.at(position)
    steps = placed.nest.steps
    registers_of: dict[tirx.Buffer, tirx.Buffer] = dict(inputs)
    inline: dict[tirx.Buffer, Expr] = {}
    results = {buffer: registers_of[buffer] for buffer in placed.places if buffer in registers_of}
    last = {buffer: n for n, (buffer, _) in enumerate(steps)}
    for n, (buffer, value) in enumerate(steps):
        value = _branchless(from_registers(value, registers_of, inline), lanes)
        registers_of.pop(buffer, None)
        inline.pop(buffer, None)
        uses = sum(source.same_as(buffer) for _, later in steps[n + 1 :] for source in sources(later))
        is_stored = buffer in placed.places and last[buffer] == n
        if is_stored or uses > 1 or (uses and node_count(value) > _MAX_NODES):
            registers = register(str(buffer.dtype), lanes)
            set_lanes(registers, lanes, value)
            registers_of[buffer] = registers
            if is_stored:
                results[buffer] = registers
        else:
            inline[buffer] = value
    return results


def _branchless(expr: Expr, lanes: int) -> Expr:
    """Compute both branches of data-dependent choices between 16-bit values, and select from registers.

    Divergent threads of a warp would execute both branches anyway, lane by lane, and functions of these types are
    short. A branch that loads from memory stays predicated.
    """

    def selected(condition: Expr, *values: Expr) -> Expr | None:
        narrow = all(str(value.ty.dtype) in NARROW for value in values)
        if not narrow or not loads(condition) or max(map(node_count, values)) < _MIN_BRANCH_NODES:
            return None
        if any(str(source.scope()) != "local" for value in values for source in sources(value)):
            return None
        return tirx.Cast(str(values[0].ty.dtype), tirx.Select(condition, *map(computed, values)))

    def computed(value: Expr) -> Expr:
        # Rounded after the selection, in pairs: a predicated conversion is as slow as an exponential.
        exact = for_cuda(value)
        is_wide = isinstance(exact, tirx.Cast) and str(exact.value.ty.dtype) == "float32"
        registers = register("float32", lanes)
        set_lanes(registers, lanes, exact.value if is_wide else tirx.Cast("float32", exact))
        return tirx.BufferLoad(registers, [LANE])

    def on_call(call: tvm.ir.Call) -> Expr:
        value = selected(*call.args) if is_choice(call) else None
        return call if value is None else value

    def on_select(node: tirx.Select) -> Expr:
        value = selected(node.condition, node.true_value, node.false_value)
        return node if value is None else value

    return structural_map(expr, [(tvm.ir.Call, on_call), (tirx.Select, on_select)])


def store_lanes(
    box: LaneBox, position: Mapping[tirx.Var, Expr], results: Registers, exists: Callable[[Expr], Expr] | None = None
) -> None:
    """Store results: as vectors where they are contiguous, else lane by lane. `exists`: predicate of a lane."""
    for buffer, first_offset in box.box.places.items():
        offset = replaced(first_offset, position)
        if buffer in box.stores:
            copy_words(buffer, replaced(offset, {LANE: int64(0)}), results[buffer], int64(0), box.lanes)
            continue

        def write(lane: Expr, buffer: tirx.Buffer = buffer, offset: Expr = offset) -> None:
            value = tirx.BufferLoad(results[buffer], [lane])
            if exists is None:
                T.buffer_store(buffer, value, [replaced(offset, {LANE: lane})])
                return
            with T.If(exists(lane)), T.Then():
                T.buffer_store(buffer, value, [replaced(offset, {LANE: lane})])

        each_lane(box.lanes, write)


def element_types(box: FlatBox, along: tirx.Var | None = None) -> list[str]:
    """Element types of all stores of a box, and of its loads, or of those that depend on loop `along`."""
    computed = box.nest.computed
    external = [load for value in box.nest.expressions() for load in loads(value) if load.source not in computed]
    if along is not None:
        external = [load for load in external if any(along in variables(index) for index in load.indices)]
    return sorted({str(load.ty.dtype) for load in external} | {str(buffer.dtype) for buffer in box.places})
