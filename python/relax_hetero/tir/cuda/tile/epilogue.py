"""Epilogue of a product for a few neighbouring accumulators of a thread.

Tensor core, SIMT and skinny kernels leave accumulators in registers in different layouts. Given their coordinates and
functions that read them, this writer emits loads of operands, the expression, predicates and the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.expression import Expression
from ....encoding.problem import Epilogue, Operand
from ...core.builder import Expr, Function, lane_indices
from ...core.view import Coordinates
from ..core.expression import emit
from ..core.operand import GpuOperand


@dataclass(frozen=True)
class EpilogueWriter:
    """Writer of epilogues; its operands are parameters of the kernel."""

    expression: Expression  # ``x0`` is the accumulator plus `init`
    init: GpuOperand | None  # initial values of accumulators
    views: tuple[GpuOperand, ...]  # views of ``x1``, ``x2``, ..
    result: GpuOperand
    acc_dtype: str  # element type of ``x0``; accumulators are cast to it

    @staticmethod
    def of(
        function: Function, epilogue: Epilogue | None, result: Operand, acc_dtype: str, init: Operand | None = None
    ) -> EpilogueWriter:
        """Declare init, the epilogue's operands and the result, the last parameters of `function`."""
        start = GpuOperand(function, "init", init) if init else None
        epilogue = epilogue or Epilogue(Expression.operand(0))
        views = tuple(GpuOperand(function, f"x{i + 1}", operand) for i, operand in enumerate(epilogue.operands))
        return EpilogueWriter(epilogue.expression, start, views, GpuOperand(function, "result", result), acc_dtype)

    @property
    def operands(self) -> list[GpuOperand]:
        """The parameters, in order."""
        return [*([self.init] if self.init else []), *self.views, self.result]

    def reads_in_vectors(self, width: int, along: str) -> bool:
        """Return whether an operand is as large as the result, and `width` neighbours are a vector of the result."""
        is_large = any({"m", "n"} <= set(view.index_map) for view in self._read)
        return is_large and width > 1 and self.result.vector(along) % width == 0

    def registers(self, count: int, width: int, along: str = "n") -> list[Any]:
        """Allocate registers for the operands of `count` vectors of `width` neighbouring results; see `load`."""
        sizes = [count * (width if view.runs_along(along) else 1) for view in self._read]
        return [
            T.alloc_buffer((size,), view.dtype, scope="local") for size, view in zip(sizes, self._read, strict=True)
        ]

    def load(self, loaded: Sequence[Any], index: Expr, at: Coordinates, width: int, along: str = "n") -> None:
        """Load the operands of vector `index` of neighbouring results, for a later `write`.

        Loads of several vectors are in flight together, unlike those of `write` itself.
        """
        for view, registers in zip(self._read, loaded, strict=True):
            if not view.runs_along(along):
                T.buffer_store(registers, _load_scalar(view, at), [index])
            elif view.vector(along) % width:
                for i in range(width):
                    T.buffer_store(registers, _load_scalar(view, {**at, along: at[along] + i}), [index * width + i])
            else:
                values = view.data[lane_indices(view.address(at), width)]
                T.buffer_store(registers, values, [lane_indices(tirx.const(0, "int32") + index * width, width)])

    def write(
        self,
        sums: Sequence[Callable[[], Expr]],
        at: Coordinates,
        along: str = "n",
        exists: Sequence[Expr | None] = (),
        end: Expr | None = None,
        loaded: tuple[Sequence[Any], Expr] | None = None,
        send: Callable[[Sequence[Expr], Expr], None] | None = None,
    ) -> None:
        """Store neighbouring elements.

        Parameters
        ----------
        sums : sequence of callable
            Functions that read the accumulator of each element, or several, which are the first operands of the
            expression; at most 16 bytes of results.
        at : Coordinates
            Coordinates of the first element; along `along`, a multiple of their number.
        along : str
            The dimension in which they are neighbours, "n" or "m".
        exists : sequence of PrimExpr or None
            Predicates of the other coordinates.
        end : PrimExpr, optional
            Extent of `along`, if some elements may be beyond it.
        loaded : tuple, optional
            Registers that `load` has filled, and the vector's index.
        send : callable, optional
            Function that writes the sending of a vector: of the elements that are stored, and the number of the first.
            Elements must be stored in vectors.
        """
        width, vector = len(sums), self.result.vector(along)
        # A vector does not cross the end, which is a multiple of its width.
        groups = [sums] if width > 1 and vector % width == 0 else [[read] for read in sums]
        with where(exists):
            for i, group in enumerate(groups):
                place = {**at, along: at[along] + i}
                with where([] if end is None else [place[along] < end]):
                    if loaded is None:
                        own = self.registers(1, len(group), along), tirx.const(0, "int32")
                        self.load(*own, place, len(group), along)
                        operands = self._loaded_values(own, along, len(group))
                    else:
                        operands = [values[i:] for values in self._loaded_values(loaded, along, width)]
                    self._write(group, place, operands, send)

    def _write(
        self,
        sums: Sequence[Callable[[], Expr]],
        at: Coordinates,
        operands: list[list[Expr]],
        send: Callable[[Sequence[Expr], Expr], None] | None,
    ) -> None:
        """Compute, store and perhaps send the elements of one access."""
        width = len(sums)
        assert send is None or width > 1, "what is sent is stored in vectors"
        out = T.alloc_buffer((width,), self.result.dtype, scope="local") if width > 1 else None
        for i, read in enumerate(sums):
            value = self.result.bits(self._value(read(), [values[i] for values in operands]))
            if out is None:
                T.buffer_store(self.result.data, value, [self.result.address(at)])
            else:
                T.buffer_store(out, value, [tirx.const(i, "int32")])
        if out is not None:
            start = lane_indices(self.result.address(at), width)
            T.buffer_store(self.result.data, out[lane_indices(tirx.const(0, "int32"), width)], [start])
            if send is not None:
                send([out[i] for i in range(width)], self.result.address(at))

    def _loaded_values(self, loaded: tuple[Sequence[Any], Expr], along: str, width: int) -> list[list[Expr]]:
        registers, index = loaded
        return [
            [values[index * width + i] for i in range(width)] if view.runs_along(along) else [values[index]] * width
            for view, values in zip(self._read, registers, strict=True)
        ]

    @property
    def _read(self) -> list[GpuOperand]:
        return self.operands[:-1]

    def _value(self, total: Expr | tuple[Expr, ...], loaded: list[Expr]) -> Expr:
        totals = list(total) if isinstance(total, tuple) else [total]
        dtypes = [*[self.acc_dtype] * len(totals), *(view.nominal for view in self.views)]
        if self.init:
            wide = str(totals[0].ty.dtype)
            totals[0] = totals[0] + T.cast(self.init.typed(loaded[0]), wide)
            loaded = loaded[1:]
        sums = [T.cast(each, self.acc_dtype) for each in totals]
        values = [*sums, *(view.typed(value) for view, value in zip(self.views, loaded, strict=True))]
        value = emit(self.expression, values, dtypes)
        return value if str(value.ty.dtype) == self.result.nominal else T.cast(value, self.result.nominal)


def _load_scalar(view: GpuOperand, at: Coordinates) -> Expr:
    return view.data[view.address(at)]


@contextmanager
def where(conditions: Sequence[Expr | None]) -> Iterator[None]:
    """Context of code under nested predicates; None is always true."""
    with ExitStack() as stack:
        for condition in conditions:
            if condition is not None:
                stack.enter_context(T.If(condition))
                stack.enter_context(T.Then())
        yield
