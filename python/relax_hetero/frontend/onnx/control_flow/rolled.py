"""Loops as private functions that call themselves last, which the executable runs as loops (`driver.link.tail_calls`).

A loop of `trips` at most, with a condition, one value handed on and one tensor of rows becomes::

    @R.function(private=True)
    def loop(trip, trips, condition, x, rows, captured, sizes):
        if trip < trips and condition:
            condition1, x1, row = <the body>
            rows1 = relax_hetero.append_row(rows, row, trip, trips)
            r = loop(trip + 1, trips, condition1, x1, rows1, captured, sizes)
        else:
            r = trip, x, rows
        return r

Values around the loop that the body reads are parameters behind its own, and symbolic sizes that it mentions come as a
shape. A value whose shape one trip changes has symbolic sizes in the function, and the function's result tells only its
rank: behind the call a `match_cast` names its sizes anew.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx

from ....errors import FrontendError
from ....target.element_types import bytes_for
from ....transform.ir.rewriting import typed
from ...symbolic_sizes import common_shape
from ..node_names import variable_name
from .loop import Loop
from .subgraphs import ImportedLoop, Importer, known_number, number, scalar, sizes_in, tensor_of

_NEW, _WRITE = "relax_hetero.new_rows", "relax_hetero.write_row"
_APPEND, _TAKE = "relax_hetero.append_row", "relax_hetero.taken_rows"
_FIRST_CAPACITY = 64 << 20
"""Bytes of rows up to which room is made for all trips of a loop that its body may end earlier."""

_ENDLESS = 2**63 - 1
_MAX_ATTEMPTS = 8
"""Times that a body is converted again because a trip changes a size that was taken for fixed."""


def roll(importer: Importer, loop: Loop) -> tuple[list[Any], list[relax.Expr]]:
    """The last state and the rows of a loop, by a function of the module.

    Raises
    ------
    FrontendError
        A trip changes the element type or the rank of a value, or the shape of one is unknown.
    """
    bb = importer.bb
    initial = [tensor_of(importer, value, loop.title) for value in loop.state]
    max_trips = _ENDLESS if loop.trips is None else loop.trips
    limit = number(max_trips, "int64") if isinstance(max_trips, int) else importer.as_tensor(max_trips)
    attempt = _Attempt(importer, loop, [_known_type(loop, i, value) for i, value in enumerate(initial)])
    for _ in range(_MAX_ATTEMPTS):
        made = attempt.function()
        if isinstance(made, _LoopFunction):
            break
        attempt = made
    else:
        raise FrontendError(f"{loop.title} changes the sizes of its values in more than {_MAX_ATTEMPTS} steps")
    importer.loops.append(made.loop)
    start = [] if not attempt.has_condition else [number(True, "bool") if loop.condition is None else loop.condition]
    rows = [
        _first_rows(importer, ty, limit, number) if has_room else _no_rows(importer, ty, made.outer)
        for number, (ty, has_room) in enumerate(zip(made.rows, made.is_preallocated, strict=True))
    ]
    sizes = [relax.ShapeExpr(made.loop.sizes)] if made.loop.sizes else []
    arguments = [number(0, "int64"), limit, *start, *initial, *rows, *made.loop.captured, *sizes]
    result = bb.emit(relax.Call(made.loop.gv, arguments))
    count, *left = (bb.emit(relax.TupleGetItem(result, i)) for i in range(1 + len(initial) + len(rows)))
    state = [
        _with_sizes(importer, value, ty.dtype, _sizes_of(ty, made.outer))
        for value, ty in zip(left, attempt.types, strict=False)
    ]
    length = _length(loop, attempt.has_condition)
    collected = [
        _with_sizes(importer, _used_rows(importer, value, count), ty.dtype, [length, *_sizes_of(ty, made.outer)])
        for value, ty in zip(left[len(initial) :], made.rows, strict=True)
    ]
    return state, collected


@dataclass
class _LoopFunction:
    """A function, and what is around the loop.

    Attributes
    ----------
    rows : list of relax.TensorType
        The types of the tensors that a trip collects.
    outer : set of tirx.Var
        The symbolic sizes in these that mean something around the loop.
    is_preallocated : list of bool
        Whether each is written to a tensor with room for all trips, not to one that grows.
    """

    loop: ImportedLoop
    rows: list[relax.TensorType]
    outer: set[tirx.Var]
    is_preallocated: list[bool]


@dataclass
class _Attempt:
    """A conversion of a loop's body that takes some sizes for fixed.

    Attributes
    ----------
    types : list of relax.TensorType
        Types of the state in each trip.
    has_condition : bool
        Whether trips compute if there is another one.
    open : set of tirx.Var
        Sizes in these types that each trip may change.
    """

    importer: Importer
    loop: Loop
    types: list[relax.TensorType]
    has_condition: bool = False
    open: set[tirx.Var] = field(default_factory=set)

    def function(self) -> _LoopFunction | _Attempt:
        """The function, or the attempt to make next where a trip does not give what it takes."""
        importer, loop, bb = self.importer, self.loop, self.importer.bb
        has_condition = self.has_condition or loop.condition is not None
        trip, limit = (relax.Var(name, relax.TensorType((), "int64")) for name in ("trip", "trips"))
        condition = [relax.Var("condition", relax.TensorType((), "bool"))] if has_condition else []
        state = [relax.Var(f"value{i}", ty) for i, ty in enumerate(self.types)]
        own = [trip, limit, *condition, *state]
        bb.begin_scope(own)
        try:
            with importer.trial() as keep:
                with importer.block(loop.info) as body:
                    found = loop.trip(trip, condition[0] if condition else number(True, "bool"), list(state))
                    again = [] if not has_condition else [self._condition(found.condition)]
                    values = [tensor_of(importer, value, loop.title) for value in found.state]
                    rows = [tensor_of(importer, value, loop.title) for value in found.rows]
                is_fixed = found.condition is None or known_number(found.condition) == 1
                types = [self._changed(i, value.ty) for i, value in enumerate(values)]
                if not (has_condition or is_fixed) or any(a is not b for a, b in zip(types, self.types, strict=True)):
                    return _Attempt(importer, loop, types, has_condition or not is_fixed, self.open)
                keep()
            self.has_condition = has_condition
            return self._written(own, body, [*again, *values], rows)
        finally:
            bb.end_scope()

    def _condition(self, value: Any) -> relax.Expr:
        if value is None:
            return number(True, "bool")
        return scalar(self.importer, value, "bool", f"{self.loop.title}: the condition of its body")

    def _changed(self, index: int, new: relax.TensorType) -> relax.TensorType:
        """The type of a value in each trip, if a trip makes this one of it: the very type where both agree."""
        old, what = self.types[index], _title(self.loop, index)
        if str(new.dtype) != str(old.dtype):
            raise FrontendError(f"{what} is of {old.dtype}, but its body gives {new.dtype}")
        if new.ndim != old.ndim:
            raise FrontendError(
                f"{what} has {old.ndim} dimensions, but its body gives "
                f"{new.ndim if new.ndim >= 0 else 'an unknown number of them'}; expected one rank in all trips"
            )
        dims = list(old.shape.values)
        shape = common_shape(old, new, f"value{index}")
        changing = [axis for axis, dim in enumerate(shape) if not (dim in self.open or _is_one(dim, dims[axis]))]
        if all(dims[axis] in self.open for axis in changing):
            return old
        self.open |= {shape[axis] for axis in changing}
        return relax.TensorType(
            [dims[i] if dims[i] in self.open else dim for i, dim in enumerate(shape)], old.dtype.dtype
        )

    def _written(
        self, own: list[relax.Var], body: list[relax.Binding], values: list[relax.Expr], rows: list[relax.Expr]
    ) -> _LoopFunction:
        importer, loop, bb = self.importer, self.loop, self.importer.bb
        trip, limit = own[:2]
        state = own[len(own) - len(self.types) :]
        kept = [relax.Var(f"rows{i}", _of_rank(row.ty, row.ty.ndim + 1)) for i, row in enumerate(rows)]
        known, captured = _captured(importer, body, [*values, *rows], {*own})
        ends = relax.Tuple([*values, *rows])
        inside = typed(relax.SeqExpr([relax.BindingBlock(body)], ends), ends.ty)
        whole = relax.Function([*own, *captured], inside, None, True)
        sizes = sorted(relax.analysis.free_symbolic_vars(whole), key=lambda size: str(size.name))
        params = [*own, *kept]
        passed = [*captured, *([relax.Var("sizes", relax.ShapeType(sizes))] if sizes else [])]
        around = sizes_in(var.ty for var in (*own, *captured)) - self.open
        inner = set(relax.analysis.defined_symbolic_vars(whole)) - around
        ret = tvm.ir.TupleType([trip.ty, *(_result_type(ty, inner) for ty in self.types), *(row.ty for row in kept)])
        outer = sizes_in(row.ty for row in rows) - inner
        has_room = [self._can_preallocate(row.ty, outer) for row in rows]
        name = _free_name(importer, f"loop_{variable_name(loop.info.name)}")
        gv = typed(tvm.ir.GlobalVar(name), relax.FuncType([var.ty for var in (*params, *passed)], ret, True))
        bb.begin_scope(kept)
        try:
            with importer.block(loop.info) as bindings:
                going = bb.emit(relax.op.less(trip, limit))
                if self.has_condition:
                    going = bb.emit(relax.op.logical_and(going, own[2]))
                with importer.block(loop.info) as then:
                    importer.adopt([*body], loop.info)
                    following = bb.emit(relax.op.add(trip, number(1, "int64")))
                    grown = [
                        self._appended(old, row, trip, limit, fits)
                        for old, row, fits in zip(kept, rows, has_room, strict=True)
                    ]
                    shape = [relax.ShapeExpr(sizes)] if sizes else []
                    last = bb.emit(relax.Call(gv, [following, limit, *values, *grown, *captured, *shape]))
                taken = relax.SeqExpr([relax.BindingBlock(then)], last)
                choice = bb.emit(relax.If(going, taken, relax.SeqExpr([], relax.Tuple([trip, *state, *kept]))))
        finally:
            bb.end_scope()
        made = ImportedLoop(gv, params, captured, sizes, [*known, *bindings], choice)
        return _LoopFunction(made, [row.ty for row in rows], outer, has_room)

    def _can_preallocate(self, row: relax.TensorType, outer: set[tirx.Var]) -> bool:
        """Return whether the trips' rows have a shape that is known before them, and not too many come to nothing."""
        if not isinstance(row.shape, relax.ShapeExpr) or not sizes_in([row]) <= outer or self.loop.trips is None:
            return False
        if not self.has_condition:
            return True
        sizes = [self.loop.trips, *(int(dim) if isinstance(dim, tirx.IntImm) else dim for dim in row.shape.values)]
        return (
            all(isinstance(size, int) for size in sizes) and bytes_for(tuple(sizes), str(row.dtype)) <= _FIRST_CAPACITY
        )

    def _appended(
        self, rows: relax.Var, row: relax.Expr, trip: relax.Var, limit: relax.Var, has_room: bool
    ) -> relax.Var:
        arguments = [rows, row, trip] if has_room else [rows, row, trip, limit]
        call = relax.op.call_pure_packed(_WRITE if has_room else _APPEND, *arguments, ty_args=[rows.ty])
        return self.importer.bb.emit(call)


