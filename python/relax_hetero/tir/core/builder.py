"""Construction of PrimFuncs in Python: parameters, vectors and registers on top of TVM's IRBuilder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ...encoding.problem import Dim

CACHE_LINE_BYTES = 64  # bytes of a cache line, which a prefetch fetches
Expr = Any  # a PrimExpr, or a number where TVM takes one
Masks = Sequence[Expr | None]  # the masks of the existing lanes of some vectors; None: all lanes


_register_scope: ContextVar[str] = ContextVar("_register_scope", default="global")
"""Scope of registers in the kernel under construction: LLVM promotes stack slots to registers, nvcc local arrays."""


_stored: ContextVar[set[tirx.Var]] = ContextVar("_stored")
"""Buffers of the kernel under construction that `stored` made."""


class Function:
    """A PrimFunc under construction, as a context manager.

    `registers`: scope of `Registers` and of materialized values: "local" in GPU kernels, one for each thread.
    """

    def __init__(self, name: str, registers: str = "global") -> None:
        self._name, self._scope = name, registers
        self._symbols: dict[str, tirx.Var] = {}
        self.result: tirx.PrimFunc = None  # the function, after the context

    def __enter__(self) -> Function:
        self._tokens = _register_scope.set(self._scope), _stored.set(set())
        self._builder, self._frame = IRBuilder(), T.prim_func(s_tir=True)
        self._builder.__enter__()
        self._frame.__enter__()
        T.func_name(self._name)
        T.func_attr({"tirx.noalias": True, "global_symbol": self._name})
        return self

    def __exit__(self, *error: Any) -> None:
        self._frame.__exit__(*error)
        self._builder.__exit__(*error)
        _register_scope.reset(self._tokens[0])
        _stored.reset(self._tokens[1])
        if error[0] is None:
            self.result = self._builder.get()

    def symbol(self, name: str) -> tirx.Var:
        """The variable of a symbolic extent, int64; the same one for the same name."""
        return self._symbols.setdefault(name, tirx.Var(name, "int64"))

    def size(self, dim: Dim) -> Expr:
        """An extent of a problem, an int if static."""
        return self.symbol(dim) if isinstance(dim, str) else dim

    def extent(self, dim: Dim) -> Expr:
        """An extent of a problem as an int64 expression."""
        return self.symbol(dim) if isinstance(dim, str) else tirx.IntImm("int64", dim)

    def argument(self, name: str, shape: Sequence[Expr], dtype: str) -> Any:
        """The next parameter: a buffer of `shape`."""
        return T.arg(name, T.buffer(list(shape), dtype, buffer_name=name))

    @contextmanager
    def body(self) -> Iterator[None]:
        """The context of the statements: Relax passes require a block at the root of a PrimFunc."""
        with T.sblock("root"):
            # Declared empty, because TVM's detection of them can take ten seconds.
            T.reads()
            T.writes()
            yield


def flat(buffer: Any, extents: Sequence[Expr], dtype: str | None = None) -> Any:
    """The elements of a parameter as one dimension, optionally reinterpreted as `dtype` of at least the same width."""
    count: Expr = prod(extents, start=tirx.IntImm("int64", 1))
    stored_type, view_type = tvm.DataType(buffer.dtype), tvm.DataType(dtype or buffer.dtype)
    if stored_type.bits != view_type.bits:
        count = tirx.floordiv(count * stored_type.bits, view_type.bits)
    return T.decl_buffer((count,), dtype or buffer.dtype, data=buffer.data)


def scratch(size: int, dtype: str) -> Any:
    """Memory of a task, in one dimension, whose size TVM does not compute anew.

    For an allocation of which many branches and loops access parts, TVM unites all these parts, which takes seconds. It
    does not look at accesses of an alias, and keeps the elements that it sees accessed: both ends.
    """
    memory = T.alloc_buffer((size,), dtype, scope="global")
    for end in (0, size - 1):
        T.buffer_store(memory, tirx.const(0, dtype), [end])
    return T.decl_buffer((size,), dtype, data=memory.data)


def vector_type(dtype: str, lanes: int) -> str:
    """Name of the vector type, or of the scalar type for one lane."""
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def broadcast(value: Expr, lanes: int) -> Expr:
    """A scalar in every lane."""
    return value if lanes == 1 else T.broadcast(value, lanes)


def constant(value: float, dtype: str, lanes: int) -> Expr:
    """A number in every lane."""
    return broadcast(tirx.const(value, dtype), lanes)


def zeros(dtype: str, lanes: int) -> Expr:
    """A vector of zeros."""
    return constant(0, dtype, lanes)


def lane_indices(start: Expr, lanes: int, step: Expr = 1) -> Expr:
    """``start, start + step, ...``: the index of `lanes` elements."""
    return start if lanes == 1 else T.ramp(start, tirx.const(step, "int64") if isinstance(step, int) else step, lanes)


def lane_numbers(lanes: int) -> Expr:
    """0, 1, 2, ... in the lanes of an int32 vector."""
    return T.ramp(tirx.const(0, "int32"), 1, lanes)


def lane_mask(left: Expr, lanes: int) -> Expr | None:
    """The mask of a vector's existing lanes if `left` elements remain; None if all lanes statically exist."""
    if isinstance(left, int) and left >= lanes:
        return None
    if lanes == 1:
        return left > 0
    count = tirx.const(left, "int32") if isinstance(left, int) else tirx.Cast("int32", left)
    return lane_numbers(lanes) < broadcast(count, lanes)


