"""Sorts and the first elements of sorts, along an axis: a few launches, each of one kernel.

A block sorts a *tile* of a line in shared memory. Where a line has more tiles, what they leave is sorted on:

- Few elements are wanted (top-k): each tile leaves only so many, and these are tiles again, until one is left.
- Else neighbouring runs are merged, two to one, until one run is left. An element's place in it is its own place and
  the number of elements of the other run that come before, which a binary search finds.

What the launches hand on are pairs of a *key*, an integer in whose order the values are wanted, and the place in the
line where the value stood. No two pairs are equal, so that equal values keep their order; NaN is greater than every
number. Pairs of keys of 32 bits are one integer of 64.
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

TILE = 2048
"""Elements of a line that a block sorts at once; a power of two."""

_SHORT_TILE = 256
_THREADS = 256


@dataclass(frozen=True)
class SortProblem:
    """A sort along an axis.

    Attributes
    ----------
    shape : tuple of int or str
        Symbolic extents are names; that of the axis is a number.
    dtype : str
        Element type of the data.
    count : int
        How many elements of each sorted line are wanted.
    values : bool
        Whether the values are a result.
    indices : str
        Element type of the places where they stood; empty where these are no result.
    """

    shape: tuple[Dim, ...]
    axis: int
    dtype: str
    descending: bool
    count: int
    values: bool
    indices: str

    @property
    def length(self) -> int:
        """Elements of a line."""
        length = self.shape[self.axis]
        assert isinstance(length, int)
        return length

    @property
    def pair_types(self) -> tuple[str, ...]:
        """Element types of the tensors that hold pairs."""
        return ("int64", "int32") if self._has_wide_keys else ("int64",)

    @property
    def _has_wide_keys(self) -> bool:
        return bytes_of(self.dtype) == 8


@dataclass(frozen=True)
class SortStep:
    """One launch.

    Attributes
    ----------
    length : int
        Elements of a line before it.
    run : int
        Elements of a tile, or of each of two runs that are merged.
    kept : int
        First elements that a tile, or two merged runs, leave at most.
    is_merge, is_first, is_last : bool
    """

    length: int
    run: int
    kept: int
    is_merge: bool
    is_first: bool
    is_last: bool

    @property
    def span(self) -> int:
        """Elements of a line that are made one sorted run."""
        return 2 * self.run if self.is_merge else self.run

    @property
    def spans(self) -> int:
        """How many of them a line has."""
        return max(-(-self.length // self.span), 1)

    @property
    def left(self) -> int:
        """Elements of a line behind it."""
        return (self.spans - 1) * self.kept + min(self.kept, self.length - (self.spans - 1) * self.span)


def sort_steps(problem: SortProblem, tile: int = TILE) -> list[SortStep]:
    """The launches of a sort, in order.

    Parameters
    ----------
    tile : int
        Elements that a block sorts at most, a power of two.
    """
    found: list[SortStep] = []
    takes_few = 2 * problem.count <= tile
    # Of which few are left, short tiles are sorted in fewer steps.
    short = min(tile, max(_SHORT_TILE, _power(4 * problem.count)))

    def run_of(length: int) -> int:
        return _power(length) if length <= tile else short if takes_few else tile

    length, run = problem.length, run_of(problem.length)
    is_merge = False
    while True:
        kept = min(problem.count, 2 * run if is_merge else run)
        step = SortStep(length, run, kept, is_merge, not found, False)
        if step.spans == 1:
            return [*found, SortStep(length, run, kept, is_merge, not found, True)]
        found.append(step)
        length = step.left
        is_merge, run = not takes_few, run_of(length) if takes_few else kept


def _power(length: int) -> int:
    """The power of two, at least two, that is no less than a number."""
    return max(1 << max(length - 1, 0).bit_length(), 2)


def sort_kernel(problem: SortProblem, step: SortStep) -> tirx.PrimFunc:
    """The kernel of a launch.

    Its parameters are the data, if it is the first launch or the last one of a sort that gives values; pairs, if it is
    not the first; then its results: those of the sort, or pairs, whose shape is that of the data without the axis, and
    `SortStep.left`.
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
            target = _pair_tensors("target", [*others, int64(step.left)], problem)
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
        """The elements of all parameters, declared inside the launch."""
        views = [flat(argument, shape) for argument, shape in self._arguments]
        first, second = self._cuts
        self._data, self._source, self._target = views[:first], views[first:second], views[second:]

    def tiles(self) -> None:
        """Blocks sort tiles: by bitonic sorting networks, several short tiles a block."""
        tile, spans = self.step.run, self.step.spans
        together = max(_THREADS // tile, 1)  # tiles of a block
        size = together * tile
        threads = size // 2
        units = self.lines * spans
        with launch(ceil_div(units, together), threads) as (block, thread):
            self._open()
            shared = [T.alloc_buffer((size,), dtype, scope="shared") for dtype in self.problem.pair_types]
            for half in range(2):
                slot = thread + half * threads
                unit, place = block * together + slot // tile, slot % tile
                position = unit % spans * tile + place
                pair = [register(dtype, 1) for dtype in self.problem.pair_types]
                for part, dtype in zip(pair, self.problem.pair_types, strict=True):
                    T.buffer_store(part, tirx.const(tirx.max_value(dtype).value, dtype), [int64(0)])
                with T.If(tirx.all(unit < int64(units), position < self.step.length)), T.Then():
                    self._read(unit // spans, position, pair)
                for memory, part in zip(shared, pair, strict=True):
                    T.buffer_store(memory, part[int64(0)], [slot])
            self._network(shared, thread, tile)
            sync()
            for half in range(2):
                slot = thread + half * threads
                unit, place = block * together + slot // tile, slot % tile
                is_there = unit % spans * tile + place < self.step.length
                with T.If(tirx.all(unit < int64(units), place < self.step.kept, is_there)), T.Then():
                    pairs = [memory[slot] for memory in shared]
                    self._write(unit // spans, unit % spans * self.step.kept + place, pairs)

    def _network(self, shared: Sequence[Any], thread: Expr, tile: int) -> None:
        """Stages of a bitonic sort: runs of twice the length, in turn upwards and downwards."""
        stages = tile.bit_length() - 1
        with T.serial(int64(stages)) as stage, T.serial(stage + 1) as part:
            sync()
            log = stage - part
            distance = tirx.shift_left(int64(1), log)
            # The pair's number with a 0 put in, where its two elements differ.
            first = tirx.shift_left(tirx.shift_right(thread, log), log + 1) + tirx.bitwise_and(thread, distance - 1)
            is_upward = tirx.EQ(tirx.bitwise_and(tirx.shift_right(first % tile, stage + 1), int64(1)), int64(0))
            second = first + distance
            held = [[register(str(m.dtype), 1) for m in shared] for _ in range(2)]
            for registers, place in zip(held, (first, second), strict=True):
                for register_, memory in zip(registers, shared, strict=True):
                    T.buffer_store(register_, memory[place], [int64(0)])
            lower, upper = ([register_[int64(0)] for register_ in registers] for registers in held)
            with T.If(tirx.Select(is_upward, _is_before(upper, lower), _is_before(lower, upper))), T.Then():
                for memory, low, up in zip(shared, lower, upper, strict=True):
                    T.buffer_store(memory, up, [first])
                    T.buffer_store(memory, low, [second])

    def merge(self) -> None:
        """Threads find the places of pairs, one each, in the run that two runs become."""
        step, length = self.step, self.step.length
        units = self.lines * length
        with launch(ceil_div(units, _THREADS), _THREADS) as (block, thread):
            self._open()
            number = block * _THREADS + thread
            with inside(number, units, _THREADS):
                line, position = number // length, number % length
                span, place = position // step.span, position % step.span
                is_second = place >= step.run
                own = [register(dtype, 1) for dtype in self.problem.pair_types]
                zero = int64(0)
                for part, memory in zip(own, self._source, strict=True):
                    T.buffer_store(part, memory[number], [zero])
                # Of the other run: where it begins, and of its elements, between which the pair would stand.
                begin = span * step.span + tirx.Select(is_second, zero, int64(step.run))
                low, high = register("int64", 1), register("int64", 1)
                T.buffer_store(low, zero, [zero])
                most = T.max(T.min(int64(length) - begin, int64(step.run)), zero)
                T.buffer_store(high, most, [zero])
                with T.serial(int64(step.run.bit_length())), T.If(low[zero] < high[zero]), T.Then():
                    middle = register("int64", 1)
                    T.buffer_store(middle, (low[zero] + high[zero]) // 2, [zero])
                    at = line * length + begin + middle[zero]
                    other = [memory[at] for memory in self._source]
                    with T.If(_is_before(other, [part[zero] for part in own])):
                        with T.Then():
                            T.buffer_store(low, middle[zero] + 1, [zero])
                        with T.Else():
                            T.buffer_store(high, middle[zero], [zero])
                rank = low[zero] + place - tirx.Select(is_second, int64(step.run), zero)
                with T.If(rank < step.kept), T.Then():
                    self._write(line, span * step.kept + rank, [part[zero] for part in own])

    def _element(self, line: Expr, place: Expr, length: int) -> Expr:
        """Where an element lies of a tensor whose axis has `length` elements."""
        return line // self._inner * (length * int64(self._inner)) + line % self._inner + place * int64(self._inner)

    def _read(self, line: Expr, position: Expr, pair: Sequence[Any]) -> None:
        """A pair of a line to registers."""
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
        """A pair, or what it stands for, to its place among the results."""
        if not self.step.is_last:
            for memory, part in zip(self._target, pair, strict=True):
                T.buffer_store(memory, part, [line * self.step.left + rank])
            return
        problem = self.problem
        place = pair[1] if len(pair) == 2 else tirx.bitwise_and(pair[0], tirx.const(0x7FFFFFFF, "int64"))
        target, at = list(self._target), self._element(line, rank, problem.count)
        if problem.values:
            place64 = place if len(pair) == 1 else tirx.Cast("int64", place)
            value = self._data[0][self._element(line, place64, problem.length)]
            T.buffer_store(target.pop(0), value, [at])
        if problem.indices:
            T.buffer_store(target[0], tirx.Cast(problem.indices, place), [at])


def _is_before(one: Sequence[Expr], other: Sequence[Expr]) -> Expr:
    """Return whether a pair comes before another one."""
    if len(one) == 1:
        return one[0] < other[0]
    return tirx.any(one[0] < other[0], tirx.all(tirx.EQ(one[0], other[0]), one[1] < other[1]))


def _key(value: Expr, descending: bool) -> Expr:
    """An int32, or an int64 for types of 64 bits, in whose order values are wanted."""
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
