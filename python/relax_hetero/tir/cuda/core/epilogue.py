"""Epilogue of the sums of a product, for a few neighbouring elements of a thread.

Tensor cores, multiply-adds and few rows leave their sums in registers in different places; this writer is told where
elements are and how their sums are read, and writes the loads of operands, the expression, masks and the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.expression import Expression
from ....encoding.problem import MatmulProblem
from ...core.builder import Expr, Function, lane_indices
from ...core.view import Coordinates
from .expression import emit
from .operand import GpuOperand


@dataclass(frozen=True)
class EpilogueWriter:
    """Stores sums of a product; its operands are parameters of the kernel.

    Attributes
    ----------
    expression : Expression
        ``x0`` is the sum, after `init`.
    init : GpuOperand or None
        Tensor that the sums start from.
    views : tuple of GpuOperand
        Views of ``x1``, ``x2``, ...
    result : GpuOperand
    acc_dtype : str
        Element type of ``x0``; sums are cast to it.
    """

    expression: Expression
    init: GpuOperand | None
    views: tuple[GpuOperand, ...]
    result: GpuOperand
    acc_dtype: str

    @staticmethod
    def of(function: Function, problem: MatmulProblem) -> EpilogueWriter:
        """Declares init, the epilogue's operands and the result, the next and last parameters of `function`."""
        init = GpuOperand(function, "init", problem.init) if problem.init else None
        operands = problem.epilogue.operands if problem.epilogue else ()
        views = tuple(GpuOperand(function, f"x{i + 1}", operand) for i, operand in enumerate(operands))
        result = GpuOperand(function, "result", problem.result)
        expression = problem.epilogue.expression if problem.epilogue else Expression.operand(0)
        return EpilogueWriter(expression, init, views, result, problem.acc_dtype)

    @property
    def operands(self) -> list[GpuOperand]:
        """The parameters, in order."""
        return [*([self.init] if self.init else []), *self.views, self.result]

    def reads_in_vectors(self, width: int, along: str) -> bool:
        """True if it reads an operand as large as the result, and `width` neighbours are a vector of the result."""
        is_large = any({"m", "n"} <= set(view.index_map) for view in self._read)
        return is_large and width > 1 and self.result.vector(along) % width == 0

    def registers(self, turns: int, width: int, along: str = "n") -> list[Any]:
        """Registers for what the operands have beside `width` neighbours of the result, `turns` times; see `load`."""
        sizes = [turns * (width if view.runs_along(along) else 1) for view in self._read]
        return [
            T.alloc_buffer((size,), view.dtype, scope="local") for size, view in zip(sizes, self._read, strict=True)
        ]

    def load(self, held: Sequence[Any], turn: Expr, at: Coordinates, width: int, along: str = "n") -> None:
        """Read what the operands have beside neighbours of the result, for `write` of the same turn.

        Loads of several turns are on their way together; those of `write` itself follow each other.
        """
        for view, registers in zip(self._read, held, strict=True):
            if not view.runs_along(along):
                T.buffer_store(registers, _one(view, at), [turn])
            elif view.vector(along) % width:
                for i in range(width):
                    T.buffer_store(registers, _one(view, {**at, along: at[along] + i}), [turn * width + i])
            else:
                values = view.data[lane_indices(view.address(at), width)]
                T.buffer_store(registers, values, [lane_indices(tirx.const(0, "int32") + turn * width, width)])

    def write(
        self,
        sums: Sequence[Callable[[], Expr]],
        at: Coordinates,
        along: str = "n",
        exists: Sequence[Expr | None] = (),
        end: Expr | None = None,
        held: tuple[Sequence[Any], Expr] | None = None,
    ) -> None:
        """Store neighbouring elements.

        Parameters
        ----------
        sums : sequence of callable
            Functions that read the sum of each; at most 16 bytes of them.
        at : Coordinates
            Coordinates of the first element; along `along`, a multiple of their number.
        along : str
            The dimension that they are neighbours in, "n" or "m".
        exists : sequence of PrimExpr or None
            Conditions on the other coordinates; nothing is read or written where one does not hold.
        end : PrimExpr, optional
            Elements from here on do not exist; None: all do.
        held : tuple, optional
            Registers that `load` has filled, and the turn.
        """
        with ExitStack() as stack:
            for condition in exists:
                if condition is not None:
                    stack.enter_context(T.If(condition))
                    stack.enter_context(T.Then())
            self._write(sums, at, along, end, held)

    def _write(
        self,
        sums: Sequence[Callable[[], Expr]],
        at: Coordinates,
        along: str,
        end: Expr | None,
        held: tuple[Sequence[Any], Expr] | None,
    ) -> None:
        width = len(sums)
        if width == 1 or self.result.vector(along) % width:
            for i, read in enumerate(sums):
                place = {**at, along: at[along] + i}
                with ExitStack() as stack:
                    if end is not None:
                        stack.enter_context(T.If(place[along] < end))
                        stack.enter_context(T.Then())
                    beside = [_one(view, place) for view in self._read]
                    if held is not None:
                        beside = [values[i] for values in self._held(held, along, width)]
                    value = self._value(read(), beside)
                    T.buffer_store(self.result.data, self.result.bits(value), [self.result.address(place)])
            return
        with ExitStack() as stack:
            if end is not None:  # a multiple of the width, since the result's extent is
                stack.enter_context(T.If(at[along] < end))
                stack.enter_context(T.Then())
            if held is None:
                loaded = [_neighbours(view, at, along, width) for view in self._read]
            else:
                loaded = self._held(held, along, width)
            out = T.alloc_buffer((width,), self.result.dtype, scope="local")
            for i, read in enumerate(sums):
                value = self._value(read(), [values[i] for values in loaded])
                T.buffer_store(out, self.result.bits(value), [tirx.const(i, "int32")])
            start = lane_indices(self.result.address(at), width)
            T.buffer_store(self.result.data, out[lane_indices(tirx.const(0, "int32"), width)], [start])

    def _held(self, held: tuple[Sequence[Any], Expr], along: str, width: int) -> list[list[Expr]]:
        registers, turn = held
        return [
            [one[turn * width + i] for i in range(width)] if view.runs_along(along) else [one[turn]] * width
            for view, one in zip(self._read, registers, strict=True)
        ]

    @property
    def _read(self) -> list[GpuOperand]:
        return self.operands[:-1]

    def _value(self, total: Expr, loaded: list[Expr]) -> Expr:
        dtypes = [self.acc_dtype, *(view.nominal for view in self.views)]
        if self.init:
            wide = str(total.ty.dtype)
            total = total + T.cast(self.init.typed(loaded[0]), wide)
            loaded = loaded[1:]
        total = T.cast(total, self.acc_dtype)
        values = [total, *(view.typed(value) for view, value in zip(self.views, loaded, strict=True))]
        value = emit(self.expression, values, dtypes)
        return value if str(value.ty.dtype) == self.result.nominal else T.cast(value, self.result.nominal)


def _one(view: GpuOperand, at: Coordinates) -> Expr:
    return view.data[view.address(at)]


def _neighbours(view: GpuOperand, at: Coordinates, along: str, width: int) -> list[Expr]:
    """Elements of an operand beside `width` neighbours of the result; as one access where it is aligned."""
    if not view.runs_along(along):
        return [T.bind(_one(view, at))] * width
    if view.vector(along) % width:
        return [_one(view, {**at, along: at[along] + i}) for i in range(width)]
    held = T.alloc_buffer((width,), view.dtype, scope="local")
    everything = lane_indices(tirx.const(0, "int32"), width)
    T.buffer_store(held, view.data[lane_indices(view.address(at), width)], [everything])
    return [held[tirx.const(i, "int32")] for i in range(width)]