def _free_name(importer: Importer, name: str) -> str:
    """The name, numbered where the node has loops before: a bidirectional recurrent layer has two."""
    taken = {str(loop.gv.name_hint) for loop in importer.loops}
    numbered = (f"{name}_{i}" for i in itertools.count(1))
    return next(free for free in itertools.chain([name], numbered) if free not in taken)


def _captured(
    importer: Importer, body: list[relax.Binding], results: list[relax.Expr], own: set[relax.Var]
) -> tuple[list[relax.Binding], list[relax.Var]]:
    """Values that a body reads from around the loop: bindings computed from constants, to repeat, and variables."""
    inside = relax.SeqExpr([relax.BindingBlock(body)], relax.Tuple(results))
    # Symbolic sizes, which kernels take as numbers, come as a shape.
    free = [v for v in relax.analysis.free_vars(inside) if v not in own and not isinstance(v.ty, tvm.ir.PrimType)]
    wanted: set[relax.Var] = set()
    pending = [var for var in free if var in importer.known]
    while pending:
        var = pending.pop()
        if var in importer.known and var not in wanted:
            wanted.add(var)
            pending.extend(relax.analysis.free_vars(importer.known[var].value))
    known = [binding for var, binding in importer.known.items() if var in wanted]
    return known, [var for var in free if var not in wanted]