def over_columns(first: Expr, count: int, extent: int, lanes: int, body: Callable[[Masks], None]) -> None:
    """Write code for `count` columns from `first` on, a multiple of `count`; those from `extent` on do not exist.

    `body` takes the masks of all vectors that have existing columns.
    """

    def masks(existing: int) -> Masks:
        return [lane_mask(existing - start, lanes) for start in range(0, existing, lanes)]

    tail = extent % count
    if tail == 0 or extent < count:
        body(masks(tail or count))
    else:
        either(first + count <= extent, lambda: body(masks(count)), lambda: body(masks(tail)))


class Registers:
    """Writable vector registers, such as accumulators.

    Each is a separate buffer. On CPUs, only allocations of scope "global" under 1,024 bytes become stack slots, which
    LLVM promotes to registers; "local" ones become calls to the runtime's workspace allocator.
    """

    def __init__(self, count: int, dtype: str, lanes: int) -> None:
        self._slots = [_allocate(dtype, lanes) for _ in range(count)]
        self._index = lane_indices(tirx.const(0, "int64"), lanes)

    def __getitem__(self, number: int) -> Expr:
        return self._slots[number][self._index]

    def __setitem__(self, number: int, value: Expr) -> None:
        T.buffer_store(self._slots[number], value, [self._index])

    def __len__(self) -> int:
        return len(self._slots)

    def buffer(self, number: int) -> Any:
        """The buffer of a register."""
        return self._slots[number]


def _allocate(dtype: str, lanes: int = 1) -> Any:
    # Without a layout, as in all functions with blocks; TVM would search the open frames for the function each time.
    return T.alloc_buffer((lanes,), dtype, scope=_register_scope.get(), layout=None)


def materialize(value: Expr) -> Expr:
    """An int64 that is computed once, and opaque to later passes.

    TVM's simplifier substitutes bound integers wherever they are used, and takes minutes for the nested minima of a
    kernel with symbolic extents. It does not look into memory; LLVM promotes this memory to a register.
    """
    if isinstance(value, int) or not isinstance(value, tirx.Expr) or isinstance(value, (tirx.IntImm, tirx.Var)):
        return value
    slot = _allocate("int64")
    T.buffer_store(slot, value, [tirx.const(0, "int64")])
    return T.bind(slot[tirx.const(0, "int64")])


def let(value: Expr) -> Expr:
    """A vector or scalar that is computed once.

    Only floats are bound. Integers are stored in memory that LLVM promotes to a register, for the reason given in
    `materialize`. (TVM's legalization of bfloat16 also fails on bound integers.)
    """
    return T.bind(value) if str(value.ty.dtype).startswith(("float32", "float64")) else stored(value)


def stored(value: Expr) -> Expr:
    """A value in memory that is written once; returned unchanged if it is in such memory already."""
    buffers = _stored.get(set())
    if isinstance(value, tvm.ir.TensorLoad) and value.source in buffers:
        return value
    dtype = value.ty.dtype
    register = Registers(1, str(dtype).partition("x")[0], dtype.lanes)
    register[0] = value
    buffers.add(register[0].source)
    return register[0]


