"""Elementwise expressions as vector code: in the epilogue of a product, and alone.

Rules of arithmetic
-------------------
- An op means what the Relax op of its name means, and NaN goes through `maximum`, `minimum`, `relu` and `clip` as it
  does in numpy. `round` rounds halves to even. Integer `divide` truncates.
- 16-bit floats are computed in float32, from loads to the store, and rounded where the expression casts and where the
  result is stored: more exact than op by op, and cheaper.
- A cast of a float to an integer truncates; what does not fit is undefined, as in Relax.
- An integer division never traps, whatever padding holds: by zero, the result is the dividend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..encoding.expression import Expression
from ..encoding.machine import Machine
from ..encoding.problem import ElementwiseProblem
from ..errors import EncodingError
from . import vector_math
from .builder import Expr, Function, lane_indices, loop, vector_type
from .expression_ops import FLOAT32_OPS, FLOAT_OPS, INT_OPS, cast, round_to_bfloat16
from .storage import Storage, for_parts, nest_loops, whole
from .ties import tied_to
from .vector_access import gathered, loaded, split_run, tail_mask


@dataclass(frozen=True)
class _Value:
    """An operand or intermediate: its nominal type, and its value in the type that it is computed in."""

    dtype: str
    value: tirx.Expr


def computed_in(dtype: str) -> str:
    """The element type that arithmetic on `dtype` is done in."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def emit(expression: Expression, values: Sequence[tirx.Expr], dtypes: Sequence[str], lanes: int) -> tirx.Expr:
    """An expression over vectors; called while a PrimFunc is being built, where it binds intermediates.

    Parameters
    ----------
    expression : Expression
    values : sequence of PrimExpr
        The operands, of `lanes` lanes each (scalars where `lanes` is 1; a scalar operand is broadcast otherwise).
    dtypes : sequence of str
        Element types of the operands. A value may be in the type itself or in the one of `computed_in`.
    lanes : int

    Returns
    -------
    PrimExpr
        Of `expression.dtype(dtypes)`, and `lanes` lanes.

    Raises
    ------
    EncodingError
        If two operands of an op differ in type, or an op does not exist for a type.
    """
    operands = []
    for value, dtype in zip(values, dtypes, strict=True):
        vector = cast(value, computed_in(dtype))
        if lanes > 1 and vector.ty.dtype.lanes == 1:
            vector = T.broadcast(vector, lanes)
        operands.append(_Value(dtype, vector if dtype == "bool" else vector_math.once(vector)))

    def apply(op: str, args: list[Any], params: tuple[Any, ...]) -> Any:
        if op == "number":
            return params[0]
        if op == "cast":
            return _cast(_known(expression, args[0]), params[0])
        if op == "where":
            return _where(expression, *args)
        known = [arg for arg in args if isinstance(arg, _Value)]
        if not known:
            raise EncodingError(f"{op} in expression {expression} has numbers only; their type is unknown")
        if any(arg.dtype != known[0].dtype for arg in known):
            found = sorted({arg.dtype for arg in known})
            raise EncodingError(f"{op} in expression {expression} meets element types {found}; expected one")
        like = known[0]
        terms = [arg.value if isinstance(arg, _Value) else vector_math.constant(like.value, arg) for arg in args]
        function = (FLOAT_OPS if _is_float(like.dtype) else INT_OPS).get(op)
        if function is None or (op in FLOAT32_OPS and like.dtype == "float64"):
            raise EncodingError(f"{op} in expression {expression} does not exist for {like.dtype}")
        return _Value(like.dtype, vector_math.once(function(*terms, *params)))

    result = _known(expression, expression.evaluate(operands, apply))
    return cast(result.value, result.dtype)


def _known(expression: Expression, value: Any) -> _Value:
    if not isinstance(value, _Value):
        raise EncodingError(f"expression {expression} is a number; its type is unknown")
    return value


