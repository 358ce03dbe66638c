"""`Loop` and `Scan`: both become a `Loop` with loop-carried values and collected rows.

A loop with a static trip count and few nodes is unrolled (`unroll`), any other becomes a function (`roll`).

The function is private and calls itself last, which the executable runs as a loop (`driver.link.tail_calls`). With at
most `trips` trips, a condition, one loop-carried value and one tensor of rows it is::

    @R.function(private=True)
    def loop(trip, trips, condition, x, rows, captured, sizes):
        if trip < trips and condition:
            condition1, x1, row = <the body>
            rows1 = relax_hetero.append_row(rows, row, trip, trips)
            r = loop(trip + 1, trips, condition1, x1, rows1, captured, sizes)
        else:
            r = trip, x, rows
        return r

Outer values that the body reads are passed as parameters after its own, outer symbolic sizes as one shape. A value
whose shape changes between trips has symbolic sizes in the function, and only its rank in the function's result: a
`match_cast` after the call defines new names for its sizes.
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
from ....tir.core.builder import int64
from ....transform.ir.rewriting import typed
from ...import_limits import budget
from ...joined_sizes import analyzer_for
from ...ops.node import STANDARD_DOMAINS, Node
from ...symbolic_sizes import common_shape
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

_NEW, _WRITE = "relax_hetero.new_rows", "relax_hetero.write_row"
_APPEND, _TAKE = "relax_hetero.append_row", "relax_hetero.taken_rows"
_MAX_PREALLOCATED_BYTES = 64 << 20  # a loop that may end early preallocates the rows of all trips only up to this size

_MAX_TRIPS = 2**63 - 1
_MAX_ATTEMPTS = 8  # maximum number of conversions of a body; each one learns of sizes that change between trips


def roll(importer: Importer, loop: Loop) -> tuple[list[Any], list[relax.Expr]]:
    """Convert a loop to a function of the module and return its last state and its rows.

    Raises FrontendError if a trip changes the element type or rank of a value, or a shape is unknown.
    """
    bb = importer.bb
    initial = [tensor_of(importer, value, loop.title) for value in loop.state]
    bound = _MAX_TRIPS if loop.trips is None else loop.trips
    limit = number(bound, "int64") if isinstance(bound, int) else importer.as_tensor(bound)
    attempt = _Attempt(importer, loop, [_static_type(loop, i, value) for i, value in enumerate(initial)])
    for _ in range(_MAX_ATTEMPTS):
        function = attempt.function()
        if isinstance(function, _LoopFunction):
            break
        attempt = function
    else:
        raise FrontendError(f"{loop.title} changes the sizes of its values in more than {_MAX_ATTEMPTS} steps")
    importer.loops.append(function.loop)
    start = [] if not attempt.has_condition else [number(True, "bool") if loop.condition is None else loop.condition]
    rows = [
        _preallocate_rows(importer, ty, limit, number) if is_preallocated else _empty_rows(importer, ty, function.outer)
        for number, (ty, is_preallocated) in enumerate(zip(function.rows, function.is_preallocated, strict=True))
    ]
    sizes = [relax.ShapeExpr(function.loop.sizes)] if function.loop.sizes else []
    arguments = [number(0, "int64"), limit, *start, *initial, *rows, *function.loop.captured, *sizes]
    result = bb.emit(relax.Call(function.loop.gv, arguments))
    count, *fields = (bb.emit(relax.TupleGetItem(result, i)) for i in range(1 + len(initial) + len(rows)))
    state = [
        _with_sizes(importer, value, ty.dtype, _sizes_of(ty, function.outer))
        for value, ty in zip(fields, attempt.types, strict=False)
    ]
    num_rows = _length(loop, attempt.has_condition)
    stacked = [
        _with_sizes(importer, _take_rows(importer, value, count), ty.dtype, [num_rows, *_sizes_of(ty, function.outer)])
        for value, ty in zip(fields[len(initial) :], function.rows, strict=True)
    ]
    return state, stacked


@dataclass
class _LoopFunction:
    """Function of a loop."""

    loop: ImportedLoop
    rows: list[relax.TensorType]  # the type of one row of each collected tensor
    outer: set[tirx.Var]  # symbolic sizes in `rows` that are defined outside of the loop
    is_preallocated: list[bool]  # True if a collected tensor is allocated for all trips, False if it grows


@dataclass
class _Attempt:
    """Conversion of a loop's body under assumptions about which sizes change between trips."""

    importer: Importer
    loop: Loop
    types: list[relax.TensorType]  # types of the state in each trip
    has_condition: bool = False  # True if trips compute the condition of the next one
    open: set[tirx.Var] = field(default_factory=set)  # sizes in `types` that each trip may change

    def function(self) -> _LoopFunction | _Attempt:
        """The function, or the next attempt if the types of a trip's results differ from those of its operands."""
        importer, loop, bb = self.importer, self.loop, self.importer.bb
        has_condition = self.has_condition or loop.condition is not None
        trip, limit = (relax.Var(name, relax.TensorType((), "int64")) for name in ("trip", "trips"))
        condition = [relax.Var("condition", relax.TensorType((), "bool"))] if has_condition else []
        state = [relax.Var(f"value{i}", ty) for i, ty in enumerate(self.types)]
        params = [trip, limit, *condition, *state]
        bb.begin_scope(params)
        try:
            with importer.trial() as keep:
                with importer.block(loop.info) as body:
                    results = loop.trip(trip, condition[0] if condition else number(True, "bool"), list(state))
                    next_condition = [] if not has_condition else [self._condition(results.condition)]
                    values = [tensor_of(importer, value, loop.title) for value in results.state]
                    rows = [tensor_of(importer, value, loop.title) for value in results.rows]
                is_endless = results.condition is None or known_number(results.condition) == 1
                types = [self._joined_type(i, value.ty) for i, value in enumerate(values)]
                if not (has_condition or is_endless) or any(a is not b for a, b in zip(types, self.types, strict=True)):
                    return _Attempt(importer, loop, types, has_condition or not is_endless, self.open)
                keep()
            self.has_condition = has_condition
            return self._build(params, body, [*next_condition, *values], rows)
        finally:
            bb.end_scope()

    def _condition(self, value: Any) -> relax.Expr:
        if value is None:
            return number(True, "bool")
        return scalar(self.importer, value, "bool", f"{self.loop.title}: the condition of its body")

    def _joined_type(self, index: int, new: relax.TensorType) -> relax.TensorType:
        """The type that fits a value before and after a trip; the same type object if nothing changes."""
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
        changing = [axis for axis, dim in enumerate(shape) if not (dim in self.open or _is_same_size(dim, dims[axis]))]
        if all(dims[axis] in self.open for axis in changing):
            return old
        self.open |= {shape[axis] for axis in changing}
        return relax.TensorType(
            [dims[i] if dims[i] in self.open else dim for i, dim in enumerate(shape)], old.dtype.dtype
        )

    def _build(
        self, body_params: list[relax.Var], body: list[relax.Binding], values: list[relax.Expr], rows: list[relax.Expr]
    ) -> _LoopFunction:
        importer, loop, bb = self.importer, self.loop, self.importer.bb
        trip, limit = body_params[:2]
        state = body_params[len(body_params) - len(self.types) :]
        row_vars = [relax.Var(f"rows{i}", _of_rank(row.ty, row.ty.ndim + 1)) for i, row in enumerate(rows)]
        repeated, captured = _captured(importer, body, [*values, *rows], {*body_params})
        body_results = relax.Tuple([*values, *rows])
        body_seq = typed(relax.SeqExpr([relax.BindingBlock(body)], body_results), body_results.ty)
        body_func = relax.Function([*body_params, *captured], body_seq, None, True)
        sizes = sorted(relax.analysis.free_symbolic_vars(body_func), key=lambda size: str(size.name))
        params = [*body_params, *row_vars]
        call_args = [*captured, *([relax.Var("sizes", relax.ShapeType(sizes))] if sizes else [])]
        outer_sizes = sizes_in(var.ty for var in (*body_params, *captured)) - self.open
        inner = set(relax.analysis.defined_symbolic_vars(body_func)) - outer_sizes
        ret = tvm.ir.TupleType(
            [trip.ty, *(_result_type(ty, inner) for ty in self.types), *(row.ty for row in row_vars)]
        )
        outer = sizes_in(row.ty for row in rows) - inner
        is_preallocated = [self._can_preallocate(row.ty, outer) for row in rows]
        name = _unique_name(importer, f"loop_{variable_name(loop.info.name)}")
        gv = typed(tvm.ir.GlobalVar(name), relax.FuncType([var.ty for var in (*params, *call_args)], ret, True))
        bb.begin_scope(row_vars)
        try:
            with importer.block(loop.info) as bindings:
                proceeds = bb.emit(trip < limit)
                if self.has_condition:
                    proceeds = bb.emit(relax.op.logical_and(proceeds, body_params[2]))
                with importer.block(loop.info) as then_bindings:
                    importer.adopt([*body], loop.info)
                    next_trip = bb.emit(trip + number(1, "int64"))
                    grown_rows = [
                        self._append(old, row, trip, limit, is_fixed)
                        for old, row, is_fixed in zip(row_vars, rows, is_preallocated, strict=True)
                    ]
                    shape = [relax.ShapeExpr(sizes)] if sizes else []
                    call = bb.emit(relax.Call(gv, [next_trip, limit, *values, *grown_rows, *captured, *shape]))
                branch = relax.SeqExpr([relax.BindingBlock(then_bindings)], call)
                result = bb.emit(relax.If(proceeds, branch, relax.SeqExpr([], relax.Tuple([trip, *state, *row_vars]))))
        finally:
            bb.end_scope()
        imported = ImportedLoop(gv, params, captured, sizes, [*repeated, *bindings], result)
        return _LoopFunction(imported, [row.ty for row in rows], outer, is_preallocated)

    def _can_preallocate(self, row: relax.TensorType, outer: set[tirx.Var]) -> bool:
        """Return whether the rows' shape is known before the loop, and an early end wastes little memory."""
        if not isinstance(row.shape, relax.ShapeExpr) or not sizes_in([row]) <= outer or self.loop.trips is None:
            return False
        if not self.has_condition:
            return True
        sizes = [self.loop.trips, *(int(dim) if isinstance(dim, tirx.IntImm) else dim for dim in row.shape.values)]
        return (
            all(isinstance(size, int) for size in sizes)
            and bytes_for(tuple(sizes), str(row.dtype)) <= _MAX_PREALLOCATED_BYTES
        )

    def _append(
        self, rows: relax.Var, row: relax.Expr, trip: relax.Var, limit: relax.Var, is_preallocated: bool
    ) -> relax.Var:
        arguments = [rows, row, trip] if is_preallocated else [rows, row, trip, limit]
        call = relax.op.call_pure_packed(_WRITE if is_preallocated else _APPEND, *arguments, ty_args=[rows.ty])
        return self.importer.bb.emit(call)


