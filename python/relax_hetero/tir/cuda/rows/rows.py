"""Kernels of GPUs on rows: softmax, norms, reductions along the last axis and elementwise work around them.

Memory is read once: a row's elements wait in the registers of its threads between the passes over them. Several short
rows share a warp, long ones have a block. Rows that no block can hold, and those whose length only the run knows, are
read anew by every pass, from the caches where they fit these.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.problem import RowsProblem
from ....errors import EncodingError
from ....target.element_types import bytes_of
from ....target.gpu_target import GpuTarget
from ...core.builder import Expr, Function, ceil_div, either, int64, materialize
from ...core.ties import tied_to
from ...core.view import OperandView, extent_of
from ...core.work_split import unravel
from ...rows.row_plan import RowPlan, plan_rows
from ...rows.rows import in_single, merge_rows
from ..core.launch import at_least_one, launch
from ..core.storage_place import nothing
from .row_code import RowWriter, Threads, kept_type
from .row_registers import live_bytes, needed_late
from .row_shape import LATE, MAX_WORDS, RowShape, held_shape, is_idle, lanes_for, looped_shape


def rows_kernel(problem: RowsProblem, gpu: GpuTarget, shape: RowShape | None = None) -> tirx.PrimFunc:
    """The kernel of a program of rows, one launch; its parameters are those that `RowsProblem` says.

    Parameters
    ----------
    shape : RowShape, optional
        How threads share the rows, where it is not to be chosen here: for measurements and tests.

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
            _Kernel(problem, operands, result, gpu, shape).write()
    return tied_to(function.result, problem.operands, 0, problem.result)


class _Kernel:
    """One kernel while it is written."""

    def __init__(
        self,
        problem: RowsProblem,
        operands: list[OperandView],
        result: OperandView,
        gpu: GpuTarget,
        shape: RowShape | None,
    ) -> None:
        self.shape = shape
        views = [*operands, result]
        self.operands, self.result, self.gpu = operands, result, gpu
        self.names = merge_rows(views, [name for name in result.index_map if name.startswith("d")])
        wide = [view for view in views if view.runs_along("n")]
        if not any(view.runs_along("n") for view in operands):
            raise EncodingError(f"rows {problem.program}: found no operand that runs along the rows")
        self.n = extent_of(wide, "n")
        self.program = in_single(problem.program)
        self.types = [view.nominal for view in operands]
        self.extents = {name: extent_of(views, name) for name in self.names}
        self.total: Expr = prod(self.extents.values())
        self.lanes = lanes_for(self.n, [view.nominal for view in wide])

    def write(self) -> None:
        """The launch: the threads' loops, and in them the row of each."""
        if any(isinstance(extent, int) and extent == 0 for extent in (*self.extents.values(), self.n)):
            # A reduction of nothing is not worth code of its own: shapes are checked before.
            nothing()
            return
        plan, kept, shape, late = self._held()
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

        where = Threads(number, 0 if shape.rows == 1 else thread // shape.threads, is_row)

        def write(shape: RowShape) -> None:
            looped = shape.vectors == 0
            RowWriter(
                self.program,
                self._plan(False) if looped else plan,
                self.operands,
                self.result,
                shape,
                self.n,
                "float32" if looped else kept,
                late,
                where,
                at,
            ).emit()

        if isinstance(self.n, int) or shape.lanes == 1:
            write(shape)
            return
        # In vectors if the length is a multiple of these.
        is_cut = tirx.EQ(tirx.floormod(self.n, shape.lanes), tirx.const(0, "int64"))
        either(is_cut, lambda: write(shape), lambda: write(replace(shape, lanes=1)))

    def _plan(self, may_keep: bool) -> RowPlan:
        varying = frozenset(i for i, view in enumerate(self.operands) if view.runs_along("n"))
        return plan_rows(self.program, varying, may_keep, reciprocals=True)

    def _held(self) -> tuple[RowPlan, str, RowShape | None, frozenset[int]]:
        """The plan of rows in registers, the kept value's type, the threads, and the operands that are loaded late.

        No threads where rows do not fit.
        """
        plan = self._plan(True)
        kept = kept_type(plan, self.program, self.types)
        if kept is None:
            plan, kept = self._plan(False), "float32"
        size = {i: bytes_of(view.nominal) for i, view in enumerate(self.operands) if view.runs_along("n")}
        late = needed_late(plan, size)
        if not isinstance(self.n, int):
            return plan, kept, None, late
        waiting = {number: size[number] for number in size if number not in late}
        words = live_bytes(plan, waiting, bytes_of(kept)) / 4
        more = sum(size[i] for i in late) / 4
        shape = held_shape(self.n, self.lanes, self.total, words + LATE * more, self.gpu)
        if shape is not None and is_idle(shape, self.total, self.gpu):
            # There is nothing else to do while a late load is under way.
            own = shape.vectors * shape.lanes
            late = late if own * (words + more) > MAX_WORDS else frozenset()
        return plan, kept, shape, late
