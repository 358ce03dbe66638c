"""Sort and top-k along an axis: a few launches, each of one kernel.

A block sorts a *tile* of a line in shared memory. Lines of several tiles take further launches:

- For top-k with a small k, each tile outputs its first k elements; these form tiles again, until one is left.
- Otherwise sorted runs are merged in pairs until one is left. The rank of an element in the merged run is its rank in
  its own run plus the number of smaller elements in the other, found by binary search.

Launches exchange pairs of a *key*, an integer that sorts like the value, and the value's index in the line. All pairs
are distinct, so the sort is stable; NaN is greater than every number. With 32-bit keys, a pair is one 64-bit integer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.problem import Dim
from ....target.element_types import bytes_of
from ...core.bounds import BOUNDED
from ...core.builder import Expr, Function, ceil_div, flat, int64
from ...math.extremes import is_nan
from .lanes import register
from .launch import inside, launch, sync

TILE = 2048  # maximum elements of a tile; a power of two
_MIN_TOPK_TILE = 256  # minimum elements of a tile of a top-k
_THREADS = 256


@dataclass(frozen=True)
class SortProblem:
    """A sort along an axis."""

    shape: tuple[Dim, ...]  # symbolic extents are names; that of the axis is an integer
    axis: int
    dtype: str  # element type of the data
    descending: bool
    count: int  # number of first elements of each sorted line that are results
    values: bool  # whether the values are a result
    indices: str  # element type of the values' indices in the line; empty where these are not a result

    @property
    def length(self) -> int:
        """Elements of a line."""
        length = self.shape[self.axis]
        assert isinstance(length, int)
        return length

    @property
    def pair_types(self) -> tuple[str, ...]:
        """Element types of the tensors that hold pairs."""
        return ("int64", "int32") if bytes_of(self.dtype) == 8 else ("int64",)


@dataclass(frozen=True)
class SortStep:
    """One launch."""

    length: int  # elements of an input line
    run: int  # elements of a tile, or of each of two runs that are merged
    kept: int  # maximum elements that a tile, or a merged run, outputs
    is_merge: bool
    is_first: bool
    is_last: bool

    @property
    def span(self) -> int:
        """Input elements of an output run."""
        return 2 * self.run if self.is_merge else self.run

    @property
    def spans(self) -> int:
        """Number of output runs of a line."""
        return max(-(-self.length // self.span), 1)

    @property
    def output_length(self) -> int:
        """Elements of an output line."""
        return (self.spans - 1) * self.kept + min(self.kept, self.length - (self.spans - 1) * self.span)


def sort_steps(problem: SortProblem, tile: int = TILE) -> list[SortStep]:
    """The launches of a sort, in order. `tile`: maximum elements of a tile, a power of two."""
    steps: list[SortStep] = []
    is_topk = 2 * problem.count <= tile
    # Short tiles take fewer stages where only few of their elements are kept.
    topk_tile = min(tile, max(_MIN_TOPK_TILE, _ceil_power_of_two(4 * problem.count)))

    def run_of(length: int) -> int:
        return _ceil_power_of_two(length) if length <= tile else topk_tile if is_topk else tile

    length, run = problem.length, run_of(problem.length)
    is_merge = False
    while True:
        kept = min(problem.count, 2 * run if is_merge else run)
        step = SortStep(length, run, kept, is_merge, not steps, False)
        if step.spans == 1:
            return [*steps, SortStep(length, run, kept, is_merge, not steps, True)]
        steps.append(step)
        length = step.output_length
        is_merge, run = not is_topk, run_of(length) if is_topk else kept


def _ceil_power_of_two(length: int) -> int:
    """Round up to a power of two, at least two."""
    return max(1 << max(length - 1, 0).bit_length(), 2)


def sort_kernel(problem: SortProblem, step: SortStep) -> tirx.PrimFunc:
    """Kernel of one launch.

    Its parameters are the data, for the first launch and for the last one of a sort that returns values; input pairs,
    except for the first launch; and the results of the sort, or output pairs, whose shape is that of the data without
    the axis, followed by `SortStep.output_length`.
    """
    function = Function("sort")
    with function:
        shape = [function.extent(dim) for dim in problem.shape]
        extents: list[Expr] = [function.symbol(dim) if isinstance(dim, str) else dim for dim in problem.shape]
        outer, inner = prod(extents[: problem.axis]), prod(extents[problem.axis + 1 :])
        lines = outer * inner
        needs_data = step.is_first or (step.is_last and problem.values)
        data = [("data", shape, problem.dtype)] if needs_data else []
        others = [*shape[: problem.axis], *shape[problem.axis + 1 :]]
        source = [] if step.is_first else _pair_tensors("source", [*others, int64(step.length)], problem)
        if step.is_last:
            result = [*shape[: problem.axis], int64(problem.count), *shape[problem.axis + 1 :]]
            types = [problem.dtype] * problem.values + [problem.indices] * bool(problem.indices)
            target = [(f"result{i}", result, dtype) for i, dtype in enumerate(types)]
        else:
            target = _pair_tensors("target", [*others, int64(step.output_length)], problem)
        arguments = [(function.argument(*each), each[1]) for each in (*data, *source, *target)]
        cuts = len(data), len(data) + len(source)
        with function.body():
            sort = _Sort(problem, step, lines, inner, arguments, cuts)
            if step.is_merge:
                sort.merge()
            else:
                sort.tiles()
    return function.result.with_attrs({BOUNDED: True, "tirx.is_scheduled": True})


def _pair_tensors(name: str, shape: list[Expr], problem: SortProblem) -> list[tuple[str, list[Expr], str]]:
    return [(f"{name}{i}", shape, dtype) for i, dtype in enumerate(problem.pair_types)]


class _Sort:
    def __init__(
        self,
        problem: SortProblem,
        step: SortStep,
        lines: Expr,
        inner: Expr,
        arguments: Sequence[tuple[Any, list[Expr]]],
        cuts: tuple[int, int],
    ) -> None:
        self.problem, self.step, self.lines = problem, step, lines
        self._inner = max(inner, 1) if isinstance(inner, int) else T.max(inner, int64(1))
        self._arguments, self._cuts = arguments, cuts

    def _open(self) -> None:
        """Declare the elements of all parameters inside the launch."""
        views = [flat(argument, shape) for argument, shape in self._arguments]
        first, second = self._cuts
        self._data, self._source, self._target = views[:first], views[first:second], views[second:]

    def tiles(self) -> None:
        """Sort tiles by bitonic networks, several short tiles per block."""
        tile, spans = self.step.run, self.step.spans
        tiles_per_block = max(_THREADS // tile, 1)
        size = tiles_per_block * tile
        threads = size // 2
        units = self.lines * spans
        with launch(ceil_div(units, tiles_per_block), threads) as (block, thread):
            self._open()
            shared = [T.alloc_buffer((size,), dtype, scope="shared") for dtype in self.problem.pair_types]
            for half in range(2):
                shared_index = thread + half * threads
                unit, index = block * tiles_per_block + shared_index // tile, shared_index % tile
                position = unit % spans * tile + index
                pair_registers = [register(dtype, 1) for dtype in self.problem.pair_types]
                for register_, dtype in zip(pair_registers, self.problem.pair_types, strict=True):
                    T.buffer_store(register_, tirx.const(tirx.max_value(dtype).value, dtype), [int64(0)])
                with T.If(tirx.all(unit < int64(units), position < self.step.length)), T.Then():
                    self._read(unit // spans, position, pair_registers)
                for memory, register_ in zip(shared, pair_registers, strict=True):
                    T.buffer_store(memory, register_[int64(0)], [shared_index])
            self._network(shared, thread, tile)
            sync()
            for half in range(2):
                shared_index = thread + half * threads
                unit, index = block * tiles_per_block + shared_index // tile, shared_index % tile
                exists = unit % spans * tile + index < self.step.length
                with T.If(tirx.all(unit < int64(units), index < self.step.kept, exists)), T.Then():
                    pairs = [memory[shared_index] for memory in shared]
                    self._write(unit // spans, unit % spans * self.step.kept + index, pairs)

    def _network(self, shared: Sequence[Any], thread: Expr, tile: int) -> None:
        """Write the stages of a bitonic sort: runs of doubling length, alternately ascending and descending."""
        stages = tile.bit_length() - 1
        with T.serial(int64(stages)) as stage, T.serial(stage + 1) as substage:
            sync()
            log = stage - substage
            distance = tirx.shift_left(int64(1), log)
            # The thread's number with a 0 inserted at the bit in which the two compared indices differ.
            first = tirx.shift_left(tirx.shift_right(thread, log), log + 1) + tirx.bitwise_and(thread, distance - 1)
            is_upward = tirx.EQ(tirx.bitwise_and(tirx.shift_right(first % tile, stage + 1), int64(1)), int64(0))
            second = first + distance
            pairs = [[register(str(m.dtype), 1) for m in shared] for _ in range(2)]
            for registers, index in zip(pairs, (first, second), strict=True):
                for register_, memory in zip(registers, shared, strict=True):
                    T.buffer_store(register_, memory[index], [int64(0)])
            lower, upper = ([register_[int64(0)] for register_ in registers] for registers in pairs)
            with T.If(tirx.Select(is_upward, _is_before(upper, lower), _is_before(lower, upper))), T.Then():
                for memory, low, up in zip(shared, lower, upper, strict=True):
                    T.buffer_store(memory, up, [first])
                    T.buffer_store(memory, low, [second])

    def merge(self) -> None:
        """Merge two runs: each thread finds the rank of one pair by binary search in the other run."""
        step, length = self.step, self.step.length
        units = self.lines * length
        with launch(ceil_div(units, _THREADS), _THREADS) as (block, thread):
            self._open()
            number = block * _THREADS + thread
            with inside(number, units, _THREADS):
                line, position = number // length, number % length
                span, index = position // step.span, position % step.span
                is_second = index >= step.run
                own_pair = [register(dtype, 1) for dtype in self.problem.pair_types]
                zero = int64(0)
                for register_, memory in zip(own_pair, self._source, strict=True):
                    T.buffer_store(register_, memory[number], [zero])
                # Begin of the other run, and the search interval in it.
                begin = span * step.span + tirx.Select(is_second, zero, int64(step.run))
                low, high = register("int64", 1), register("int64", 1)
                T.buffer_store(low, zero, [zero])
                run_length = T.max(T.min(int64(length) - begin, int64(step.run)), zero)
                T.buffer_store(high, run_length, [zero])
                with T.serial(int64(step.run.bit_length())), T.If(low[zero] < high[zero]), T.Then():
                    middle = register("int64", 1)
                    T.buffer_store(middle, (low[zero] + high[zero]) // 2, [zero])
                    offset = line * length + begin + middle[zero]
                    other_pair = [memory[offset] for memory in self._source]
                    with T.If(_is_before(other_pair, [register_[zero] for register_ in own_pair])):
                        with T.Then():
                            T.buffer_store(low, middle[zero] + 1, [zero])
                        with T.Else():
                            T.buffer_store(high, middle[zero], [zero])
                rank = low[zero] + index - tirx.Select(is_second, int64(step.run), zero)
                with T.If(rank < step.kept), T.Then():
                    self._write(line, span * step.kept + rank, [register_[zero] for register_ in own_pair])

    def _element(self, line: Expr, index: Expr, length: int) -> Expr:
        """Offset of an element of a line, in a tensor whose axis has `length` elements."""
        return line // self._inner * (length * int64(self._inner)) + line % self._inner + index * int64(self._inner)

    def _read(self, line: Expr, position: Expr, pair: Sequence[Any]) -> None:
        """Load a pair of a line into registers."""
        if not self.step.is_first:
            for part, memory in zip(pair, self._source, strict=True):
                T.buffer_store(part, memory[line * self.step.length + position], [int64(0)])
            return
        value = self._data[0][self._element(line, position, self.problem.length)]
        key = _key(value, self.problem.descending)
        values = [key, position]
        if len(pair) == 1:
            values = [tirx.bitwise_or(tirx.shift_left(tirx.Cast("int64", key), int64(32)), position)]
        for part, item in zip(pair, values, strict=True):
            dtype = str(part.dtype)
            T.buffer_store(part, item if str(item.ty.dtype) == dtype else tirx.Cast(dtype, item), [int64(0)])

    def _write(self, line: Expr, rank: Expr, pair: Sequence[Expr]) -> None:
        """Store a pair at its rank: as a pair, or its value and index in the last launch."""
        if not self.step.is_last:
            for memory, part in zip(self._target, pair, strict=True):
                T.buffer_store(memory, part, [line * self.step.output_length + rank])
            return
        problem = self.problem
        index = pair[1] if len(pair) == 2 else tirx.bitwise_and(pair[0], tirx.const(0x7FFFFFFF, "int64"))
        target, offset = list(self._target), self._element(line, rank, problem.count)
        if problem.values:
            index64 = index if len(pair) == 1 else tirx.Cast("int64", index)
            value = self._data[0][self._element(line, index64, problem.length)]
            T.buffer_store(target.pop(0), value, [offset])
        if problem.indices:
            T.buffer_store(target[0], tirx.Cast(problem.indices, index), [offset])


def _is_before(one: Sequence[Expr], other: Sequence[Expr]) -> Expr:
    """Return whether a pair comes before another one."""
    if len(one) == 1:
        return one[0] < other[0]
    return tirx.any(one[0] < other[0], tirx.all(tirx.EQ(one[0], other[0]), one[1] < other[1]))


def _key(value: Expr, descending: bool) -> Expr:
    """Key of a value: an int32 (int64 for 64-bit types) that sorts in the requested order."""
    dtype = str(value.ty.dtype)
    wide = "int64" if bytes_of(dtype) == 8 else "int32"
    if "float" in dtype:
        number = "float64" if wide == "int64" else "float32"
        value = value if dtype == number else tirx.Cast(number, value)
        positive = tirx.const(tirx.max_value(wide).value, wide)
        zero = tirx.const(0, number)
        bits = tirx.reinterpret(tvm.ir.PrimType(wide), tirx.Select(tirx.EQ(value, zero), zero, value))  # -0 is 0
        ordered = tirx.Select(bits < tirx.const(0, wide), tirx.bitwise_xor(bits, positive), bits)
        key = tirx.Select(is_nan(value), positive, ordered)
    elif dtype == "uint64" or dtype == "uint32":
        bits = tirx.reinterpret(tvm.ir.PrimType(wide), value)
        key = tirx.bitwise_xor(bits, tirx.min_value(wide))
    else:
        key = value if dtype == wide else tirx.Cast(wide, value)
    return tirx.bitwise_not(key) if descending else key