def _known_type(loop: Loop, index: int, value: relax.Expr) -> relax.TensorType:
    if not isinstance(value.ty.shape, relax.ShapeExpr):
        raise FrontendError(f"{_title(loop, index)} has an unknown shape; give the shapes of inputs with shapes=")
    return relax.TensorType(value.ty.shape, value.ty.dtype.dtype)


def _title(loop: Loop, index: int) -> str:
    return f"{loop.title}: its value {loop.names[index]!r}"


def _is_one(a: Any, b: Any) -> bool:
    """Return whether two sizes are one expression, or one number."""
    return bool(a.same_as(b)) or (isinstance(a, tirx.IntImm) and isinstance(b, tirx.IntImm) and int(a) == int(b))


def _result_type(ty: relax.TensorType, inner: set[tirx.Var]) -> relax.TensorType:
    """A type by which a function gives a value: no sizes that only a trip knows."""
    return ty if not sizes_in([ty]) & inner else _of_rank(ty, ty.ndim)


def _of_rank(ty: relax.TensorType, rank: int) -> relax.TensorType:
    """The type of a tensor of which only the rank is known."""
    return relax.TensorType(None, ty.dtype.dtype, ndim=rank)


def _sizes_of(row: relax.TensorType, outer: set[tirx.Var]) -> list[Any]:
    """The sizes of a row around the loop."""
    dims = row.shape.values if isinstance(row.shape, relax.ShapeExpr) else [None] * row.ndim
    return [_outer_or_new(dim, outer, f"row_d{axis}") for axis, dim in enumerate(dims)]


