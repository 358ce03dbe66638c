"""The code of one row: its passes over vectors, accumulators and their reduction to one number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.expression import Expression
from ...encoding.row_program import RowProgram, operands_of
from ..core.builder import Expr, Registers, broadcast, constant, lane_mask, lane_of, loop, materialize, minimum, when
from ..core.view import Coordinates, OperandView
from ..elementwise import expression_code
from ..elementwise.expression_ops import FLOAT_OPS, INT_OPS
from ..math import vector_math
from ..math.casts import cast, computed_in
from .row_plan import RowPass, RowPlan

MAX_UNROLLED_VECTORS = 16  # maximum number of vectors of a row whose loop is unrolled
CHAINS = 4  # independent accumulators of a reduction: additions that are in flight


@dataclass(frozen=True)
class RowSpec:
    """Facts that all rows of a kernel share."""

    program: RowProgram
    plan: RowPlan
    operands: list[OperandView]  # open views; those of bfloat16 are opened as bits
    result: OperandView
    lanes: int
    n: Expr  # elements of a row


class RowWriter:
    """Registers of one task, and the code of a row in them."""

    def __init__(self, code: RowSpec) -> None:
        self.code = code
        self.types = value_types(
            code.program, code.plan, [view.nominal for view in code.operands], computed_in(code.result.nominal)
        )
        # Values that are uniform over a row, by operand number, in every lane of a register.
        self.constant = {
            number: Registers(1, dtype, code.lanes)
            for number, dtype in self.types.items()
            if number not in (code.plan.kept, code.plan.keeping) and not self._is_loaded(number)
        }
        last = max((number for number, kind in enumerate(p.kind for p in code.plan.passes) if kind), default=-1)
        self.accumulators = [
            Registers(CHAINS, self.types[code.program.num_operands + number], code.lanes) for number in range(last + 1)
        ]

    def emit(self, at: Coordinates) -> None:
        """The code of the row at a position."""
        code = self.code
        for number, view in enumerate(code.operands):
            if number in self.constant:
                value = cast(view.typed(view.load({**at, "n": tirx.const(0, "int64")}, "-", 1)), self.types[number])
                self.constant[number][0] = broadcast(value, code.lanes)
        for number, row_pass in enumerate(code.plan.passes):
            for index, expression in row_pass.per_row:
                self.constant[index][0] = self._evaluate(expression, at, None, None, {})
            if row_pass.kind:
                self._reduce(row_pass, number, at)
            elif code.result.runs_along("n"):
                self._store(row_pass, at)
            else:
                self._store_one(self._evaluate(row_pass.expression, at, None, None, {}), at)

    def _is_loaded(self, number: int) -> bool:
        return number < len(self.code.operands) and self.code.operands[number].runs_along("n")

    def _reduce(self, row_pass: RowPass, number: int, at: Coordinates) -> None:
        accumulators = self.accumulators[number]
        index = self.code.program.num_operands + number
        dtype = self.types[index]
        combine = _combine(row_pass.kind, dtype, carries_nan(self.code.program, number))
        neutral = neutral_of(row_pass.kind, dtype, self.code.lanes)

        def accumulate(column: Expr, mask: Expr | None, chain: int) -> None:
            kept = self._keep(row_pass, at, column, mask)
            value = self._evaluate(row_pass.expression, at, column, mask, kept)
            if mask is not None:
                value = T.Select(mask, value, neutral)
            accumulators[chain] = combine(accumulators[chain], value)

        chains = min(CHAINS, -(-self.code.n // self.code.lanes)) if isinstance(self.code.n, int) else CHAINS
        for chain in range(chains):
            accumulators[chain] = neutral
        self._for_vectors(accumulate)
        while chains > 1:
            half = (chains + 1) // 2
            for chain in range(chains // 2):
                accumulators[chain] = combine(accumulators[chain], accumulators[chain + half])
            chains = half
        total = self._reduce_lanes(accumulators[0], combine, dtype)
        if row_pass.kind == "mean":
            total = total / count_of(self.code.n, dtype)
        self.constant[index][0] = broadcast(total, self.code.lanes)

    def _reduce_lanes(self, vector: Expr, combine: Callable[[Expr, Expr], Expr], dtype: str) -> Expr:
        """The lanes of a vector reduced to a scalar."""
        lanes = self.code.lanes
        while lanes > 1:
            register = Registers(1, dtype, lanes)
            register[0] = vector
            lanes //= 2
            halves = Registers(2, dtype, lanes)
            for half in range(2):
                numbers = list(range(half * lanes, (half + 1) * lanes))
                halves[half] = lane_of(register[0], half) if lanes == 1 else T.Shuffle([register[0]], numbers)
            vector = combine(halves[0], halves[1])
        return vector

    def _for_vectors(self, body: Callable[[Expr, Expr | None, int], None]) -> None:
        """Write `body` for every vector of a row: its first column, a mask if it is partial, and its accumulator."""
        n, lanes = self.code.n, self.code.lanes
        if isinstance(n, int):
            count, tail = n // lanes, n % lanes
            looped = 0 if -(-n // lanes) <= MAX_UNROLLED_VECTORS else count // CHAINS
            if looped:
                with loop(looped) as group:
                    for chain in range(CHAINS):
                        body((group * CHAINS + chain) * lanes, None, chain)
            for number in range(looped * CHAINS, count):
                body(tirx.const(number * lanes, "int64"), None, number % CHAINS)
            if tail:
                body(tirx.const(count * lanes, "int64"), lane_mask(tail, lanes), count % CHAINS)
            return
        groups = materialize(tirx.floordiv(n, lanes * CHAINS))
        with loop(groups) as group:
            for chain in range(CHAINS):
                body((group * CHAINS + chain) * lanes, None, chain)
        done = materialize(groups * (lanes * CHAINS))
        with loop(materialize(tirx.floordiv(n - done + (lanes - 1), lanes))) as number:
            column = materialize(done + number * lanes)
            left = materialize(minimum(n - column, tirx.const(lanes, "int64")))
            body(column, lane_mask(left, lanes) if lanes > 1 else None, 0)

    def _keep(self, row_pass: RowPass, at: Coordinates, column: Expr, mask: Expr | None) -> dict[int, Expr]:
        if row_pass.keep is None:
            return {}
        register = Registers(1, self.types[self.code.plan.keeping], self.code.lanes)
        register[0] = self._evaluate(row_pass.keep, at, column, mask, {})
        _store(self.code.result, {**at, "n": column}, register[0], self.code.lanes, mask)
        return {self.code.plan.keeping: register[0]}

    def _store(self, row_pass: RowPass, at: Coordinates) -> None:
        def store(column: Expr, mask: Expr | None, _chain: int) -> None:
            value = cast(self._evaluate(row_pass.expression, at, column, mask, {}), self.code.result.nominal)
            _store(self.code.result, {**at, "n": column}, value, self.code.lanes, mask)

        self._for_vectors(store)

    def _store_one(self, value: Expr, at: Coordinates) -> None:
        result = self.code.result
        register = Registers(1, str(value.ty.dtype).partition("x")[0], self.code.lanes)
        register[0] = value
        scalar = register[0] if self.code.lanes == 1 else lane_of(register[0], 0)
        scalar = cast(scalar, result.nominal)
        _store(result, {**at, "n": tirx.const(0, "int64")}, scalar, 1, None)

    def _evaluate(
        self, expression: Expression, at: Coordinates, column: Expr | None, mask: Expr | None, kept: dict[int, Expr]
    ) -> Expr:
        """An expression of the plan, for the vector at a column."""
        numbers = operands_of(expression)
        values = []
        for number in numbers:
            if number in kept:
                values.append(kept[number])
            elif number in self.constant:
                values.append(self.constant[number][0])
            else:
                view = self.code.result if number == self.code.plan.kept else self.code.operands[number]
                loaded = view.load({**at, "n": column}, "n", self.code.lanes, mask)
                values.append(cast(view.typed(loaded), self.types[number]))
        operands = [
            Expression.operand(numbers.index(number) if number in numbers else 0) for number in range(numbers[-1] + 1)
        ]
        types = [self.types[number] for number in numbers]
        result = expression_code.emit(expression.substitute(operands), values, types, self.code.lanes)
        return cast(result, computed_in(expression.substitute(operands).dtype(types)))


def value_types(program: RowProgram, plan: RowPlan, operands: list[str], kept: str) -> dict[int, str]:
    """The type of the arithmetic on every operand of a plan's expressions, by number.

    `operands`: element types of the program's operands. `kept`: type of the value that is stored for later passes.
    """
    # Conditions are read as bytes: TVM's analyzer fails on vectors of bool in registers.
    types = {number: "uint8" if dtype == "bool" else computed_in(dtype) for number, dtype in enumerate(operands)}
    plain = [types[number] for number in range(program.num_operands)]
    for number, reduction in enumerate(program.reductions):
        types[program.num_operands + number] = computed_in(reduction.expression.dtype(plain))
        plain.append(types[program.num_operands + number])
    types[plan.kept] = types[plan.keeping] = kept
    for row_pass in plan.passes:
        for number, expression in row_pass.per_row:
            operand_types = [types.get(index, "") for index in range(number)]
            types[number] = computed_in(expression.dtype(operand_types))
    return types


def carries_nan(program: RowProgram, number: int) -> bool:
    """Return whether the maximum or minimum of a row with NaN must be NaN.

    It need not be if a later sum contains the difference between the values and it, as in a softmax: the sum is NaN.
    """
    reduced = Expression.operand(program.num_operands + number).term
    for later, reduction in enumerate(program.reductions[number + 1 :], number + 1):
        if reduction.kind not in ("sum", "mean"):
            continue
        for term in reduction.expression.terms():
            if term.op == "subtract" and term.args == (program.reductions[number].expression.term, reduced):
                index = program.num_operands + later
                return index not in operands_of(program.result)
    return True


def _store(view: OperandView, at: Coordinates, value: Expr, lanes: int, mask: Expr | None) -> None:
    value = view.bits(value)
    if lanes == 1:
        with when(True if mask is None else mask):
            T.buffer_store(view.data, value, [view.address(at)])
        return
    view.store(at, "n", value, lanes, mask)


def _combine(kind: str, dtype: str, carries_nan: bool) -> Callable[[Expr, Expr], Expr]:
    ops = FLOAT_OPS if "float" in dtype else INT_OPS
    if kind in ("sum", "mean"):
        return ops["add"]
    if kind == "prod":
        return ops["multiply"]
    if carries_nan or "float" not in dtype:
        return ops["maximum" if kind == "max" else "minimum"]
    if kind == "max":
        return lambda a, b: T.Select(a > b, a, b)
    return lambda a, b: T.Select(a < b, a, b)


def neutral_of(kind: str, dtype: str, lanes: int) -> Expr:
    """The neutral element of a reduction, in every lane."""
    if kind in ("sum", "mean", "prod"):
        return constant(1 if kind == "prod" else 0, dtype, lanes)
    if "float" in dtype:
        return broadcast(_infinity(float("-inf" if kind == "max" else "inf"), dtype), lanes)
    return broadcast(tirx.min_value(dtype) if kind == "max" else tirx.max_value(dtype), lanes)


def _infinity(value: float, dtype: str) -> Expr:
    """Infinity by its bits: TVM's C code generator cannot write it."""
    if dtype == "float32":
        return vector_math.constant(tirx.const(0, dtype), value)
    # The xor gives the literal an address to reinterpret in C.
    raw = tirx.IntImm("int64", -(1 << 52) if value < 0 else 0x7FF << 52)
    return tirx.call_intrin(dtype, "tirx.reinterpret", T.BitwiseXor(raw, tirx.IntImm("int64", 0)))


def count_of(n: Expr, dtype: str) -> Expr:
    """The number of elements of a row as a number of a type."""
    return tirx.const(float(n), dtype) if isinstance(n, int) else tirx.Cast(dtype, n)
