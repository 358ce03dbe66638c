"""Elementwise kernels on row-major or packed storage, in one launch.

A thread computes vectors of up to 16 bytes of the result, in storage order. Operands with the result's layout are
loaded as the same vectors; others by their logical position.
"""

from __future__ import annotations

from math import prod

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.problem import ElementwiseProblem
from ...target.element_types import bytes_of
from ...target.gpu_target import VECTOR_BYTES, GpuTarget
from ..core.builder import Expr, Function, ceil_div, int64, materialize, plain_extent
from ..core.packed_storage import is_multiple
from ..core.ties import tied_to
from ..elementwise.elementwise import ElementwiseStorages
from .core.expression import emit
from .core.launch import at_least_one
from .core.storage_position import THREADS, common_lanes, empty_launch, innermost, position_of, run_length
from .core.vectors import MAX_LANES, VectorRegisters

THREAD_VECTORS = 2  # vectors per thread, if there are enough to occupy the GPU
RESIDENT_THREADS_PER_SM = 2048  # resident threads per multiprocessor
_ZERO = tirx.const(0, "int64")


def elementwise_kernel(problem: ElementwiseProblem, gpu: GpuTarget) -> tirx.PrimFunc:
    """Kernel of an elementwise expression; `ElementwiseProblem` documents its parameters.

    Padding of the result is computed from the operands' padding; consumers of packed results never read it. Raises
    EncodingError if an operand is packed in another way than the result, or an op does not exist for its type.
    """
    function = Function("elementwise", registers="local")
    with function:
        storages = ElementwiseStorages(function, problem)
        with function.body():
            _Kernel(problem, storages, gpu).write()
    return tied_to(function.result, problem.operands, 0, problem.result)


class _Kernel:
    """Writer of the kernel."""

    def __init__(self, problem: ElementwiseProblem, storages: ElementwiseStorages, gpu: GpuTarget) -> None:
        self.problem, self.operands, self.result, self.gpu = problem, storages.operands, storages.result, gpu
        self.alike, self.extents = storages.alike, storages.extents
        self.names = list(problem.result.index_map)
        self.dtypes = [operand.dtype for operand in problem.operands]
        self.is_flat = all(
            alike or all(name == "1" for name in operand.index_map)
            for alike, operand in zip(self.alike, problem.operands, strict=True)
        )
        max_lanes = min(MAX_LANES, VECTOR_BYTES // min(map(bytes_of, [*self.dtypes, problem.result.dtype])))
        run = run_length(problem.result.layout, problem.result.shape, problem.result.dtype)
        self.lanes = max_lanes if self.is_flat else common_lanes(max_lanes, [run])
        self.total = prod(map(plain_extent, self.result.physical))
        self._runs = [not self.is_flat and self._runs_along(i) for i in range(len(self.operands))]

    def write(self) -> None:
        """Write the launch."""
        if isinstance(self.total, int) and self.total == 0:
            empty_launch()
            return
        vectors = ceil_div(self.total, self.lanes)
        resident = self.gpu.multiprocessors * RESIDENT_THREADS_PER_SM
        count = THREAD_VECTORS if isinstance(vectors, int) and vectors >= resident * THREAD_VECTORS else 1
        grid = int64(at_least_one(ceil_div(vectors, THREADS * count)))
        with (
            T.thread_binding(grid, thread="blockIdx.x") as block,
            T.thread_binding(THREADS, thread="threadIdx.x") as thread,
        ):
            for storage in (*self.operands, self.result):
                storage.open(raw=storage.nominal in ("bfloat16", "bool"))
            first = materialize(block * (THREADS * count) + tirx.Cast("int64", thread))
            numbers = [first if i == 0 else materialize(first + i * THREADS) for i in range(count)]
            num_full = self.total // self.lanes
            is_whole = isinstance(self.total, int) and self.total % (self.lanes * THREADS * count) == 0
            if is_whole and num_full:
                self._vectors(numbers)
                return
            for number in numbers:
                with T.If(number < num_full), T.Then():
                    self._vectors([number])
            if self.lanes > 1 and not (isinstance(self.total, int) and self.total % self.lanes == 0):
                rest = self.total - num_full * self.lanes
                number = materialize(num_full * self.lanes + first)
                with T.If(first < rest), T.Then():
                    values = [self._single(i, number) for i in range(len(self.operands))]
                    T.buffer_store(self.result.data, self._value(values), [number])

    def _vectors(self, numbers: list[Expr]) -> None:
        """Compute vectors, with all loads before the first computation, so that they are in flight together."""
        places = [
            None if self.is_flat else [materialize(at) for at in position_of(self.result, number, self.lanes)]
            for number in numbers
        ]
        registers = [
            [self._load(i, number, place) if alike or self._runs[i] else None for i, alike in enumerate(self.alike)]
            for number, place in zip(numbers, places, strict=True)
        ]
        for number, place, loaded in zip(numbers, places, registers, strict=True):
            output = VectorRegisters(self.result, _ZERO, self.lanes, 1)
            for lane in range(self.lanes):
                values = [
                    register.get(lane) if register is not None else self._broadcast(i, place, lane)
                    for i, register in enumerate(loaded)
                ]
                output.set(lane, self._value(values))
            output.store(0, number, None)

    def _load(self, index: int, number: Expr, place: list[Expr] | None) -> VectorRegisters:
        first = _ZERO if self.alike[index] else self._offset(index, place, 0)
        register = VectorRegisters(self.operands[index], first, self.lanes, 1)
        register.load(0, number if self.alike[index] else _ZERO, None)
        return register

    def _runs_along(self, index: int) -> bool:
        """Return whether vectors of the result are aligned vectors of a row-major operand."""
        layout, shape = self.result.layout, self.problem.result.shape
        d = innermost(layout, shape)
        return (
            layout.tile(d) == 1
            and isinstance(self.extents[d], int)
            and self.problem.operands[index].index_map[-1:] == (self.names[d],)
        )

    def _broadcast(self, index: int, place: list[Expr] | None, lane: int) -> Expr:
        """Element of an operand with another layout than the result."""
        return self.operands[index].data[self._offset(index, place, lane)]

    def _offset(self, index: int, place: list[Expr] | None, lane: int) -> Expr:
        position: dict[int, Expr] = {}
        for dim, name in enumerate(self.problem.operands[index].index_map):
            if name == "1":
                continue
            assert place is not None
            d = self.names.index(name)
            layout = self.result.layout
            c = place[d] + lane if d == innermost(layout, self.problem.result.shape) else place[d]
            position[dim] = c if is_multiple(self.extents[d], layout.tile(d)) else T.min(c, int64(self.extents[d]) - 1)
        return self.operands[index].offset(position, {})

    def _single(self, index: int, number: Expr) -> Expr:
        """Element of the tail after the last vector; operands have the result's layout or are scalars."""
        return self.operands[index].data[number if self.alike[index] else _ZERO]

    def _value(self, values: list[Expr]) -> Expr:
        typed = [storage.typed(value) for storage, value in zip(self.operands, values, strict=True)]
        return self.result.bits(emit(self.problem.expression, typed, self.dtypes))