def _unique_name(importer: Importer, name: str) -> str:
    """The name, with a number if it is in use: a bidirectional recurrent layer has two loops."""
    used = {str(loop.gv.name_hint) for loop in importer.loops}
    candidates = (f"{name}_{i}" for i in itertools.count(1))
    return next(free for free in itertools.chain([name], candidates) if free not in used)


def _captured(
    importer: Importer, body: list[relax.Binding], results: list[relax.Expr], body_params: set[relax.Var]
) -> tuple[list[relax.Binding], list[relax.Var]]:
    """Outer values that a body reads: bindings computed from constants, to repeat in it, and other variables."""
    body_seq = relax.SeqExpr([relax.BindingBlock(body)], relax.Tuple(results))
    # Symbolic sizes are passed as a shape.
    free = [
        v for v in relax.analysis.free_vars(body_seq) if v not in body_params and not isinstance(v.ty, tvm.ir.PrimType)
    ]
    repeated_vars: set[relax.Var] = set()
    pending = [var for var in free if var in importer.constant_bindings]
    while pending:
        var = pending.pop()
        if var in importer.constant_bindings and var not in repeated_vars:
            repeated_vars.add(var)
            pending.extend(relax.analysis.free_vars(importer.constant_bindings[var].value))
    repeated = [binding for var, binding in importer.constant_bindings.items() if var in repeated_vars]
    return repeated, [var for var in free if var not in repeated_vars]


