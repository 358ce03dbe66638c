"""`Loop` and `Scan` as one kind of loop: values that trips hand on, and rows that trips collect.

A loop of known trips and few nodes is unrolled (`unrolled`), any other becomes a function (`rolled`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import onnx
import tvm
from tvm import relax, te, tirx

from ....errors import FrontendError
from ....target.element_types import bytes_for
from ....transform.ir.rewriting import typed
from ...import_limits import budget
from ...joined_sizes import analyzer_for
from ...ops.node import Node
from ...symbolic_sizes import common_shape
from ..check_model import STANDARD_DOMAINS
from ..node_names import NodeInfo, variable_name
from .loop import Loop, Trip
from .open_sequences import is_sequence, with_rows_for_sequences
from .subgraphs import (
    ImportedLoop,
    Importer,
    OnnxImporter,
    attribute_of,
    inner_graph,
    known_number,
    number,
    scalar,
    sizes_in,
    tensor_of,
)

# Loops as private functions that call themselves last, which the executable runs as loops (`driver.link.tail_calls`).
#
# A loop of `trips` at most, with a condition, one value handed on and one tensor of rows becomes::
#
#     @R.function(private=True)
#     def loop(trip, trips, condition, x, rows, captured, sizes):
#         if trip < trips and condition:
#             condition1, x1, row = <the body>
#             rows1 = relax_hetero.append_row(rows, row, trip, trips)
#             r = loop(trip + 1, trips, condition1, x1, rows1, captured, sizes)
#         else:
#             r = trip, x, rows
#         return r
#
# Values around the loop that the body reads are parameters behind its own, and symbolic sizes that it mentions come
# as a shape. A value whose shape one trip changes has symbolic sizes in the function, and the function's result tells
# only its rank: behind the call a `match_cast` names its sizes anew.

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
        _first_rows(importer, ty, limit, number) if has_room else _empty_rows(importer, ty, made.outer)
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


def _empty_rows(importer: Importer, row: relax.TensorType, outer: set[tirx.Var]) -> relax.Expr:
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


# Loops whose trips are known at import and few: their bodies one after the other.


class NotUnrolledError(Exception):
    """The body computes its condition when the model runs."""


def unroll(importer: Importer, loop: Loop, count: int) -> tuple[list[Any], list[relax.Expr]]:
    """The last state and the rows of a loop of at most `count` trips.

    Raises
    ------
    NotUnrolledError
        Whether there is another trip is computed when the model runs.
    """
    if loop.condition is not None and known_number(loop.condition) is None:
        raise NotUnrolledError
    state = list(loop.state)
    rows: list[list[relax.Expr]] = [[] for _ in range(loop.rows)]
    with importer.trial() as keep, importer.block(loop.info) as bindings:
        for index in range(count):
            trip = loop.trip(number(index, "int64"), number(True, "bool"), state)
            state = trip.state
            for row, one in zip(rows, trip.rows, strict=True):
                row.append(tensor_of(importer, one, loop.title))
            goes_on = 1 if trip.condition is None else known_number(trip.condition)
            if goes_on is None and index < count - 1:
                raise NotUnrolledError
            if not goes_on:
                break
        made = [
            _stacked(importer, own) if own else _no_rows(importer, loop, position) for position, own in enumerate(rows)
        ]
        keep()
    importer.adopt(bindings, loop.info)
    return state, made


def _stacked(importer: Importer, rows: list[relax.Expr]) -> relax.Expr:
    return importer.bb.emit(relax.op.stack(rows, 0))


def _no_rows(importer: Importer, loop: Loop, position: int) -> relax.Expr:
    """The rows of no trip: none, of the shape that a trip would have given."""
    with importer.trial(), importer.block(loop.info):
        trip = loop.trip(number(0, "int64"), number(True, "bool"), list(loop.state))
        ty = tensor_of(importer, trip.rows[position], loop.title).ty
    shape = ty.shape.values if isinstance(ty.shape, relax.ShapeExpr) else [0] * max(ty.ndim, 0)
    sizes = [0, *(int(dim) if isinstance(dim, tvm.tirx.IntImm) else 0 for dim in shape)]
    return relax.op.zeros(relax.ShapeExpr(sizes), ty.dtype.dtype)


# Products of a `Scan`'s slices with weights: computed for all trips at once, in front of the loop.
#
# ``xt @ W`` of each slice is a slice of ``x @ W``. One product of many rows takes less time than many products of a
# row, and recurrent layers spend half of theirs on these.


@dataclass(frozen=True)
class Product:
    """A node ``xt @ W`` of a body, by its position; `scanned` is the number of the input that it reads a slice of."""

    position: int
    scanned: int
    weight: relax.Expr
    result: str


def products_of_slices(importer: OnnxImporter, body: onnx.GraphProto, names: list[str]) -> list[Product]:
    """The products of slices, called `names`, with matrices that are known around the loop."""
    own = {value.name for value in body.input} | {name for node in body.node for name in node.output}
    own |= {tensor.name for tensor in body.initializer}
    found = []
    for position, node in enumerate(body.node):
        if node.op_type != "MatMul" or node.domain not in STANDARD_DOMAINS or node.input[0] not in names:
            continue
        weight: Any = None if node.input[1] in own else importer.value(node.input[1])
        is_computed = isinstance(weight, relax.Var) and weight in importer.known
        if not is_computed and not isinstance(weight, tvm.ir.GenericConst):
            continue
        if isinstance(weight.ty, relax.TensorType) and weight.ty.ndim == 2:
            found.append(Product(position, names.index(node.input[0]), weight, node.output[0]))
    return found


def with_products_in_front(
    importer: OnnxImporter,
    body: onnx.GraphProto,
    infos: list[NodeInfo],
    products: list[Product],
    inputs: list[relax.Expr],
) -> tuple[onnx.GraphProto, list[NodeInfo], list[relax.Expr]]:
    """A body without products, its nodes' names, and the products: what it scans besides, along the first axis.

    Parameters
    ----------
    inputs : list of relax.Expr
        Tensors that the body scans, their axis first.
    """
    left_out = {product.position for product in products}
    rest = onnx.GraphProto()
    rest.CopyFrom(body)
    del rest.node[:]
    rest.node.extend(node for position, node in enumerate(body.node) if position not in left_out)
    made = []
    for product in products:
        rest.input.add(name=product.result)
        with importer.block(infos[product.position]) as bindings:
            result = importer.bb.emit(relax.op.matmul(inputs[product.scanned], product.weight))
        importer.adopt(bindings, infos[product.position])
        made.append(result)
    return rest, [info for position, info in enumerate(infos) if position not in left_out], made


_UNROLLED_NODES = 256
"""Nodes that an unrolled loop becomes: about as many as take a second to compile."""
_UNROLLED_TRIPS = 4
"""Loops of so few trips are unrolled whatever their size: one that runs once is no loop."""


class Results(NamedTuple):
    """Results of a loop: its last state, and the rows of all trips, laid along a new first axis."""

    state: list[Any]
    rows: list[relax.Expr]


def run(importer: Importer, loop: Loop) -> Results:
    """The results of a loop, unrolled or as a function.

    Raises
    ------
    FrontendError
        It carries an optional, or a sequence of which its body does more than append to it, and its number of trips is
        computed when the model runs.
    """
    count = _known_trips(loop)
    has_sequences = any(map(is_sequence, loop.state))
    if count is not None and (_is_short(loop, count) or has_sequences):
        budget().check_nodes(count * loop.nodes, loop.title)
        with suppress(NotUnrolledError):
            return Results(*unroll(importer, loop, count))
    for value, name in zip(loop.state, loop.names, strict=False):
        if not is_sequence(value) and not isinstance(value, relax.Expr):
            raise FrontendError(
                f"{loop.title} carries {name!r}, an empty optional, and its number of trips is computed when the model "
                "runs; expected one that is known at import"
            )
    if not has_sequences:
        return Results(*roll(importer, loop))
    tensors, finish = with_rows_for_sequences(importer, loop)
    return Results(*finish(*roll(importer, tensors)))


def _is_short(loop: Loop, count: int) -> bool:
    return count <= _UNROLLED_TRIPS or count * loop.nodes <= _UNROLLED_NODES


def _known_trips(loop: Loop) -> int | None:
    """The trips that there are unless the body ends the loop earlier."""
    if loop.condition is not None and known_number(loop.condition) == 0:
        return 0
    return loop.trips if isinstance(loop.trips, int) else None


def convert_loop(importer: OnnxImporter, node: onnx.NodeProto, info: NodeInfo, operands: Sequence[Any]) -> list[Any]:
    """The outputs of a `Loop`: its state, and its rows behind it.

    Raises
    ------
    FrontendError
        Its graph has other inputs and outputs than the node, or it cannot be imported.
    """
    title, body, nodes = f"node {info}", inner_graph(node, "body", info), info.subgraphs["body"]
    limit, condition, *state = [*operands, None, None][: max(2, len(operands))]
    if len(body.input) != 2 + len(state) or len(body.output) < 1 + len(state):
        raise FrontendError(
            f"{title} hands on {len(state)} values, but its body has {len(body.input)} inputs and "
            f"{len(body.output)} outputs; expected {2 + len(state)} and {1 + len(state)} or more"
        )
    trips = None if limit is None else _trips(importer, limit, f"{title}: its number of trips")
    first = None if condition is None else scalar(importer, condition, "bool", f"{title}: its condition")
    if first is not None and known_number(first):
        first = None
    names = [value.name for value in body.input]

    def trip(index: Any, going_on: Any, values: list[Any]) -> Trip:
        given = dict(zip(names, [index, going_on, *values], strict=True))
        ends, *results = importer.graph_values(body, nodes, given)
        return Trip(ends, results[: len(values)], results[len(values) :])

    rows = len(body.output) - 1 - len(state)
    joins = [_joining_axis(importer, name) for name in node.output[: len(state)]]
    loop = Loop(info, title, len(body.node), trips, first, state, rows, trip, names[2:], joins)
    results = run(importer, loop)
    return [*results.state, *results.rows]


def _joining_axis(importer: OnnxImporter, name: str) -> int | None:
    """The axis along which every node that reads a sequence joins it; None where one does something else."""
    readers = importer.readers(name) if name else []
    joining = [node for node in readers if node.op_type == "ConcatFromSequence"]
    if len(joining) < len(readers) or any(attribute_of(node, "new_axis", 0) for node in joining):
        return None
    axes = {attribute_of(node, "axis", None) for node in readers}
    return next(iter(axes)) if len(axes) == 1 else None


def _trips(importer: Importer, limit: Any, what: str) -> Any:
    """A number of trips: an integer, an expression of symbolic sizes that is not negative, or a scalar of int64."""
    known = known_number(limit)
    if known is not None:
        return max(known, 0)
    size = limit.values[0] if isinstance(limit, relax.ShapeExpr) and len(limit.values) == 1 else limit
    if tvm.ir.is_prim_expr(size):
        return size if analyzer_for(size).can_prove(size >= 0) else tirx.max(size, tirx.IntImm("int64", 0))
    return scalar(importer, limit, "int64", what)


def convert_scan(
    importer: OnnxImporter, node: onnx.NodeProto, info: NodeInfo, operands: Sequence[Any], opset: int
) -> list[Any]:
    """The outputs of a `Scan`: its state, and its rows behind it, along the axes and in the directions asked for.

    Raises
    ------
    FrontendError
        Its graph does not fit the node, or the inputs that it goes along differ in length.
    """
    title, count = f"node {info}", int(attribute_of(node, "num_scan_inputs", 0))
    if opset < 9:
        return _batched_scan(importer, node, info, operands, count)
    scan = _Scan.of(importer, node, info, operands, count)
    return scan.results(importer, title)


@dataclass
class _Scan:
    """A `Scan`, of no batch.

    Attributes
    ----------
    inputs : list of object
        Tensors that it goes along, a slice a trip.
    axes, backwards
        Axis of each input along which it goes, and whether from its end.
    row_axes, rows_backwards
        The same for each output of rows.
    """

    node: onnx.NodeProto
    info: NodeInfo
    body: onnx.GraphProto
    state: list[Any]
    inputs: list[Any]
    axes: list[int]
    reversed_inputs: list[bool]
    row_axes: list[int]
    rows_backwards: list[bool]

    @staticmethod
    def of(importer: Importer, node: onnx.NodeProto, info: NodeInfo, operands: Sequence[Any], count: int) -> _Scan:
        body, title = inner_graph(node, "body", info), f"node {info}"
        states = len(operands) - count
        rows = len(body.output) - states
        if not 0 < count <= len(operands) or len(body.input) != len(operands) or rows < 0:
            raise FrontendError(
                f"{title} goes along {count} of {len(operands)} inputs, but its body has {len(body.input)} inputs and "
                f"{len(body.output)} outputs"
            )
        inputs = [importer.as_tensor(value) for value in operands[states:]]
        for index, value in enumerate(inputs):
            if not isinstance(value, relax.Expr) or not isinstance(value.ty, relax.TensorType) or value.ty.ndim < 1:
                raise FrontendError(f"{title} goes along input {states + index}, expected a tensor of known rank >= 1")

        def listed(name: str, length: int) -> list[int]:
            found = list(attribute_of(node, name, [0] * length))
            if len(found) != length:
                raise FrontendError(f"{title}: attribute {name} has {len(found)} entries, expected {length}")
            return found

        axes = [
            _axis(axis, value.ty.ndim, title)
            for axis, value in zip(listed("scan_input_axes", count), inputs, strict=True)
        ]
        return _Scan(
            node, info, body, list(operands[:states]), inputs, axes,
            [bool(entry) for entry in listed("scan_input_directions", count)],
            listed("scan_output_axes", rows),
            [bool(entry) for entry in listed("scan_output_directions", rows)],
        )  # fmt: skip

    def results(self, importer: OnnxImporter, title: str, trips: int | None = None) -> list[Any]:
        lengths = [_extent(value, axis, title) for value, axis in zip(self.inputs, self.axes, strict=True)]
        length = next((size for size in lengths if isinstance(size, int)), lengths[0])
        for index, other in enumerate(lengths):
            _require_length(importer, self.info, length, other, index)
        if trips is not None:
            length = min(trips, length) if isinstance(length, int) else trips
        body, nodes, added = self._with_products_in_front(importer)
        names = [value.name for value in body.input]
        scanned = [*zip(self.inputs, self.axes, self.reversed_inputs, strict=True), *added]

        def trip(index: Any, going_on: Any, values: list[Any]) -> Trip:
            slices = [slice_at(importer, value, axis, index, is_backwards) for value, axis, is_backwards in scanned]
            results = importer.graph_values(body, nodes, dict(zip(names, [*values, *slices], strict=True)))
            return Trip(None, results[: len(values)], results[len(values) :])

        rows = len(self.row_axes)
        loop = Loop(self.info, title, len(body.node), length, None, self.state, rows, trip, names)
        found = run(importer, loop)
        return [*found.state, *(self._turned(importer, row, i, title) for i, row in enumerate(found.rows))]

    def _with_products_in_front(
        self, importer: OnnxImporter
    ) -> tuple[onnx.GraphProto, list[NodeInfo], list[tuple[relax.Expr, int, bool]]]:
        """The body without products of slices with weights, its nodes' names, and what it goes along instead."""
        nodes = self.info.subgraphs["body"]
        names = [value.name for value in self.body.input][len(self.state) :]
        products = products_of_slices(importer, self.body, names)
        if not products:
            return self.body, nodes, []
        inputs = [
            _axis_first(importer, value, axis) if any(product.scanned == i for product in products) else value
            for i, (value, axis) in enumerate(zip(self.inputs, self.axes, strict=True))
        ]
        body, nodes, made = with_products_in_front(importer, self.body, nodes, products, inputs)
        added = [
            (value, 0, self.reversed_inputs[product.scanned]) for value, product in zip(made, products, strict=True)
        ]
        return body, nodes, added

    def _turned(self, importer: Importer, rows: relax.Expr, index: int, title: str) -> relax.Expr:
        """Rows in the order and along the axis that are asked for."""
        if self.rows_backwards[index]:
            rows = importer.bb.emit(relax.op.flip(rows, 0))
        rank = rows.ty.ndim
        axis = _axis(self.row_axes[index], rank, title)
        if axis:
            order = [*range(1, axis + 1), 0, *range(axis + 1, rank)]
            rows = importer.bb.emit(relax.op.permute_dims(rows, order))
        return rows


