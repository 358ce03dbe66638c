"""Code of a point or a vector of neighbouring points: its width, its computation and its stores."""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T
from tvm_ffi import structural_map

from ...target.cpu_target import CpuTarget
from ..core.builder import Expr, lane_indices
from ..core.walks import replaced
from .boxes import choices_of, is_choice
from .flat import FlatBox, stride
from .nests import Nest
from .stages import Load, loads, node_count, sources, variables, with_loads

Slots = Mapping[tirx.Buffer, tirx.Buffer]
"""Registers by the buffer whose values they have: memory with an element for each lane."""

LANE = tirx.Var("lane", "int64")  # the variable of the lane number in expressions

# Functions that TVM's vectorizer scalarizes, but whose vectors the build lowers.
_VECTOR_FUNCTIONS = frozenset(f"tirx.{name}" for name in "erf log1p asin acos atan asinh acosh atanh nearbyint".split())
# An expression of more nodes is computed before its use. The time of TVM's simplifier doubles with each maximum of a
# minimum inside of another, and its walks recurse.
_MAX_NODES = 64
_MAX_SHUFFLED_STRIDE = 4  # reads with a stride up to this are contiguous reads and a shuffle


def slot(dtype: str, lanes: int) -> tirx.Buffer:
    """Memory for a vector, which LLVM makes a register."""
    return T.alloc_buffer((lanes,), dtype, scope="global")


def store(buffer: tirx.Buffer, value: Expr, index: Expr, lanes: int) -> None:
    """Write a vector; `value` and `index` are expressions of `LANE`."""
    if lanes == 1:
        lane_zero = {LANE: tirx.IntImm("int64", 0)}
        T.buffer_store(buffer, replaced(value, lane_zero), [replaced(index, lane_zero)])
        return
    value = _compute_vectors(value, lanes)
    with T.vectorized(tirx.IntImm("int64", lanes)) as lane:
        T.buffer_store(buffer, replaced(value, {LANE: lane}), [replaced(index, {LANE: lane})])


def _compute_vectors(value: Expr, lanes: int) -> Expr:
    """`value` with the parts that the vectorizer would scalarize computed before, as whole vectors."""
    chooses = False

    def on_call(call: tvm.ir.Call) -> Expr:
        nonlocal chooses
        if call.op.name == "tirx.rsqrt":
            return tirx.const(1, call.ty.dtype) / tirx.sqrt(call.args[0])
        chooses = chooses or is_choice(call)
        return call

    value = structural_map(value, (tvm.ir.Call, on_call))
    if chooses:
        return value  # the value that is not selected must not be read

    def compute_vector(call: tvm.ir.Call) -> Expr:
        if call.op.name not in _VECTOR_FUNCTIONS or call.ty.dtype not in ("float32", "float16"):
            return call
        before, after = slot(call.ty.dtype, lanes), slot(call.ty.dtype, lanes)
        store(before, call.args[0], LANE, lanes)
        every = lane_indices(tirx.IntImm("int64", 0), lanes)
        vector = tirx.BufferLoad(before, [every])
        T.buffer_store(after, tvm.ir.Call(call.op, [vector], ret_ty=vector.ty), [every])
        return tirx.BufferLoad(after, [LANE])

    return structural_map(with_loads(value, lambda load: _shuffle_reads(load, lanes)), (tvm.ir.Call, compute_vector))


def _shuffle_reads(load: Load, lanes: int) -> Expr:
    """A strided or reversed read as contiguous reads and a shuffle."""
    step = stride(load.indices[0], LANE)
    if step is None or not isinstance(step, int) or not (step == -1 or 2 <= step <= _MAX_SHUFFLED_STRIDE) or lanes < 4:
        return load
    first = replaced(load.indices[0], {LANE: tirx.IntImm("int64", lanes - 1 if step < 0 else 0)})
    last = abs(step) * (lanes - 1)  # offset of the last element that is read
    starts = [min(number * lanes, last - lanes + 1) for number in range(abs(step))]
    order = []
    for lane in range(lanes):
        at = step * lane if step > 0 else last - lane
        number = next(n for n, start in enumerate(starts) if start <= at < start + lanes)
        order.append(number * lanes + at - starts[number])
    vectors = [tirx.BufferLoad(load.source, [lane_indices(first + start, lanes)]) for start in starts]
    result = slot(str(load.ty.dtype), lanes)
    T.buffer_store(result, tirx.Shuffle(vectors, order), [lane_indices(tirx.IntImm("int64", 0), lanes)])
    return tirx.BufferLoad(result, [LANE])


def reading(expr: Expr, registers: Slots, inline: Mapping[tirx.Buffer, Expr]) -> Expr:
    """`expr` with reads of the nest's own values from registers, or inlined."""
    if not registers and not inline:
        return expr

    def change(load: Load) -> Expr:
        if load.source in inline:
            return inline[load.source]
        return _load_register(load.source, registers[load.source]) if load.source in registers else load

    return with_loads(expr, change)


def _load_register(buffer: tirx.Buffer, register: tirx.Buffer) -> Expr:
    """A buffer's value from its register, in which truth values are bytes."""
    value = tirx.BufferLoad(register, [LANE])
    return value != tirx.const(0, register.dtype) if register.dtype != buffer.dtype else value


def write_point(
    box: FlatBox,
    var: tirx.Var | None,  # variable along which the points lie; None for a single point
    start: Expr,  # its value at the first point
    lanes: int,
    sums: Slots,  # registers of the reduced values
) -> None:
    """Compute the steps of `lanes` neighbouring points and store them."""
    steps = box.nest.steps
    here = box.at({var: start + LANE}) if var is not None else box
    registers: dict[tirx.Buffer, tirx.Buffer] = dict(sums)
    inline: dict[tirx.Buffer, Expr] = {}
    last = {buffer: n for n, (buffer, _) in enumerate(steps)}
    for buffer, register in sums.items():
        if buffer in here.places and buffer not in last:
            store(buffer, tirx.BufferLoad(register, [LANE]), here.places[buffer], lanes)
    for n, (buffer, value) in enumerate(here.nest.steps):
        value = reading(value, registers, inline)
        registers.pop(buffer, None)
        inline.pop(buffer, None)
        uses = sum(source.same_as(buffer) for _, later in steps[n + 1 :] for source in sources(later))
        is_stored = buffer in here.places and last[buffer] == n
        is_large = uses > 0 and node_count(value) > _MAX_NODES
        if is_large or (uses + is_stored > 1 and buffer.dtype != "bool"):
            registers[buffer] = slot("uint8" if buffer.dtype == "bool" else buffer.dtype, lanes)
            store(registers[buffer], value.astype(registers[buffer].dtype), LANE, lanes)
            value = _load_register(buffer, registers[buffer])
        else:
            inline[buffer] = value
        if is_stored:
            store(buffer, value, here.places[buffer], lanes)


def lanes_of(nest: Nest, cpu: CpuTarget) -> int:
    """Lanes of a vector register of the widest type that is read, computed or stored."""
    types = {str(load.ty.dtype) for value in nest.expressions() for load in loads(value)}
    types |= {buffer.dtype for buffer in nest.computed}
    types -= {"bool"}
    return min((cpu.lanes(dtype) for dtype in types), default=cpu.lanes("int8"))


def varies_inside(box: FlatBox, var: tirx.Var) -> bool:
    """Return whether the condition of an if_then_else depends on a variable, so that vectors cannot lie along it."""
    return any(var in variables(c) for value in box.nest.expressions() for c in choices_of(value))


def chooses(value: tirx.Expr) -> bool:
    """Return whether an expression contains an if_then_else."""
    return bool(choices_of(value))