def _outer_or_new(dim: Any, outer: set[tirx.Var], name: str) -> Any:
    if dim is not None and set(tirx.analysis.undefined_vars(tirx.Evaluate(dim), [])) <= outer:
        return dim
    return tirx.Var(name, "int64")


def _length(loop: Loop, has_condition: bool) -> Any:
    """How many rows there are: known at import, an expression of symbolic sizes, or found when the model runs."""
    is_size = isinstance(loop.trips, int) or tvm.ir.is_prim_expr(loop.trips)
    return loop.trips if is_size and not has_condition else tirx.Var("rows", "int64")


def _no_rows(importer: Importer, row: relax.TensorType, outer: set[tirx.Var]) -> relax.Expr:
    """Tensor that the first trip appends to: no rows, of the shape that is the result where there is no trip."""
    sizes = [0 if isinstance(size, tirx.Var) and size not in outer else size for size in _sizes_of(row, outer)]
    return importer.bb.emit(relax.op.zeros(relax.ShapeExpr([0, *sizes]), row.dtype.dtype))


def _first_rows(importer: Importer, row: relax.TensorType, limit: relax.Expr, index: int) -> relax.Expr:
    """A tensor that trips write their rows to."""
    arguments = [row.shape, tvm.ir.StringImm(str(row.dtype)), limit, relax.prim_value(index)]
    call = relax.op.call_pure_packed(_NEW, *arguments, ty_args=[_of_rank(row, row.ndim + 1)])
    return importer.bb.emit(call)


def _used_rows(importer: Importer, rows: relax.Expr, count: relax.Expr) -> relax.Expr:
    return importer.bb.emit(relax.op.call_pure_packed(_TAKE, rows, count, ty_args=[_of_rank(rows.ty, rows.ty.ndim)]))


def _with_sizes(importer: Importer, value: relax.Expr, dtype: Any, sizes: list[Any]) -> relax.Expr:
    """A value with names for its sizes, where its type does not tell them."""
    if isinstance(value.ty.shape, relax.ShapeExpr):
        return value
    return importer.bb.match_cast(value, relax.TensorType(sizes, dtype.dtype))