def _batched_scan(
    importer: OnnxImporter, node: onnx.NodeProto, info: NodeInfo, operands: Sequence[Any], count: int
) -> list[Any]:
    """A `Scan` of opset 8: first axes are the batch, of which each entry is scanned alone."""
    title = f"node {info}"
    lengths, *values = operands
    values = [importer.as_tensor(value) for value in values]
    if not values or any(not isinstance(value, relax.Expr) or value.ty.ndim < 1 for value in values):
        raise FrontendError(f"{title} of opset 8 expects tensors whose first axis is the batch")
    batch = _extent(values[0], 0, title)
    if not isinstance(batch, int) or batch < 1:
        raise FrontendError(f"{title} of opset 8 has a batch of {batch}, expected a number >= 1; give it with shapes=")
    if lengths is not None:
        raise FrontendError(f"{title} of opset 8 has sequence_lens, expected none: all entries of one length")
    budget().check_nodes(batch * len(info.subgraphs["body"]), title)
    entries = []
    for entry in range(batch):
        own = [slice_at(importer, value, 0, entry, False) for value in values]
        scan = _Scan.of(importer, _with_directions(node), info, own, count)
        entries.append(scan.results(importer, title))
    return [importer.bb.emit(relax.op.stack([entry[i] for entry in entries], 0)) for i in range(len(entries[0]))]


