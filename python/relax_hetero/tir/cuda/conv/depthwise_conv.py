"""Convolutions of many small groups, depthwise ones above all: a thread makes a vector of channels of some pixels.

Tiles of products would be mostly empty. Neighbouring threads have neighbouring channels, so that what they read of the
map and of the weight lies side by side. A thread has several pixels of a row: what it reads of the map serves all
windows that see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.expression import Expression
from ....encoding.packed_layout import PackedLayout
from ....encoding.problem import ConvProblem
from ....errors import EncodingError
from ....target.element_types import HALF_TYPES, bytes_of
from ....target.gpu_target import VECTOR_BYTES, GpuTarget
from ...core.builder import Expr, Function, ceil_div, int64, let
from ...core.ties import tied_to
from ...core.view import Coordinates
from ...core.work_split import unravel
from ..core.epilogue import EpilogueWriter
from ..core.launch import at_least_one, launch, local, unrolled
from ..core.operand import GpuOperand
from ..core.vectors import VectorRegisters
from . import window_places
from .window_places import axes_of, is_padded

THREADS = 128
MAX_COLUMNS = 32
"""Channels of a group from which tiles of products are full enough."""
_OCCUPIED = 512
"""Threads of a multiprocessor that hide how long loads take."""
_LITTLE, _MAX_ROWS = 8, 3
"""Results of a thread that reads without branches, for few threads wait for few loads; and rows of a window whose loops
are written out then: more, and a launch waits for its own code, of which each multiprocessor reads all once."""
_BLOCKS = 4
"""Minimum number of blocks of a multiprocessor. Without a bound, however low, the compiler would make room for 16, and
threads would read little of a row at a time."""
_HELD_WEIGHTS = 64
"""Registers for the weights of one row of the window."""


@dataclass(frozen=True)
class ChannelPlan:
    """Work of a thread.

    Attributes
    ----------
    pixels : int
        Neighbours along the last spatial dimension.
    lanes : int
        Neighbouring output channels, of one group or, where groups have one channel, of several.
    """

    pixels: int
    lanes: int


def unsupported_reason(problem: ConvProblem) -> str:
    """Why `depthwise_conv_kernel` cannot solve a problem; empty where it can."""
    spatial = range(2, len(problem.windows) + 2)
    expected = PackedLayout((*spatial, 1, 0))
    if problem.weight.layout != expected:
        return f"the weight is stored as {problem.weight.layout}, expected {expected}"
    if problem.data.layout != PackedLayout((0, *spatial, 1)):
        return f"the map is stored as {problem.data.layout}, expected channels last"
    return window_places.unsupported_reason(problem, max_bits=None)


def choose_plan(problem: ConvProblem, gpu: GpuTarget) -> ChannelPlan:
    """The most work for a thread that leaves enough threads for the GPU."""
    outs, depth = _static(problem.weight.shape[0]), _static(problem.weight.shape[1])
    columns = outs if _is_depthwise(problem) else outs // problem.groups
    widest = max(1, VECTOR_BYTES // max(bytes_of(problem.data.dtype), bytes_of(problem.result.dtype)))
    widest = next(lanes for lanes in (8, 4, 2, 1) if lanes <= widest and columns % lanes == 0)
    batch, *others = (
        size if isinstance(size, int) else 1 for size in (problem.result.shape[0], *problem.result.shape[2:])
    )
    rows, places = batch * prod(others[:-1]), others[-1]
    narrowest = min(widest, 4 // min(4, bytes_of(problem.data.dtype)) if depth == 1 else widest)
    plans = [
        ChannelPlan(pixels, lanes)
        for lanes in (8, 4, 2, 1)
        for pixels in (4, 2, 1)
        if narrowest <= lanes <= widest and (pixels == 1 or pixels <= places)
    ]
    # Of little work, that which shares most: neighbouring pixels see the same places of the map.
    plans.sort(key=lambda p: (1, -p.pixels) if p.pixels * p.lanes <= _LITTLE else (0, 0))
    wanted = gpu.multiprocessors * _OCCUPIED
    return next((p for p in plans if rows * -(-places // p.pixels) * (outs // p.lanes) >= wanted), plans[-1])


def depthwise_conv_kernel(problem: ConvProblem, gpu: GpuTarget, plan: ChannelPlan | None = None) -> tirx.PrimFunc:
    """The kernel of a convolution, one launch; `ConvProblem` says what its parameters are.

    Parameters
    ----------
    plan : ChannelPlan, optional
        Plan; by default that of `choose_plan`.

    Raises
    ------
    EncodingError
        If `unsupported_reason` says why the problem is not one for this kernel.
    """
    reason = unsupported_reason(problem)
    if reason:
        raise EncodingError(f"convolution on {gpu.arch}: {reason}")
    function = Function("conv", registers="local")
    with function:
        data, weight = (
            GpuOperand(function, name, o) for name, o in (("data", problem.data), ("weight", problem.weight))
        )
        epilogue = problem.epilogue
        operands = epilogue.operands if epilogue else ()
        views = tuple(GpuOperand(function, f"x{i + 1}", operand) for i, operand in enumerate(operands))
        result = GpuOperand(function, "result", problem.result)
        expression = epilogue.expression if epilogue else Expression.operand(0)
        writer = EpilogueWriter(expression, None, views, result, problem.acc_dtype)
        with function.body():
            for view in (data, weight, *writer.operands):
                view.open_for_gpu()
            _Kernel(problem, data, weight, writer, plan or choose_plan(problem, gpu)).write()
    return tied_to(function.result, operands, 2, problem.result)


class _Kernel:
    """One kernel while it is written."""

    def __init__(
        self, problem: ConvProblem, data: GpuOperand, weight: GpuOperand, writer: EpilogueWriter, plan: ChannelPlan
    ) -> None:
        self.problem, self.data, self.weight, self.writer, self.plan = problem, data, weight, writer, plan
        self.dtype = "float32" if problem.acc_dtype in HALF_TYPES else problem.acc_dtype
        self.outs, self.depth = _static(problem.weight.shape[0]), _static(problem.weight.shape[1])
        self.is_depthwise = _is_depthwise(problem)
        self.axes = axes_of(problem)
        sizes = (*problem.data.shape, *problem.result.shape)
        is_small = all(isinstance(size, int) for size in sizes)
        is_small = is_small and max(prod(map(int, o.shape)) for o in (problem.data, problem.result)) < 1 << 30
        self.kind = "int32" if is_small else "int64"  # of coordinates
        self.last = len(self.axes) - 1
        outer = prod(window.size for window, _ in self.axes[:-1])
        self.has_no_branches = self.is_depthwise and plan.pixels * plan.lanes <= _LITTLE
        self.is_written_out = self.has_no_branches and outer <= _MAX_ROWS
        # Channels of the map that are read together: those of the thread's own outputs, or some of their group.
        each = VECTOR_BYTES // bytes_of(problem.data.dtype)
        self.taken = (
            plan.lanes if self.is_depthwise else next(n for n in (8, 4, 2, 1) if n <= each and self.depth % n == 0)
        )

    def write(self) -> None:
        """The launch, and each thread's pixels."""
        plan, extents = self.plan, self.writer.result.extents
        self.places = extents[-1]
        counts = [extents[0], *extents[2:-1], ceil_div(self.places, plan.pixels), self.outs // plan.lanes]
        total: Expr = 1
        for count in counts:
            total = total * count
        names = ["b", *(f"y{d}" for d in range(len(self.axes))), "n"]
        min_blocks_per_sm = _BLOCKS if self.has_no_branches else 0
        with launch(
            int64(at_least_one(ceil_div(total, THREADS))), THREADS, min_blocks_per_sm=min_blocks_per_sm
        ) as place:
            number = T.bind(T.Cast("int64", place.block) * THREADS + T.Cast("int64", place.thread))
            with T.If(number < total), T.Then():
                number = T.bind(T.Cast(self.kind, number))
                at = dict(zip(names, unravel(number, counts, place=T.bind, rest=T.bind), strict=True))
                at = {name: self._held(value) for name, value in at.items()}
                # Products with the vector's size, so that accesses are known to be aligned.
                at["n"] = at["n"] * plan.lanes
                at[f"y{self.last}"] = at[f"y{self.last}"] * plan.pixels
                self._pixels(at)

    def _pixels(self, at: Coordinates) -> None:
        plan = self.plan
        sums = local(plan.pixels * plan.lanes, self.dtype)
        with unrolled(plan.pixels * plan.lanes) as i:
            T.buffer_store(sums, tirx.const(0, self.dtype), [i])
        self._columns = self._find_columns(at)
        self._outer_taps(at, sums, [], None)
        for pixel in range(plan.pixels):
            along = f"y{self.last}"
            exists = [] if self._is_whole() else [at[along] + pixel < self.places]
            values = [lambda e=e, p=pixel: sums[p * plan.lanes + e] for e in range(plan.lanes)]  # type: ignore[misc]
            place = {name: T.Cast("int64", value) for name, value in at.items()}
            self.writer.write(values, {**place, along: place[along] + pixel}, "n", exists)

    def _is_whole(self) -> bool:
        return isinstance(self.places, int) and self.places % self.plan.pixels == 0

    def _find_columns(self, at: Coordinates) -> list[tuple[Expr, Expr, list[tuple[int, int]]]]:
        """Columns of the map that the thread's pixels see, which all rows of the window share.

        Of each how far it is from the first of the map, counted in what is read at a time; whether it exists, None
        where all do; and which pixels see it by which taps.
        """
        plan, (window, extent) = self.plan, self.axes[self.last]
        begin = T.bind(at[f"y{self.last}"] * window.stride - window.before)
        apart = self.data.stride(f"x{self.last}") // self.taken
        checks = is_padded(window, extent) or not self._is_whole()
        columns = []
        for column in range((plan.pixels - 1) * window.stride + window.dilated_extent):
            uses = [
                (pixel, (column - pixel * window.stride) // window.dilation)
                for pixel in range(plan.pixels)
                if 0 <= column - pixel * window.stride < window.dilated_extent
                and (column - pixel * window.stride) % window.dilation == 0
            ]
            if not uses:
                continue
            there, inside = T.bind(begin + column), None
            if checks and self.has_no_branches:
                near = T.max(T.min(there, extent - 1), 0)
                inside, there = _mask(tirx.EQ(there, near)), near
            elif checks:
                inside = tirx.all(there >= 0, there < extent)
            columns.append((self._held(there * apart), inside, uses))
        return columns

    def _outer_taps(self, at: Coordinates, sums: Any, taps: list[Expr], mask: Expr) -> None:
        """Loops over the places of the window along all dimensions but the last.

        Rows of padding are left out. Where loops are written out, the nearest row is read in their place and counts as
        zeros by `mask`, for what is read must not wait then.
        """
        d = len(taps)
        if d == self.last:
            self._row(at, sums, taps, mask)
            return
        window, extent = self.axes[d]
        with unrolled(window.size) if self.is_written_out else T.serial(window.size) as tap:
            there = T.bind(at[f"y{d}"] * window.stride + T.Cast(self.kind, tap) * window.dilation - window.before)
            if not is_padded(window, extent):
                self._outer_taps(at, sums, [*taps, (tap, there)], mask)
            elif self.is_written_out:
                near = self._held(T.max(T.min(there, extent - 1), 0))
                own = _mask(tirx.EQ(there, near))
                own = own if mask is None else T.bind(let(own & mask))
                self._outer_taps(at, sums, [*taps, (tap, near)], own)
            else:
                with T.If(tirx.all(there >= 0, there < extent)), T.Then():
                    self._outer_taps(at, sums, [*taps, (tap, there)], mask)

    def _row(self, at: Coordinates, sums: Any, taps: list[tuple[Expr, Expr]], mask: Expr) -> None:
        """One row of the window: of each channel of the group, what lies under it."""
        zero = tirx.const(0, self.kind)
        group = zero if self.is_depthwise else T.bind(tirx.floordiv(at["n"], self.outs // self.problem.groups))
        parts = 1 if self.is_depthwise else self.depth // self.taken
        if parts == 1:
            first = at["n"] if self.is_depthwise else group * self.depth
            self._channels(at, sums, taps, (first, zero), mask)
            return
        with T.serial(parts) as part:
            first = T.bind(T.Cast(self.kind, part) * self.taken)
            self._channels(at, sums, taps, (T.bind(group * self.depth + first), first), mask)

    def _channels(
        self, at: Coordinates, sums: Any, taps: list[tuple[Expr, Expr]], channels: tuple[Expr, Expr], mask: Expr
    ) -> None:
        """Some channels from two numbers on, that in the map and that in the group."""
        channel, k = channels
        place = {f"x{d}": there for d, (_, there) in enumerate(taps)}
        first = {**place, "b": at["b"], "c": channel, f"x{self.last}": tirx.const(0, self.kind)}
        base = self._element(self.data, first)
        weights = self._weights(at, [tap for tap, _ in taps], k)
        found: list[tuple[VectorRegisters, list[tuple[int, int]]]] = []
        for column, inside, uses in self._columns:
            read = VectorRegisters(self.data, base, self.taken, 1)
            if self.has_no_branches:
                read.load(0, column, None)
                masks = [part for part in (inside, mask) if part is not None]
                if masks:
                    read.keep(0, masks[0] if len(masks) == 1 else masks[0] & masks[1])
            else:
                read.load(0, column, inside)
            found.append((read, uses))
            if not self.has_no_branches:
                self._multiply_uses(sums, [found.pop()], weights)
        self._multiply_uses(sums, found, weights)

    def _multiply_uses(
        self, sums: Any, found: list[tuple[VectorRegisters, list[tuple[int, int]]]], weights: Any
    ) -> None:
        """Multiply loaded columns by the weights of all pixels and taps that see them."""
        for read, uses in found:
            for pixel, tap in uses:
                self._multiply(sums, pixel, read, weights(tap))

    def _element(self, view: GpuOperand, place: Coordinates) -> Expr:
        """The element at a place, computed in the type of coordinates: TVM would widen every part of a sum."""
        held = local(1, self.kind)
        T.buffer_store(held, view.address(place), [0])
        return T.Cast("int64", held[0])

    def _held(self, value: Expr) -> Expr:
        """A coordinate in a register: TVM would write the divisions that find it out wherever it is used."""
        return T.bind(let(T.Cast(self.kind, value)))

    def _weights(self, at: Coordinates, taps: list[Expr], k: Expr) -> Any:
        """Function that gives the weights of a tap of the row, read before where they are few."""
        plan, window = self.plan, self.axes[self.last][0]
        vectors = 1 if self.is_depthwise else self.taken

        def read(column: int) -> VectorRegisters:
            place = {
                **{f"w{d}": T.Cast(self.kind, tap) for d, tap in enumerate(taps)},
                f"w{self.last}": tirx.const(column, self.kind),
                "n": at["n"],
                "k": k,
            }
            held = VectorRegisters(self.weight, self._element(self.weight, place), plan.lanes, vectors)
            for vector in range(vectors):
                held.load(vector, int64(vector * (self.outs // plan.lanes)), None)
            return held

        if window.size * vectors * plan.lanes > _HELD_WEIGHTS:
            return read
        held = [read(tap) for tap in range(window.size)]
        return lambda tap: held[tap]

    def _multiply(self, sums: Any, pixel: int, read: VectorRegisters, weights: VectorRegisters) -> None:
        lanes = self.plan.lanes
        for c in range(1 if self.is_depthwise else self.taken):
            with unrolled(lanes) as lane:
                own = read.get(lane if self.is_depthwise else tirx.const(c, "int32"))
                factor = self.weight.converted(weights.get(c * lanes + lane), self.dtype)
                at = pixel * lanes + lane
                T.buffer_store(sums, sums[at] + self.data.converted(own, self.dtype) * factor, [at])


def _is_depthwise(problem: ConvProblem) -> bool:
    """Return whether each output channel has an input channel of its own."""
    return problem.weight.shape[1] == 1 and problem.weight.shape[0] == problem.groups


def _mask(condition: Expr) -> Expr:
    """All bits of a word where a condition is true, none where it is not."""
    return T.bind(let(T.Cast("uint32", T.Cast("int32", 0) - T.Cast("int32", condition))))


def _static(extent: Any) -> int:
    assert isinstance(extent, int), "weights have known sizes"
    return extent