def _where(expression: Expression, condition: Any, then: Any, otherwise: Any) -> _Value:
    """The choice between two values, of which one may be a number; a condition of integers holds where not zero."""
    known = [arg for arg in (then, otherwise) if isinstance(arg, _Value)]
    if not known or not isinstance(condition, _Value) or any(arg.dtype != known[0].dtype for arg in known):
        raise EncodingError(f"where in expression {expression}: expected a condition and values of one type")
    like = known[0]
    chosen = [
        arg.value if isinstance(arg, _Value) else vector_math.constant(like.value, arg) for arg in (then, otherwise)
    ]
    holds = condition.value
    if condition.dtype != "bool":
        holds = tirx.NE(holds, vector_math.constant(holds, 0))
    return _Value(like.dtype, vector_math.once(T.Select(holds, *chosen)))


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def _cast(value: _Value, dtype: str) -> _Value:
    if dtype == "bfloat16" and value.dtype != dtype:
        return _Value(dtype, round_to_bfloat16(cast(value.value, "float32")))
    if dtype == "float16":
        return _Value(dtype, vector_math.once(cast(cast(value.value, "float16"), "float32")))
    if dtype == "bool":
        # Not bound: TVM's analyzer fails on bound vectors of bool.
        return _Value(dtype, tirx.NE(value.value, vector_math.constant(value.value, 0)))
    return _Value(dtype, vector_math.once(cast(value.value, computed_in(dtype))))


def elementwise_kernel(problem: ElementwiseProblem, machine: Machine) -> tirx.PrimFunc:
    """An elementwise expression alone, on packed or row-major storage.

    Padding of the result is whatever the expression makes of the operands' padding; it is never read by what consumes
    results of products.

    Parameters
    ----------
    problem : ElementwiseProblem
        Operands stored as the result are read tile by tile; row-major ones are broadcast against it.
    machine : Machine

    Raises
    ------
    EncodingError
        If an operand is packed in another way than the result, and as `emit` does.
    """
    function = Function("elementwise")
    with function:
        bound: set[str] = set()
        storages = [
            Storage(function, name, operand.shape, operand.dtype, operand.layout, bound)
            for name, operand in [
                *((f"x{i}", operand) for i, operand in enumerate(problem.operands)),
                ("result", problem.result),
            ]
        ]
        with function.body():
            for storage in storages:
                # TVM has no masked loads of bfloat16.
                storage.open(raw=storage.dtype == "bfloat16")
            work = _Work(problem, storages[:-1], storages[-1], machine)
            if all(work.is_alike(i) or not work.axes(i) for i in range(len(problem.operands))):
                work.as_one_dimension()
            else:
                work.by_tiles()
    return tied_to(function.result, problem.operands, 0, problem.result)


