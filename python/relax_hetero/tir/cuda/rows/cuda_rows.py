"""Row kernels: softmax, norms, reductions along the last axis and elementwise work around them.

Memory is read once: a row's elements stay in the registers of its threads between passes. Several short rows share a
warp, long ones have a block or a cluster. Rows that do not fit registers, and rows of symbolic length, are loaded again
by every pass, from L2 if they fit it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.expression import Expression
from ....encoding.problem import RowsProblem
from ....encoding.row_program import RowProgram, operands_of
from ....errors import EncodingError
from ....target.element_types import bytes_of
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, Function, Registers, ceil_div, either, int64, loop, materialize
from ...core.ties import tied_to
from ...core.view import Coordinates, OperandView, extent_of
from ...core.work_split import unravel
from ...math.casts import cast, computed_in
from ...rows.row_code import carries_nan, count_of, neutral_of, value_types
from ...rows.row_plan import RowPass, RowPlan, plan_rows
from ...rows.rows import in_single, merge_rows
from ..core import ptx
from ..core.expression import emit, ops_for
from ..core.launch import WAIT, SharedMemory, at_least_one, enable_pdl, launch
from ..core.storage_position import empty_launch
from ..core.vectors import Vectors
from ..tile.register_tile import WARP_LANES, reduce_lanes
from .row_shape import (
    IN_FLIGHT,
    LATE_FRACTION,
    MAX_REGISTERS,
    RowShape,
    is_idle,
    lanes_for,
    looped_shape,
    register_shape,
)

ACCUMULATORS = 4
"""Independent accumulators of a thread, whose additions are in flight together."""
_PARTIAL_BYTES = 8
"""Bytes of a warp's partial result in shared memory, for all types."""
_ZERO = tirx.const(0, "int64")


@dataclass(frozen=True)
class Threads:
    """Indices of a thread."""

    number: Expr  # index of the thread in its row, int32
    row: Expr  # index of the row in its block
    # Predicate of the row's existence; None: always. Threads whose row does not exist recompute another.
    is_row: Expr | None