def either(condition: Expr, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Write a branch, or one of its bodies if the condition is a bool."""
    if isinstance(condition, bool):
        (then if condition else otherwise)()
        return
    with T.If(_materialize_condition(condition)):
        with T.Then():
            then()
        with T.Else():
            otherwise()


@contextmanager
def when(condition: Expr) -> Iterator[None]:
    """The context of statements under `condition`, without a branch if it is True."""
    if isinstance(condition, bool):
        assert condition, "a condition that is statically false needs no branch"
        yield
        return
    with T.If(_materialize_condition(condition)), T.Then():
        yield


def _materialize_condition(condition: Expr) -> Expr:
    # TVM would intersect the condition with each region that the branch accesses, in a millisecond each.
    slot = _allocate("bool")
    T.buffer_store(slot, condition, [tirx.const(0, "int64")])
    return slot[tirx.const(0, "int64")]


def loop(extent: Expr, parallel: bool = False) -> Any:
    """A loop from 0; its context gives the int64 variable."""
    return T.parallel(int64(extent)) if parallel else T.serial(int64(extent))


def int64(value: Expr) -> Expr:
    """An int as an int64 expression; expressions are returned unchanged."""
    return tirx.IntImm("int64", value) if isinstance(value, int) else value


def as_type(value: Expr, dtype: str) -> Expr:
    """A value of a type: itself if it has it."""
    return value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value)


def plain_extent(extent: Expr) -> Any:
    """An int for a constant, other expressions unchanged."""
    return int(extent) if isinstance(extent, tirx.IntImm) else extent


def ceil_div(value: Expr, by: int) -> Expr:
    """``ceil(value / by)`` of nonnegative ints or expressions."""
    if by == 1:
        return value
    return (value + (by - 1)) // by if isinstance(value, int) else tirx.floordiv(value + (by - 1), by)


def minimum(left: Expr, right: Expr) -> Expr:
    """The minimum, folded where both are ints."""
    return min(left, right) if isinstance(left, int) and isinstance(right, int) else T.min(left, right)


def lane_of(vector: Expr, lane: int) -> Expr:
    """One lane of a vector."""
    return T.Shuffle([vector], [lane])


def over_lanes(vector: Expr, apply: Callable[[Expr, Expr], Expr], lanes: int) -> Expr:
    """A vector reduced over its lanes."""
    while lanes > 1:
        lanes //= 2
        low, high = list(range(lanes)), list(range(lanes, 2 * lanes))
        vector = let(vector)
        vector = apply(T.Shuffle([vector], low), T.Shuffle([vector], high))
    return vector


def load_lanes(buffer: Any, start: Expr, lanes: int, mask: Expr | None = None) -> Expr:
    """Elements from `start` on; masked lanes are zero."""
    index = lane_indices(start, lanes)
    if mask is None:
        return buffer[index]
    # Masked lanes are poison until the selection, which LLVM merges into the load.
    loaded, dtype = T.masked_load(vector_type(buffer.dtype, lanes), buffer, index, mask), str(buffer.dtype)
    if dtype != "bfloat16":
        return T.Select(mask, let(loaded), zeros(dtype, lanes))
    # Selected as bits: TVM's legalization would select between float32 values.
    bits = let(tirx.reinterpret(vector_type("uint16", lanes), loaded))
    return tirx.reinterpret(loaded.ty.dtype, T.Select(mask, bits, zeros("uint16", lanes)))


def store_lanes(buffer: Any, start: Expr, value: Expr, lanes: int, mask: Expr | None = None) -> None:
    """Write elements from `start` on; masked lanes are left."""
    index = lane_indices(start, lanes)
    if mask is None:
        T.buffer_store(buffer, value, [index])
    else:
        masked_store(buffer, index, value, mask)


def masked_store(buffer: Any, index: Expr, value: Expr, mask: Expr) -> None:
    """Write the masked lanes of `value`; the mask is true up to some lane, and false after it.

    A single lane of a narrow type is written as a scalar: LLVM 22 turns a truncating store of one lane with a known
    mask into a store of the type before truncation, which overwrites the neighbours.
    """
    if tvm.DataType(buffer.dtype).bits >= 32:
        T.evaluate(T.masked_store(buffer, value, index, mask))
        return
    with T.If(tirx.all(lane_of(mask, 0), tirx.Not(lane_of(mask, 1)))):
        with T.Then():
            T.buffer_store(buffer, lane_of(value, 0), [index.base])
        with T.Else():
            T.evaluate(T.masked_store(buffer, value, index, mask))


def prefetch(buffer: Any, index: Expr) -> None:
    """Prefetch the cache line of an element; an address after the end of storage is harmless."""
    read, locality, data = tirx.const(0, "int32"), tirx.const(3, "int32"), tirx.const(1, "int32")
    T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch", T.address_of(buffer[index]), read, locality, data))