def _static_type(loop: Loop, index: int, value: relax.Expr) -> relax.TensorType:
    if not isinstance(value.ty.shape, relax.ShapeExpr):
        raise FrontendError(f"{_title(loop, index)} has an unknown shape; give the shapes of inputs with shapes=")
    return relax.TensorType(value.ty.shape, value.ty.dtype.dtype)


def _title(loop: Loop, index: int) -> str:
    return f"{loop.title}: its value {loop.names[index]!r}"


def _is_same_size(a: Any, b: Any) -> bool:
    """Return whether two sizes are one expression, or one number."""
    return bool(a.same_as(b)) or (isinstance(a, tirx.IntImm) and isinstance(b, tirx.IntImm) and int(a) == int(b))


def _result_type(ty: relax.TensorType, inner: set[tirx.Var]) -> relax.TensorType:
    """Type of a value in the function's result, without sizes that are defined in a trip."""
    return ty if not sizes_in([ty]) & inner else _of_rank(ty, ty.ndim)


def _of_rank(ty: relax.TensorType, rank: int) -> relax.TensorType:
    """Tensor type without a shape."""
    return relax.TensorType(None, ty.dtype.dtype, ndim=rank)


def _sizes_of(row: relax.TensorType, outer: set[tirx.Var]) -> list[Any]:
    """The sizes of a row outside of the loop, with new variables for sizes defined in it."""
    dims = row.shape.values if isinstance(row.shape, relax.ShapeExpr) else [None] * row.ndim
    return [_outer_size_or_new(dim, outer, f"row_d{axis}") for axis, dim in enumerate(dims)]