class _Work:
    """The loops of one elementwise kernel, while it is being built."""

    def __init__(self, problem: ElementwiseProblem, operands: list[Storage], result: Storage, machine: Machine) -> None:
        self.problem, self.operands, self.result, self.machine = problem, operands, result, machine
        self.names = list(problem.result.index_map)
        types = [operand.dtype for operand in (*problem.operands, problem.result)]
        self.lanes = min(machine.lanes(computed_in(dtype)) for dtype in types)
        self.extents = [self._extent(d) for d in range(len(self.names))]
        for i, operand in enumerate(problem.operands):
            if not operand.layout.is_identity and not self.is_alike(i):
                raise EncodingError(
                    f"elementwise {problem.expression}: x{i} is stored as {operand.layout}; expected the result's "
                    f"{problem.result.layout}, or row-major"
                )

    def is_alike(self, index: int) -> bool:
        """Whether an operand lies exactly as the result does."""
        operand = self.problem.operands[index]
        return operand.index_map == self.problem.result.index_map and operand.layout == self.problem.result.layout

    def axes(self, index: int) -> list[int]:
        """The result's dimension for each of the operand's that is not broadcast."""
        return [self.names.index(name) for name in self.problem.operands[index].index_map if name != "1"]

    def _extent(self, d: int) -> Expr:
        shown = [(self.result, d)]
        for operand, storage in zip(self.problem.operands, self.operands, strict=True):
            if self.names[d] in operand.index_map:
                shown.append((storage, operand.index_map.index(self.names[d])))
        for storage, own in shown:
            if storage.extents[own] is not None:
                return storage.extents[own]
        return self.result.tiles[d] * self.result.layout.tile(d)

    def as_one_dimension(self) -> None:
        """No operand needs to know where in the tensor it is."""
        total: Expr = 1
        for extent in self.result.physical:
            total = total * (int(extent) if isinstance(extent, tirx.IntImm) else extent)
        vectors = total // self.lanes if isinstance(total, int) else tirx.floordiv(total, self.lanes)

        def at(start: Expr, width: int) -> None:
            values = []
            for i, storage in enumerate(self.operands):
                where = lane_indices(start, width) if self.is_alike(i) else tirx.const(0, "int64")
                values.append(loaded(storage, where, None, width))
            self._store(values, lane_indices(start, width), width)

        for_parts(
            [vectors], self.result.bytes(), self.machine, lambda positions: at(positions[0] * self.lanes, self.lanes)
        )
        if self.lanes > 1 and not (isinstance(total, int) and total % self.lanes == 0):
            with loop(total - vectors * self.lanes) as rest:
                at(vectors * self.lanes + rest, 1)

    def by_tiles(self) -> None:
        """Every vector of the innermost axis of the result, with broadcast operands read where it lies."""
        layout = self.result.layout
        outer_dims, inner_dims = list(layout.outer_perm), list(layout.inner_dims)
        last = inner_dims.pop() if inner_dims else outer_dims.pop()

        def visit(positions: list[Expr]) -> None:
            outer = dict(zip(outer_dims, positions, strict=True))
            nest_loops(
                [layout.tile(d) for d in inner_dims],
                lambda within: self._run(last, outer, dict(zip(inner_dims, within, strict=True))),
            )

        for_parts([self.result.tiles[d] for d in outer_dims], self.result.bytes(), self.machine, visit)

    def _run(self, last: int, outer: dict[int, Expr], inner: dict[int, Expr]) -> None:
        layout = self.result.layout
        if layout.inner_dims:
            tile, extent = layout.tile(last), self.extents[last]
            first = outer[last] * tile

            def vectors(full: bool) -> None:
                for start, width in split_run(tile, self.lanes):
                    mask = None if full else tail_mask(extent, tile, first, start, width)
                    self._at(outer, {**inner, last: tirx.const(start, "int64")}, last, width, mask)

            if whole(extent, tile):
                vectors(True)
                return
            with T.If(first + tile <= extent):
                with T.Then():
                    vectors(True)
                with T.Else():
                    vectors(False)
            return
        extent = self.extents[last]
        count = extent // self.lanes if isinstance(extent, int) else tirx.floordiv(extent, self.lanes)
        with loop(count) as vector:
            self._at({**outer, last: vector * self.lanes}, inner, last, self.lanes, None)
        if self.lanes > 1 and not whole(extent, self.lanes):
            with loop(extent - count * self.lanes) as rest:
                self._at({**outer, last: count * self.lanes + rest}, inner, last, 1, None)

    def _at(self, outer: dict[int, Expr], inner: dict[int, Expr], last: int, width: int, mask: Expr | None) -> None:
        layout = self.result.layout
        here = lane_indices(self.result.offset(outer, inner), width)
        values = []
        for i, storage in enumerate(self.operands):
            if self.is_alike(i):
                values.append(loaded(storage, here, None, width))
                continue
            at: dict[int, Expr] = {}
            step: Expr | None = None
            for own, name in enumerate(self.problem.operands[i].index_map):
                if name == "1":
                    continue
                d = self.names.index(name)
                position = outer[d] * layout.tile(d) + inner.get(d, 0)
                if d == last:
                    step = storage.outer_stride(own)
                elif not whole(self.extents[d], layout.tile(d)):
                    position = T.min(position, self.extents[d] - 1)
                at[own] = position
            offset = storage.offset(at, {})
            if step is None:
                values.append(loaded(storage, offset, None, width))
            elif isinstance(step, int) and step == 1:
                values.append(loaded(storage, lane_indices(offset, width), mask, width))
            else:
                values.append(gathered(storage, offset, step, mask, width))
        self._store(values, here, width)

    def _store(self, values: list[tirx.Expr], where: Expr, width: int) -> None:
        dtypes = [operand.dtype for operand in self.problem.operands]
        value = emit(self.problem.expression, values, dtypes, width)
        if self.result.dtype == "bfloat16":
            value = T.reinterpret(vector_type("uint16", width), value)
        T.buffer_store(self.result.data, value, [where])
