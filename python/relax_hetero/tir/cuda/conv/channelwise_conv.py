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
from ....target.element_types import HALVES, bytes_of
from ....target.gpu_target import VECTOR_BYTES, GpuTarget
from ...core.builder import Expr, Function, ceil_div, int64
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
MOST_COLUMNS = 32
"""Channels of a group from which tiles of products are full enough."""
_OCCUPIED = 512
"""Threads of a multiprocessor that hide how long loads take."""
_WRITTEN_OUT, _MOST_ROWS = 8, 9
"""Results of a thread, and rows of a window, whose loops are written out: few threads wait for few loads."""
_HELD_WEIGHTS = 64
"""Registers for the weights of one row of the window."""


@dataclass(frozen=True)
class ChannelPlan:
    """What a thread makes.

    Attributes
    ----------
    pixels : int
        Neighbours along the last spatial dimension.
    lanes : int
        Neighbouring output channels, of one group or, where groups have one channel, of several.
    """

    pixels: int
    lanes: int


def misfit(problem: ConvProblem) -> str:
    """Why `channelwise_conv_kernel` cannot solve a problem; empty where it can."""
    spatial = range(2, len(problem.windows) + 2)
    expected = PackedLayout((*spatial, 1, 0))
    if problem.weight.layout != expected:
        return f"the weight is stored as {problem.weight.layout}, expected {expected}"
    if problem.data.layout != PackedLayout((0, *spatial, 1)):
        return f"the map is stored as {problem.data.layout}, expected channels last"
    return window_places.misfit(problem, most_bits=None)


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
    wanted = gpu.multiprocessors * _OCCUPIED
    return next((p for p in plans if rows * -(-places // p.pixels) * (outs // p.lanes) >= wanted), plans[-1])


def channelwise_conv_kernel(problem: ConvProblem, gpu: GpuTarget, plan: ChannelPlan | None = None) -> tirx.PrimFunc:
    """The kernel of a convolution, one launch; `ConvProblem` says what its parameters are.

    Parameters
    ----------
    plan : ChannelPlan, optional
        By default as `choose_plan` finds it.

    Raises
    ------
    EncodingError
        If `misfit` says why the problem is not one for this kernel.
    """
    reason = misfit(problem)
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
        self.dtype = "float32" if problem.acc_dtype in HALVES else problem.acc_dtype
        self.outs, self.depth = _static(problem.weight.shape[0]), _static(problem.weight.shape[1])
        self.is_depthwise = _is_depthwise(problem)
        self.axes = axes_of(problem)
        self.last = len(self.axes) - 1
        outer = prod(window.size for window, _ in self.axes[:-1])
        is_little = plan.pixels * plan.lanes <= _WRITTEN_OUT and outer <= _MOST_ROWS
        self.is_written_out = self.is_depthwise and is_little
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
        with launch(int64(at_least_one(ceil_div(total, THREADS))), THREADS) as place:
            number = T.bind(T.Cast("int64", place.block) * THREADS + T.Cast("int64", place.thread))
            with T.If(number < total), T.Then():
                at = dict(zip(names, unravel(number, counts, place=T.bind, rest=T.bind), strict=True))
                at["n"] = T.bind(at["n"] * plan.lanes)
                at[f"y{self.last}"] = T.bind(at[f"y{self.last}"] * plan.pixels)
                self._pixels(at)

    def _pixels(self, at: Coordinates) -> None:
        plan = self.plan
        sums = local(plan.pixels * plan.lanes, self.dtype)
        with unrolled(plan.pixels * plan.lanes) as i:
            T.buffer_store(sums, tirx.const(0, self.dtype), [i])
        self._outer_taps(at, sums, [], [])
        for pixel in range(plan.pixels):
            along = f"y{self.last}"
            exists = [] if self._is_whole() else [at[along] + pixel < self.places]
            values = [lambda e=e, p=pixel: sums[p * plan.lanes + e] for e in range(plan.lanes)]  # type: ignore[misc]
            self.writer.write(values, {**at, along: at[along] + pixel}, "n", exists)

    def _is_whole(self) -> bool:
        return isinstance(self.places, int) and self.places % self.plan.pixels == 0

    def _outer_taps(self, at: Coordinates, sums: Any, taps: list[Expr], exists: list[Expr]) -> None:
        """Loops over the places of the window along all dimensions but the last.

        Rows of padding are left out; where loops are written out, read as zeros, for what is read must not wait then.
        """
        d = len(taps)
        if d == self.last:
            self._row(at, sums, taps, exists)
            return
        window, extent = self.axes[d]
        with unrolled(window.size) if self.is_written_out else T.serial(window.size) as tap:
            there = T.bind(at[f"y{d}"] * window.stride + T.Cast("int64", tap) * window.dilation - window.before)
            inside = tirx.all(there >= 0, there < extent) if is_padded(window, extent) else None
            taps = [*taps, T.Cast("int64", tap)]
            if inside is None or self.is_written_out:
                self._outer_taps(at, sums, taps, exists if inside is None else [*exists, inside])
            else:
                with T.If(inside), T.Then():
                    self._outer_taps(at, sums, taps, exists)

    def _row(self, at: Coordinates, sums: Any, taps: list[Expr], exists: list[Expr]) -> None:
        """One row of the window: of each channel of the group, what lies under it."""
        group = int64(0) if self.is_depthwise else T.bind(tirx.floordiv(at["n"], self.outs // self.problem.groups))
        parts = 1 if self.is_depthwise else self.depth // self.taken
        if parts == 1:
            first = at["n"] if self.is_depthwise else group * self.depth
            self._channels(at, sums, taps, (first, int64(0)), exists)
            return
        with T.serial(parts) as part:
            first = T.bind(T.Cast("int64", part) * self.taken)
            self._channels(at, sums, taps, (T.bind(group * self.depth + first), first), exists)

    def _channels(
        self, at: Coordinates, sums: Any, taps: list[Expr], channels: tuple[Expr, Expr], exists: list[Expr]
    ) -> None:
        """Some channels from two numbers on, that in the map and that in the group; zeros where one does not exist."""
        channel, k = channels
        plan, (window, extent) = self.plan, self.axes[self.last]
        begin = T.bind(at[f"y{self.last}"] * window.stride - window.before)
        place = {f"x{d}": self._outer_place(at, taps, d) for d in range(self.last)}
        first = {**place, "b": at["b"], "c": channel, f"x{self.last}": int64(0)}
        base = self.data.address(first)
        apart = self.data.stride(f"x{self.last}") // self.taken
        checks = is_padded(window, extent) or not self._is_whole()
        weights = self._weights(at, taps, k)
        columns = (plan.pixels - 1) * window.stride + window.reach
        for column in range(columns):
            uses = [
                (pixel, (column - pixel * window.stride) // window.dilation)
                for pixel in range(plan.pixels)
                if 0 <= column - pixel * window.stride < window.reach
                and (column - pixel * window.stride) % window.dilation == 0
            ]
            if not uses:
                continue
            read = VectorRegisters(self.data, base, self.taken, 1)
            there = T.bind(begin + column)
            inside = [*exists, *([there >= 0, there < extent] if checks else [])]
            read.load(0, there * apart, tirx.all(*inside) if inside else None)
            for pixel, tap in uses:
                self._multiply(sums, pixel, read, weights(tap))

    def _outer_place(self, at: Coordinates, taps: list[Expr], d: int) -> Expr:
        window = self.axes[d][0]
        return at[f"y{d}"] * window.stride + taps[d] * window.dilation - window.before

    def _weights(self, at: Coordinates, taps: list[Expr], k: Expr) -> Any:
        """What gives the weights of a tap of the row, read before where they are few."""
        plan, window = self.plan, self.axes[self.last][0]
        vectors = 1 if self.is_depthwise else self.taken

        def read(tap: int) -> VectorRegisters:
            place = {**{f"w{d}": t for d, t in enumerate(taps)}, f"w{self.last}": int64(tap), "n": at["n"], "k": k}
            held = VectorRegisters(self.weight, self.weight.address(place), plan.lanes, vectors)
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
    """Whether each output channel has an input channel of its own."""
    return problem.weight.shape[1] == 1 and problem.weight.shape[0] == problem.groups


def _static(extent: Any) -> int:
    assert isinstance(extent, int), "weights have known sizes"
    return extent