def _outer_size_or_new(dim: Any, outer: set[tirx.Var], name: str) -> Any:
    if dim is not None and set(tirx.analysis.undefined_vars(tirx.Evaluate(dim), [])) <= outer:
        return dim
    return tirx.Var(name, "int64")


def _length(loop: Loop, has_condition: bool) -> Any:
    """Number of rows: an int, an expression of symbolic sizes, or a new variable that each call determines."""
    is_size = isinstance(loop.trips, int) or tvm.ir.is_prim_expr(loop.trips)
    return loop.trips if is_size and not has_condition else tirx.Var("rows", "int64")


def _empty_rows(importer: Importer, row: relax.TensorType, outer: set[tirx.Var]) -> relax.Expr:
    """Tensor without rows that the first trip appends to; the result if there is no trip."""
    sizes = [0 if isinstance(size, tirx.Var) and size not in outer else size for size in _sizes_of(row, outer)]
    return importer.bb.emit(relax.op.zeros(relax.ShapeExpr([0, *sizes]), row.dtype.dtype))


def _preallocate_rows(importer: Importer, row: relax.TensorType, limit: relax.Expr, index: int) -> relax.Expr:
    """Tensor for the rows of all trips."""
    arguments = [row.shape, tvm.ir.StringImm(str(row.dtype)), limit, relax.prim_value(index)]
    call = relax.op.call_pure_packed(_NEW, *arguments, ty_args=[_of_rank(row, row.ndim + 1)])
    return importer.bb.emit(call)


def _take_rows(importer: Importer, rows: relax.Expr, count: relax.Expr) -> relax.Expr:
    return importer.bb.emit(relax.op.call_pure_packed(_TAKE, rows, count, ty_args=[_of_rank(rows.ty, rows.ty.ndim)]))


def _with_sizes(importer: Importer, value: relax.Expr, dtype: Any, sizes: list[Any]) -> relax.Expr:
    """Match a value of unknown shape with sizes."""
    if isinstance(value.ty.shape, relax.ShapeExpr):
        return value
    return importer.bb.match_cast(value, relax.TensorType(sizes, dtype.dtype))


class NotUnrolledError(Exception):
    """The condition of the next trip is not constant."""


def unroll(importer: Importer, loop: Loop, count: int) -> tuple[list[Any], list[relax.Expr]]:
    """Convert the bodies of at most `count` trips one after the other; return the last state and the rows.

    Raises NotUnrolledError if the condition of the next trip is not constant.
    """
    if loop.condition is not None and known_number(loop.condition) is None:
        raise NotUnrolledError
    state = list(loop.state)
    rows: list[list[relax.Expr]] = [[] for _ in range(loop.rows)]
    with importer.trial() as keep, importer.block(loop.info) as bindings:
        for index in range(count):
            trip = loop.trip(number(index, "int64"), number(True, "bool"), state)
            state = trip.state
            for row, value in zip(rows, trip.rows, strict=True):
                row.append(tensor_of(importer, value, loop.title))
            proceeds = 1 if trip.condition is None else known_number(trip.condition)
            if proceeds is None and index < count - 1:
                raise NotUnrolledError
            if not proceeds:
                break
        results = [
            importer.bb.emit(relax.op.stack(values, 0)) if values else _no_rows(importer, loop, position)
            for position, values in enumerate(rows)
        ]
        keep()
    importer.adopt(bindings, loop.info)
    return state, results