def _with_directions(node: onnx.NodeProto) -> onnx.NodeProto:
    """The node with its attribute `directions` as later opsets call it."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for attribute in copy.attribute:
        if attribute.name == "directions":
            attribute.name = "scan_input_directions"
    return copy


def _axis(axis: int, rank: int, title: str) -> int:
    if not -rank <= axis < rank:
        raise FrontendError(f"{title}: axis {axis} is out of range for rank {rank}")
    return axis % rank


def _axis_first(importer: Importer, value: relax.Expr, axis: int) -> relax.Expr:
    order = [axis, *(other for other in range(value.ty.ndim) if other != axis)]
    return importer.bb.emit(relax.op.permute_dims(value, order)) if axis else value


def _extent(value: relax.Expr, axis: int, title: str) -> Any:
    """The size of an axis: a number, or an expression of symbolic sizes."""
    if not isinstance(value.ty.shape, relax.ShapeExpr):
        raise FrontendError(f"{title}: the shape of its input is unknown; give it with shapes=")
    size = value.ty.shape.values[axis]
    return int(size) if isinstance(size, tirx.IntImm) else size


def _require_length(importer: Importer, info: NodeInfo, length: Any, other: Any, index: int) -> None:
    """Require that input `index` of a scan has as many slices as others."""
    scan = Node("Scan", info.name, 0, importer.bb, [], {}, 0)
    message = f"goes along inputs of different lengths, {length} and, input {index}, {other}"
    scan.require(tirx.EQ(_as_expr(length), _as_expr(other)), message)


def _as_expr(size: Any) -> tirx.Expr:
    return tirx.IntImm("int64", size) if isinstance(size, int) else size


def slice_at(importer: Importer, value: relax.Expr, axis: int, index: Any, is_backwards: bool) -> relax.Expr:
    """Entry `index` of an axis, counted from its end if it goes backwards; the axis is gone."""
    size = value.ty.shape.values[axis]
    if isinstance(index, (relax.Var, tvm.ir.GenericConst)) and known_number(index) is None:

        def element(data: te.Tensor, position: te.Tensor) -> te.Tensor:
            shape = [dim for i, dim in enumerate(data.shape) if i != axis]

            def at(*indices: Any) -> Any:
                place = position()
                place = data.shape[axis] - 1 - place if is_backwards else place
                return data(*indices[:axis], place, *indices[axis:])

            return te.compute(shape, at, name="slice")

        return importer.bb.emit_te(element, value, index, primfunc_name_hint="slice")
    place: Any = index if isinstance(index, int) else known_number(index)
    start = size - 1 - place if is_backwards else place
    part = relax.op.strided_slice(value, [axis], [start], [start + 1])
    return importer.bb.emit(relax.op.squeeze(importer.bb.emit(part), [axis]))