class RowWriter:
    """Writer of the code for a row: loads, passes, reductions across threads and stores.

    Parameters
    ----------
    operands, result : OperandView
        Opened; bfloat16 and bool as bits.
    n : int or PrimExpr
        Elements of a row.
    kept : str
        Type of values kept for later passes.
    late : frozenset of int
        Operands whose vectors are loaded where they are needed, by a single pass.
    early : sequence of int
        Operands in registers that are loaded before the wait for the previous launch (`WAIT`).
    """

    def __init__(
        self,
        program: RowProgram,
        plan: RowPlan,
        operands: Sequence[OperandView],
        result: OperandView,
        shape: RowShape,
        n: Expr,
        kept: str,
        late: frozenset[int],
        threads: Threads,
        at: Coordinates,
        early: Sequence[int],
    ) -> None:
        self.early = early
        self.late = late if shape.vectors else frozenset()
        self.program, self.plan, self.shape, self.n = program, plan, shape, n
        self.operands, self.result, self.threads, self.at = list(operands), result, threads, at
        self.types = value_types(program, plan, [view.nominal for view in operands], kept)
        self.row_values: dict[int, Registers] = {}
        self.memory = SharedMemory()
        vectors = shape.vectors
        self.vectors = {
            number: Vectors(view, {**at, "n": _ZERO}, shape.lanes, 1 if number in self.late else vectors or IN_FLIGHT)
            for number, view in enumerate(operands)
            if view.runs_along("n")
        }
        keeps = any(step.keep is not None for step in plan.passes)
        self.kept: Any = T.alloc_buffer((vectors * shape.lanes,), kept, scope="local") if keeps else None
        self.output = Vectors(result, {**at, "n": _ZERO}, shape.lanes, 1) if result.runs_along("n") else None

    def emit(self) -> None:
        """Write the code of the row."""
        if self.early:
            for number in self.early:
                self._load_held(number)
            with T.attr(0, WAIT, 1):
                T.evaluate(0)
        for number, view in enumerate(self.operands):
            if number not in self.vectors:
                loaded = view.typed(view.load({**self.at, "n": _ZERO}, "-", 1))
                self._set(number, cast(loaded, self.types[number]))
        if self.shape.vectors:
            for number in self.vectors:
                if number not in self.late and number not in self.early:
                    self._load_held(number)
        if self.shape.cluster > 1:
            # Each reduction has memory of its own, so that no barrier is needed before it is reused.
            self.memory.reserve(len(self.plan.passes) * self.shape.warps * _PARTIAL_BYTES)
            self.memory.open()
        for number, step in enumerate(self.plan.passes):
            for index, expression in step.per_row:
                self._set(index, self._evaluate(expression, None, {}))
            if step.kind:
                self._reduce(step, number)
            elif self.output is not None:
                self._store(step, self.output)
            else:
                self._store_one(self._evaluate(step.expression, None, {}))
        if self.shape.cluster > 1:  # no block may exit before others have read its shared memory
            ptx.cluster_arrive()
            ptx.cluster_wait()

    def _set(self, number: int, value: Expr) -> None:
        self.row_values.setdefault(number, Registers(1, self.types[number], 1))[0] = value

    def _load_held(self, number: int) -> None:
        vectors = self.vectors[number]
        for vector in range(self.shape.vectors):
            place = self._place(vector)
            vectors.load(vector, place, self._inside(vector, place))

    def _place(self, vector: Expr) -> Expr:
        """Index in the row of one of the thread's vectors, int32."""
        return vector * self.shape.threads + self.threads.number

    def _inside(self, vector: int, place: Expr) -> Expr | None:
        """Predicate of one of the thread's vectors; None if it is in the row for all threads."""
        assert isinstance(self.n, int), "rows of symbolic length are not kept in registers"
        count = self.n // self.shape.lanes
        return None if (vector + 1) * self.shape.threads <= count else place < count

    # ---- passes

    def _reduce(self, step: RowPass, number: int) -> None:
        index = self.program.num_operands + number
        dtype = self.types[index]
        combine = _combine(step.kind, dtype, carries_nan(self.program, number))
        neutral = neutral_of(step.kind, dtype, 1)
        chains = ACCUMULATORS if self.shape.vectors == 0 else min(ACCUMULATORS, self.shape.vectors * self.shape.lanes)
        accumulators = Registers(chains, dtype, 1)
        for chain in range(chains):
            accumulators[chain] = neutral

        def visit(element: int, place: Expr, inside: Expr | None) -> None:
            kept = self._keep(step, element)
            value = self._evaluate(step.expression, element, kept)
            if inside is not None:
                value = T.Select(inside, value, neutral)
            accumulators[accumulator_of(element)] = combine(accumulators[accumulator_of(element)], value)

        def accumulator_of(element: int) -> int:
            return element % chains

        self._for_each_element(step, visit)
        remaining = chains
        while remaining > 1:
            for chain in range(remaining // 2):
                accumulators[chain] = combine(accumulators[chain], accumulators[chain + (remaining + 1) // 2])
            remaining = (remaining + 1) // 2
        self._reduce_row(accumulators, combine, dtype, number)
        result = accumulators[0]
        if step.kind == "mean":
            result = result / count_of(self.n, dtype)
        self._set(index, result)

    def _reduce_row(self, accumulator: Registers, combine: Callable[[Expr, Expr], Expr], dtype: str, step: int) -> None:
        """Reduce the accumulators of a row's threads; all threads get the result."""
        _reduce_lanes(accumulator, combine, min(self.shape.threads, WARP))
        warps = self.shape.warps
        if self.shape.cluster > 1:
            self._reduce_cluster(accumulator, combine, dtype, step)
            return
        if warps == 1:
            return
        partial = T.alloc_buffer((self.shape.rows * warps,), dtype, scope="shared")
        number, first = self.threads.number, self.threads.row * warps
        if step or not isinstance(self.n, int):
            # TVM reuses shared memory between reductions, so all threads must have read the previous one.
            T.evaluate(T.tvm_storage_sync("shared"))
        with T.If(tirx.EQ(number % WARP, 0)), T.Then():
            T.buffer_store(partial, accumulator[0], [first + number // WARP])
        T.evaluate(T.tvm_storage_sync("shared"))
        if warps > 8:
            accumulator[0] = partial[first + number % warps]
            _reduce_lanes(accumulator, combine, warps)
            return
        accumulator[0] = partial[first]
        for warp in range(1, warps):
            accumulator[0] = combine(accumulator[0], partial[first + warp])

    def _reduce_cluster(
        self, accumulator: Registers, combine: Callable[[Expr, Expr], Expr], dtype: str, step: int
    ) -> None:
        """Reduce over the warps of a cluster: each reads all partial results from distributed shared memory."""
        warps, words = self.shape.warps, max(1, bytes_of(dtype) // 4)
        thread = self.threads.number
        register = T.alloc_buffer((words,), "uint32", scope="local")
        partial = T.decl_buffer((1,), dtype if words > 1 else "uint32", data=register.data, scope="local")
        remote = T.alloc_buffer((1,), "uint32", scope="local")
        partial_words = [register[word] for word in range(words)]

        def address(warp: Expr) -> Expr:
            return self.memory.at((step * warps + warp) * _PARTIAL_BYTES)

        def remote_partial() -> Expr:
            return partial[0] if words > 1 else _narrowed(partial[0], dtype)

        with T.If(tirx.EQ(thread % WARP, 0)), T.Then():
            T.buffer_store(partial, accumulator[0] if words > 1 else _as_word(accumulator[0], dtype), [0])
            ptx.store_shared(address(thread // WARP % warps), partial_words)
        ptx.cluster_arrive()
        ptx.cluster_wait()
        local_address = T.bind(ptx.shared_address(address(thread % warps)))
        for block in range(self.shape.cluster):
            ptx.remote_address(remote[0], local_address, block)
            ptx.load_remote(partial_words, remote[0])
            accumulator[0] = remote_partial() if block == 0 else combine(accumulator[0], remote_partial())
        _reduce_lanes(accumulator, combine, warps)

    def _keep(self, step: RowPass, element: int) -> dict[int, Expr]:
        if step.keep is None:
            return {}
        value = self._evaluate(step.keep, element, {})
        T.buffer_store(self.kept, value, [element])
        return {self.plan.keeping: self.kept[element]}

    def _store(self, step: RowPass, output: Vectors) -> None:
        lanes = self.shape.lanes

        def visit(element: int, place: Expr, inside: Expr | None) -> None:
            value = cast(self._evaluate(step.expression, element, {}), self.result.nominal)
            lane = element % lanes
            output.set(lane, self.result.bits(value))
            if lane == lanes - 1:
                exists = inside if self.threads.is_row is None else _conjunction(self.threads.is_row, inside)
                output.store(0, place, exists)

        self._for_each_element(step, visit)

    def _store_one(self, value: Expr) -> None:
        register = Registers(1, str(value.ty.dtype), 1)
        register[0] = value
        first = tirx.EQ(self.threads.number, 0)
        with T.If(_conjunction(first, self.threads.is_row)), T.Then():
            stored = self.result.bits(cast(register[0], self.result.nominal))
            T.buffer_store(self.result.data, stored, [self.result.address({**self.at, "n": _ZERO})])

    def _for_each_element(self, step: RowPass, visit: Callable[[int, Expr, Expr | None], None]) -> None:
        """Write code for every element of the thread.

        `visit` gets the element's register number, its vector's index in the row, and the vector's predicate (or
        None).
        """
        lanes = self.shape.lanes
        read = self._read_by(step)
        if self.shape.vectors:
            for vector in range(self.shape.vectors):
                place = self._place(vector)
                inside = self._inside(vector, place)
                for number in read:
                    if number in self.late:
                        self.vectors[number].load(0, place, inside)
                for lane in range(lanes):
                    visit(vector * lanes + lane, place, inside)
            return
        count = self.n // lanes if isinstance(self.n, int) else materialize(tirx.floordiv(self.n, lanes))
        threads = self.shape.threads
        whole = (
            count // (threads * IN_FLIGHT)
            if isinstance(count, int)
            else materialize(tirx.floordiv(count, threads * IN_FLIGHT))
        )

        def write_vectors(first: Expr, count_in_flight: int, guarded: bool) -> None:
            places = [first + slot * threads for slot in range(count_in_flight)]
            predicates = [place < count if guarded else None for place in places]
            for slot in range(count_in_flight):
                for number in read:
                    self.vectors[number].load(slot, places[slot], predicates[slot])
            for slot in range(count_in_flight):
                for lane in range(lanes):
                    visit(slot * lanes + lane, places[slot], predicates[slot])

        number = tirx.Cast("int64", self.threads.number)
        with loop(whole) as batch:
            write_vectors(materialize(batch * (threads * IN_FLIGHT) + number), IN_FLIGHT, False)
        first_of_rest = whole * (threads * IN_FLIGHT)
        left = count - first_of_rest
        if isinstance(left, int) and left == 0:
            return
        rest = (
            -(-left // threads) if isinstance(left, int) else materialize(tirx.floordiv(left + (threads - 1), threads))
        )
        with loop(rest) as batch:
            write_vectors(materialize(first_of_rest + batch * threads + number), 1, True)

    def _read_by(self, step: RowPass) -> list[int]:
        expressions = [step.expression] if step.keep is None else [step.expression, step.keep]
        return sorted({number for e in expressions for number in operands_of(e) if number in self.vectors})

    def _evaluate(self, expression: Expression, element: int | None, kept: dict[int, Expr]) -> Expr:
        """Evaluate an expression of the plan for one of the thread's elements."""
        used = operands_of(expression)
        values: list[Expr] = []
        for number in used:
            if number in kept:
                values.append(kept[number])
            elif number == self.plan.kept:
                values.append(self.kept[element])
            elif number in self.row_values:
                values.append(self.row_values[number][0])
            else:
                slot = element % self.shape.lanes if number in self.late and element is not None else element
                values.append(cast(self.operands[number].typed(self.vectors[number].get(slot)), self.types[number]))
        places = [Expression.operand(used.index(number) if number in used else 0) for number in range(used[-1] + 1)]
        types = [self.types[number] for number in used]
        dense = expression.substitute(places)
        return cast(emit(dense, values, types), computed_in(dense.dtype(types)))


def kept_type(plan: RowPlan, program: RowProgram, operands: list[str]) -> str | None:
    """Type of the value kept for later passes; None if there are several types."""
    dtypes: set[str] = set()
    kept = "float32"
    for step in plan.passes:
        if step.keep is None:
            continue
        types = value_types(program, plan, operands, kept)
        kept = computed_in(step.keep.dtype([types.get(number, "") for number in range(step.keep.num_operands)]))
        dtypes.add(kept)
    return None if len(dtypes) > 1 else next(iter(dtypes), "float32")


def _reduce_lanes(accumulator: Registers, combine: Callable[[Expr, Expr], Expr], lanes: int) -> None:
    """Reduce the first accumulators of `lanes` neighbouring threads; all of them get the result."""
    reduce_lanes(accumulator.buffer(0), 0, combine, [distance for distance in WARP_LANES if distance < lanes])


def _combine(kind: str, dtype: str, carries: bool) -> Callable[[Expr, Expr], Expr]:
    ops = ops_for(dtype)
    if kind in ("sum", "mean"):
        return ops["add"]
    if kind == "prod":
        return ops["multiply"]
    if carries or "float" not in dtype:
        return ops["maximum" if kind == "max" else "minimum"]
    return T.max if kind == "max" else T.min


def _as_word(value: Expr, dtype: str) -> Expr:
    """Convert a value of at most 32 bits to a word."""
    return T.reinterpret("uint32", value) if bytes_of(dtype) == 4 else T.cast(value, "uint32")


def _narrowed(word: Expr, dtype: str) -> Expr:
    return T.reinterpret(dtype, word) if bytes_of(dtype) == 4 else T.cast(word, dtype)


def _conjunction(one: Expr | None, other: Expr | None) -> Expr:
    if one is None or other is None:
        return one if other is None else other
    return tirx.And(one, other)


def late_operands(plan: RowPlan, operands: Mapping[int, int]) -> frozenset[int]:
    """Operands that only one pass reads, and not the first, such as scale and shift of a norm."""
    uses = {number: _uses(plan, number) for number in operands}
    return frozenset(number for number, steps in uses.items() if len(steps) == 1 and steps[0] > 0)


def live_bytes(plan: RowPlan, sizes: Mapping[int, int], kept: int) -> int:
    """Maximum bytes of registers for an element of a row, over all passes.

    A kept value may reuse the registers of operands that its pass reads last: an exponential replaces its score.

    Parameters
    ----------
    sizes : mapping of int to int
        Bytes of an element of each operand that is kept.
    kept : int
        Bytes of the value kept for later passes.
    """
    keeping = [step for step, row_pass in enumerate(plan.passes) if row_pass.keep is not None]
    uses = _uses(plan, plan.kept)

    def before(step: int) -> int:
        operands = sum(size for number, size in sizes.items() if _uses(plan, number)[-1:] >= [step])
        return operands + (kept if keeping and keeping[0] < step and uses and uses[-1] >= step else 0)

    return max(before(step) for step in range(len(plan.passes)))


def _uses(plan: RowPlan, number: int) -> list[int]:
    """Numbers of the passes that read an operand."""
    return [
        step
        for step, p in enumerate(plan.passes)
        if any(number in operands_of(expression) for expression in (p.expression, p.keep) if expression is not None)
    ]


def rows_kernel(problem: RowsProblem, gpu: GpuTarget, shape: RowShape | None = None) -> tirx.PrimFunc:
    """Kernel of a row program, one launch; `RowsProblem` documents its parameters.

    Parameters
    ----------
    shape : RowShape, optional
        Distribution of rows among threads; chosen by default.

    Raises
    ------
    EncodingError
        If an operand is not row-major, or an op does not exist for its type.
    """
    if not all(operand.layout.is_identity for operand in problem.parameters):
        raise EncodingError(f"rows {problem.program}: found a packed operand, expected row-major ones")
    function = Function("rows", registers="local")
    with function:
        operands = [OperandView(function, f"x{i}", operand) for i, operand in enumerate(problem.operands)]
        result = OperandView(function, "result", problem.result)
        with function.body():
            kernel = _Kernel(problem, operands, result, gpu, shape)
            kernel.write()
    tied = tied_to(function.result, problem.operands, 0, problem.result)
    return enable_pdl(tied, kernel.early) if kernel.early else tied


class _Kernel:
    """Writer of the kernel."""

    def __init__(
        self,
        problem: RowsProblem,
        operands: list[OperandView],
        result: OperandView,
        gpu: GpuTarget,
        shape: RowShape | None,
    ) -> None:
        self.shape = shape
        # Operands that all rows have in common, such as the weights of a norm, and those of them that are loaded before
        # the wait for the previous launch.
        self.shared = [i for i, view in enumerate(operands) if list(view.index_map) == ["n"]]
        self.early: list[int] = []
        views = [*operands, result]
        self.operands, self.result, self.gpu = operands, result, gpu
        self.names = merge_rows(views, [name for name in result.index_map if name.startswith("d")])
        wide = [view for view in views if view.runs_along("n")]
        if not any(view.runs_along("n") for view in operands):
            raise EncodingError(f"rows {problem.program}: found no operand with rows, expected at least one")
        self.n = extent_of(wide, "n")
        self.program = in_single(problem.program)
        self.types = [view.nominal for view in operands]
        self.extents = {name: extent_of(views, name) for name in self.names}
        self.total: Expr = prod(self.extents.values())
        self.lanes = lanes_for(self.n, [view.nominal for view in wide])

    def write(self) -> None:
        """Write the launch."""
        if any(isinstance(extent, int) and extent == 0 for extent in (*self.extents.values(), self.n)):
            # Reductions of empty rows are rejected earlier.
            empty_launch()
            return
        plan, kept, shape, late = self._plan_registers()
        shape = self.shape or shape or looped_shape(self.n, self.lanes, self.total, self.gpu)
        grid = int64(at_least_one(ceil_div(self.total, shape.rows))) * shape.cluster
        with launch(grid, shape.block, shape.cluster) as place:
            for view in (*self.operands, self.result):
                view.open(raw=view.nominal in ("bfloat16", "bool"))
            if shape.cluster > 1:
                first = materialize(tirx.floordiv(place.block, shape.cluster))
                thread = place.rank * shape.block + place.thread
            else:
                first, thread = materialize(place.block * shape.rows), place.thread
            if isinstance(self.total, int):
                self._rows(plan, kept, late, shape, first, thread)
            else:
                with T.If(first < self.total), T.Then():
                    self._rows(plan, kept, late, shape, first, thread)

    def _rows(self, plan: RowPlan, kept: str, late: frozenset[int], shape: RowShape, first: Expr, thread: Expr) -> None:
        row, is_row = first, None
        if shape.rows > 1:
            row = materialize(first + tirx.Cast("int64", thread // shape.threads))
            if not isinstance(self.total, int) or self.total % shape.rows:
                is_row = row < self.total
                row = materialize(T.min(row, int64(self.total - 1)))
        number = thread if shape.rows == 1 else thread % shape.threads
        places = unravel(row, list(self.extents.values()), place=materialize, rest=materialize)
        at = dict(zip(self.extents, places, strict=True))

        threads = Threads(number, 0 if shape.rows == 1 else thread // shape.threads, is_row)

        def write(shape: RowShape) -> None:
            looped = shape.vectors == 0
            if not looped and isinstance(self.total, int):
                self.early = [number for number in self.shared if number not in late]
            RowWriter(
                self.program,
                self._plan(False) if looped else plan,
                self.operands,
                self.result,
                shape,
                self.n,
                "float32" if looped else kept,
                late,
                threads,
                at,
                self.early,
            ).emit()

        if isinstance(self.n, int) or shape.lanes == 1:
            write(shape)
            return
        # Vectors are used if they divide the length at run time.
        is_cut = tirx.EQ(tirx.floormod(self.n, shape.lanes), tirx.const(0, "int64"))
        either(is_cut, lambda: write(shape), lambda: write(replace(shape, lanes=1)))

    def _plan(self, may_keep: bool) -> RowPlan:
        varying = frozenset(i for i, view in enumerate(self.operands) if view.runs_along("n"))
        return plan_rows(self.program, varying, may_keep, reciprocals=True)

    def _plan_registers(self) -> tuple[RowPlan, str, RowShape | None, frozenset[int]]:
        """Plan of rows in registers, the kept value's type, the shape (None if rows do not fit), and late operands."""
        plan = self._plan(True)
        kept = kept_type(plan, self.program, self.types)
        if kept is None:
            plan, kept = self._plan(False), "float32"
        size = {i: bytes_of(view.nominal) for i, view in enumerate(self.operands) if view.runs_along("n")}
        late = late_operands(plan, size)
        if not isinstance(self.n, int):
            return plan, kept, None, late
        early_sizes = {number: size[number] for number in size if number not in late}
        words = live_bytes(plan, early_sizes, bytes_of(kept)) / 4
        more = sum(size[i] for i in late) / 4
        shape = register_shape(self.n, self.lanes, self.total, words + LATE_FRACTION * more, self.gpu)
        if shape is not None and is_idle(shape, self.total, self.gpu):
            # With low occupancy, nothing hides the latency of late loads.
            thread_elements = shape.vectors * shape.lanes
            late = late if thread_elements * (words + more) > MAX_REGISTERS else frozenset()
        return plan, kept, shape, late