def _no_rows(importer: Importer, loop: Loop, position: int) -> relax.Expr:
    """Tensor without rows, of the shape that a trip would produce."""
    with importer.trial(), importer.block(loop.info):
        trip = loop.trip(number(0, "int64"), number(True, "bool"), list(loop.state))
        ty = tensor_of(importer, trip.rows[position], loop.title).ty
    shape = ty.shape.values if isinstance(ty.shape, relax.ShapeExpr) else [0] * max(ty.ndim, 0)
    sizes = [0, *(int(dim) if isinstance(dim, tvm.tirx.IntImm) else 0 for dim in shape)]
    return relax.op.zeros(relax.ShapeExpr(sizes), ty.dtype.dtype)


@dataclass(frozen=True)
class Product:
    """A node ``xt @ W`` of a body, by its position; `scanned` is the index of the scanned input that ``xt`` slices."""

    position: int
    scanned: int
    weight: relax.Expr
    result: str


def products_of_slices(importer: OnnxImporter, body: onnx.GraphProto, names: list[str]) -> list[Product]:
    """The products of slices (`names`) with constant matrices of the outer scope."""
    inner_names = {value.name for value in body.input} | {name for node in body.node for name in node.output}
    inner_names |= {tensor.name for tensor in body.initializer}
    products = []
    for position, node in enumerate(body.node):
        if node.op_type != "MatMul" or node.domain not in STANDARD_DOMAINS or node.input[0] not in names:
            continue
        weight: Any = None if node.input[1] in inner_names else importer.value(node.input[1])
        is_computed = isinstance(weight, relax.Var) and weight in importer.constant_bindings
        if not is_computed and not isinstance(weight, tvm.ir.GenericConst):
            continue
        if isinstance(weight.ty, relax.TensorType) and weight.ty.ndim == 2:
            products.append(Product(position, names.index(node.input[0]), weight, node.output[0]))
    return products


def with_products_in_front(
    importer: OnnxImporter,
    body: onnx.GraphProto,
    infos: list[NodeInfo],
    products: list[Product],
    inputs: list[relax.Expr],
) -> tuple[onnx.GraphProto, list[NodeInfo], list[relax.Expr]]:
    """Hoist products of slices out of a `Scan`: ``xt @ W`` of each slice is a slice of one product ``x @ W``.

    `inputs`: scanned tensors, the scanned axis first. Returns the body without the products, the names of its nodes,
    and the products as scanned tensors.
    """
    positions = {product.position for product in products}
    remainder = onnx.GraphProto()
    remainder.CopyFrom(body)
    del remainder.node[:]
    remainder.node.extend(node for position, node in enumerate(body.node) if position not in positions)
    results = []
    for product in products:
        remainder.input.add(name=product.result)
        with importer.block(infos[product.position]) as bindings:
            result = importer.bb.emit(relax.op.matmul(inputs[product.scanned], product.weight))
        importer.adopt(bindings, infos[product.position])
        results.append(result)
    return remainder, [info for position, info in enumerate(infos) if position not in positions], results


_UNROLLED_NODES = 256  # maximum number of nodes of an unrolled loop; about what compiles in a second
_UNROLLED_TRIPS = 4  # loops of at most this number of trips are unrolled regardless of their nodes


class Results(NamedTuple):
    """Results of a loop: its last state, and the rows of all trips, stacked along a new first axis."""

    state: list[Any]
    rows: list[relax.Expr]


def run(importer: Importer, loop: Loop) -> Results:
    """Convert a loop, unrolled or as a function.

    Raises FrontendError if its number of trips is not static, and it carries an optional, or a sequence that its body
    does more with than append to it.
    """
    count = _max_trips(loop)
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


def _max_trips(loop: Loop) -> int | None:
    """Static number of trips unless the body ends the loop early, or None."""
    if loop.condition is not None and known_number(loop.condition) == 0:
        return 0
    return loop.trips if isinstance(loop.trips, int) else None


def convert_loop(importer: OnnxImporter, node: onnx.NodeProto, info: NodeInfo, operands: Sequence[Any]) -> list[Any]:
    """Convert a `Loop`; its outputs are the last state, then the rows.

    Raises FrontendError if its graph's inputs and outputs do not fit the node, or it cannot be imported.
    """
    title, body, nodes = f"node {info}", inner_graph(node, "body", info), info.subgraphs["body"]
    limit, condition, *state = [*operands, None, None][: max(2, len(operands))]
    if len(body.input) != 2 + len(state) or len(body.output) < 1 + len(state):
        raise FrontendError(
            f"{title} hands on {len(state)} values, but its body has {len(body.input)} inputs and "
            f"{len(body.output)} outputs; expected {2 + len(state)} and {1 + len(state)} or more"
        )
    trips = None if limit is None else _trips(importer, limit, f"{title}: its number of trips")
    initial_condition = None if condition is None else scalar(importer, condition, "bool", f"{title}: its condition")
    if initial_condition is not None and known_number(initial_condition):
        initial_condition = None
    names = [value.name for value in body.input]

    def trip(index: Any, proceeds: Any, values: list[Any]) -> Trip:
        arguments = dict(zip(names, [index, proceeds, *values], strict=True))
        next_condition, *results = importer.graph_values(body, nodes, arguments)
        return Trip(next_condition, results[: len(values)], results[len(values) :])

    rows = len(body.output) - 1 - len(state)
    joins = [_joining_axis(importer, name) for name in node.output[: len(state)]]
    loop = Loop(info, title, len(body.node), trips, initial_condition, state, rows, trip, names[2:], joins)
    results = run(importer, loop)
    return [*results.state, *results.rows]


def _joining_axis(importer: OnnxImporter, name: str) -> int | None:
    """The axis along which all readers concatenate a sequence; None if one reads it otherwise."""
    readers = importer.readers(name) if name else []
    joining = [node for node in readers if node.op_type == "ConcatFromSequence"]
    if len(joining) < len(readers) or any(attribute_of(node, "new_axis", 0) for node in joining):
        return None
    axes = {attribute_of(node, "axis", None) for node in readers}
    return next(iter(axes)) if len(axes) == 1 else None


def _trips(importer: Importer, limit: Any, what: str) -> Any:
    """Number of trips as a non-negative int or expression of symbolic sizes, or as an int64 scalar."""
    static = known_number(limit)
    if static is not None:
        return max(static, 0)
    size = limit.values[0] if isinstance(limit, relax.ShapeExpr) and len(limit.values) == 1 else limit
    if tvm.ir.is_prim_expr(size):
        return size if analyzer_for(size).can_prove(size >= 0) else tirx.max(size, tirx.IntImm("int64", 0))
    return scalar(importer, limit, "int64", what)


def convert_scan(
    importer: OnnxImporter, node: onnx.NodeProto, info: NodeInfo, operands: Sequence[Any], opset: int
) -> list[Any]:
    """Convert a `Scan`; its outputs are the last state, then the rows in the requested axes and directions.

    Raises FrontendError if its graph does not fit the node, or its scanned inputs differ in length.
    """
    title, count = f"node {info}", int(attribute_of(node, "num_scan_inputs", 0))
    if opset < 9:
        return _batched_scan(importer, node, info, operands, count)
    scan = _Scan.of(importer, node, info, operands, count)
    return scan.results(importer, title)


@dataclass
class _Scan:
    """A `Scan` without a batch axis."""

    node: onnx.NodeProto
    info: NodeInfo
    body: onnx.GraphProto
    state: list[Any]
    inputs: list[Any]  # scanned tensors; each trip reads a slice
    # Scanned axis of each input, and True if it is scanned from its end.
    axes: list[int]
    reversed_inputs: list[bool]
    # The same for each tensor of rows.
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

        def list_attribute(name: str, length: int) -> list[int]:
            entries = list(attribute_of(node, name, [0] * length))
            if len(entries) != length:
                raise FrontendError(f"{title}: attribute {name} has {len(entries)} entries, expected {length}")
            return entries

        axes = [
            _axis(axis, value.ty.ndim, title)
            for axis, value in zip(list_attribute("scan_input_axes", count), inputs, strict=True)
        ]
        return _Scan(
            node, info, body, list(operands[:states]), inputs, axes,
            [bool(entry) for entry in list_attribute("scan_input_directions", count)],
            list_attribute("scan_output_axes", rows),
            [bool(entry) for entry in list_attribute("scan_output_directions", rows)],
        )  # fmt: skip

    def results(self, importer: OnnxImporter, title: str, trips: int | None = None) -> list[Any]:
        lengths = [_extent(value, axis, title) for value, axis in zip(self.inputs, self.axes, strict=True)]
        length = next((size for size in lengths if isinstance(size, int)), lengths[0])
        for index, input_length in enumerate(lengths):
            _require_length(importer, self.info, length, input_length, index)
        if trips is not None:
            length = min(trips, length) if isinstance(length, int) else trips
        body, nodes, added_inputs = self._with_products_in_front(importer)
        names = [value.name for value in body.input]
        scanned = [*zip(self.inputs, self.axes, self.reversed_inputs, strict=True), *added_inputs]

        def trip(index: Any, proceeds: Any, values: list[Any]) -> Trip:
            slices = [slice_at(importer, value, axis, index, is_backwards) for value, axis, is_backwards in scanned]
            results = importer.graph_values(body, nodes, dict(zip(names, [*values, *slices], strict=True)))
            return Trip(None, results[: len(values)], results[len(values) :])

        rows = len(self.row_axes)
        loop = Loop(self.info, title, len(body.node), length, None, self.state, rows, trip, names)
        loop_results = run(importer, loop)
        return [
            *loop_results.state,
            *(self._arrange_rows(importer, row, i, title) for i, row in enumerate(loop_results.rows)),
        ]

    def _with_products_in_front(
        self, importer: OnnxImporter
    ) -> tuple[onnx.GraphProto, list[NodeInfo], list[tuple[relax.Expr, int, bool]]]:
        """The body without products of slices with weights, its nodes' names, and the products as scanned inputs."""
        nodes = self.info.subgraphs["body"]
        names = [value.name for value in self.body.input][len(self.state) :]
        products = products_of_slices(importer, self.body, names)
        if not products:
            return self.body, nodes, []
        inputs = [
            _axis_first(importer, value, axis) if any(product.scanned == i for product in products) else value
            for i, (value, axis) in enumerate(zip(self.inputs, self.axes, strict=True))
        ]
        body, nodes, results = with_products_in_front(importer, self.body, nodes, products, inputs)
        added_inputs = [
            (value, 0, self.reversed_inputs[product.scanned]) for value, product in zip(results, products, strict=True)
        ]
        return body, nodes, added_inputs

    def _arrange_rows(self, importer: Importer, rows: relax.Expr, index: int, title: str) -> relax.Expr:
        """Rows in the requested direction and along the requested axis."""
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
    """Convert a `Scan` of opset 8, whose first axes are the batch; each entry becomes a scan."""
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
        slices = [slice_at(importer, value, 0, entry, False) for value in values]
        scan = _Scan.of(importer, _with_directions(node), info, slices, count)
        entries.append(scan.results(importer, title))
    return [importer.bb.emit(relax.op.stack([entry[i] for entry in entries], 0)) for i in range(len(entries[0]))]


def _with_directions(node: onnx.NodeProto) -> onnx.NodeProto:
    """Copy of a node with its attribute `directions` renamed as in later opsets."""
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
    """Require that scanned input `index` has as many slices as the others."""
    scan = Node("Scan", info.name, 0, importer.bb, [], {}, 0)
    message = f"goes along inputs of different lengths, {length} and, input {index}, {other}"
    scan.require(tirx.EQ(int64(length), int64(other)), message)


def slice_at(importer: Importer, value: relax.Expr, axis: int, index: Any, is_backwards: bool) -> relax.Expr:
    """Slice `index` of an axis, counted from the end if `is_backwards`; the axis is removed."""
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
    piece = relax.op.strided_slice(value, [axis], [start], [start + 1])
    return importer.bb.emit(relax.op.squeeze(importer.bb.emit(piece), [axis]))
