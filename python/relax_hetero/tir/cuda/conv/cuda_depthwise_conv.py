"""Convolutions with many small groups, above all depthwise ones: a thread computes a vector of channels of some pixels.

GEMM tiles would be mostly empty. Neighbouring threads have neighbouring channels, so that loads of the map and of the
weight are coalesced. A thread has several pixels of a row, and reuses loaded elements in all windows that contain them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import PackedLayout
from ....encoding.problem import ConvProblem
from ....errors import EncodingError
from ....target.element_types import HALF_TYPES, bytes_of
from ....target.gpu_target import VECTOR_BYTES, GpuTarget
from ...core.builder import Expr, Function, ceil_div, int64, let
from ...core.ties import tied_to
from ...core.view import Coordinates
from ...core.work_split import unravel
from ..core.launch import at_least_one, launch, local, unrolled
from ..core.operand import GpuOperand
from ..core.vectors import VectorRegisters
from ..tile.epilogue import EpilogueWriter
from . import filter_taps
from .filter_taps import axes_of, is_padded

THREADS = 128
MAX_COLUMNS = 32  # output channels per group from which GEMM tiles are full enough
_OCCUPYING_THREADS = 512  # threads per multiprocessor that hide the latency of loads
_MAX_BRANCHLESS_RESULTS = 8
"""Maximum results of a thread whose loads are not predicated, so that they are in flight together."""
_MAX_UNROLLED_ROWS = 3  # maximum rows of an unrolled window: more, and a launch waits for instruction fetches
_MIN_BLOCKS_PER_SM = 4
"""Launch bound. Without one, the compiler limits registers for 16 blocks, and few loads are in flight."""
_MAX_WEIGHT_REGISTERS = 64  # maximum registers for the weights of one row of the window


@dataclass(frozen=True)
class ChannelPlan:
    """Work of a thread."""

    pixels: int  # neighbouring pixels along the last spatial dimension
    lanes: int  # neighbouring output channels, of one group or, if depthwise, of several


def unsupported_reason(problem: ConvProblem) -> str:
    """Reason why `depthwise_conv_kernel` does not support a problem; empty if it does."""
    spatial = range(2, len(problem.windows) + 2)
    expected = PackedLayout((*spatial, 1, 0))
    if problem.weight.layout != expected:
        return f"the weight is stored as {problem.weight.layout}, expected {expected}"
    if problem.data.layout != PackedLayout((0, *spatial, 1)):
        return f"the map is stored as {problem.data.layout}, expected channels last"
    return filter_taps.unsupported_reason(problem, max_bits=None)


def choose_plan(problem: ConvProblem, gpu: GpuTarget) -> ChannelPlan:
    """Choose the most work per thread that leaves enough threads to occupy the GPU."""
    outs, depth = _static(problem.weight.shape[0]), _static(problem.weight.shape[1])
    columns = outs if _is_depthwise(problem) else outs // problem.groups
    max_lanes = max(1, VECTOR_BYTES // max(bytes_of(problem.data.dtype), bytes_of(problem.result.dtype)))
    max_lanes = next(lanes for lanes in (8, 4, 2, 1) if lanes <= max_lanes and columns % lanes == 0)
    batch, *output_dims = (
        size if isinstance(size, int) else 1 for size in (problem.result.shape[0], *problem.result.shape[2:])
    )
    rows, width = batch * prod(output_dims[:-1]), output_dims[-1]
    min_lanes = min(max_lanes, 4 // min(4, bytes_of(problem.data.dtype)) if depth == 1 else max_lanes)
    plans = [
        ChannelPlan(pixels, lanes)
        for lanes in (8, 4, 2, 1)
        for pixels in (4, 2, 1)
        if min_lanes <= lanes <= max_lanes and (pixels == 1 or pixels <= width)
    ]
    # Among plans with little work, prefer more pixels, whose windows overlap.
    plans.sort(key=lambda p: (1, -p.pixels) if p.pixels * p.lanes <= _MAX_BRANCHLESS_RESULTS else (0, 0))
    target_threads = gpu.multiprocessors * _OCCUPYING_THREADS
    return next((p for p in plans if rows * -(-width // p.pixels) * (outs // p.lanes) >= target_threads), plans[-1])


def depthwise_conv_kernel(problem: ConvProblem, gpu: GpuTarget, plan: ChannelPlan | None = None) -> tirx.PrimFunc:
    """Kernel of a convolution, one launch; `ConvProblem` documents its parameters.

    `plan`: plan; by default that of `choose_plan`. Raises EncodingError if the kernel does not support the problem
    (`unsupported_reason`).
    """
    reason = unsupported_reason(problem)
    if reason:
        raise EncodingError(f"convolution on {gpu.arch}: {reason}")
    function = Function("conv", registers="local")
    with function:
        data, weight = (
            GpuOperand(function, name, o) for name, o in (("data", problem.data), ("weight", problem.weight))
        )
        writer = EpilogueWriter.of(function, problem.epilogue, problem.result, problem.acc_dtype)
        with function.body():
            for view in (data, weight, *writer.operands):
                view.open_for_gpu()
            _Kernel(problem, data, weight, writer, plan or choose_plan(problem, gpu)).write()
    return tied_to(function.result, problem.parameters[2:-1], 2, problem.result)


class _Kernel:
    """Writer of the kernel."""

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
        self.is_branchless = self.is_depthwise and plan.pixels * plan.lanes <= _MAX_BRANCHLESS_RESULTS
        self.is_unrolled = self.is_branchless and outer <= _MAX_UNROLLED_ROWS
        # Input channels of a vector load: those of the thread's outputs if depthwise, else some of their group.
        each = VECTOR_BYTES // bytes_of(problem.data.dtype)
        self.channel_vector = (
            plan.lanes if self.is_depthwise else next(n for n in (8, 4, 2, 1) if n <= each and self.depth % n == 0)
        )

    def write(self) -> None:
        """Write the launch."""
        plan, extents = self.plan, self.writer.result.extents
        self.width = extents[-1]
        counts = [extents[0], *extents[2:-1], ceil_div(self.width, plan.pixels), self.outs // plan.lanes]
        total: Expr = prod(counts)
        names = ["b", *(f"y{d}" for d in range(len(self.axes))), "n"]
        min_blocks_per_sm = _MIN_BLOCKS_PER_SM if self.is_branchless else 0
        with launch(
            int64(at_least_one(ceil_div(total, THREADS))), THREADS, min_blocks_per_sm=min_blocks_per_sm
        ) as place:
            number = T.bind(T.Cast("int64", place.block) * THREADS + T.Cast("int64", place.thread))
            with T.If(number < total), T.Then():
                number = T.bind(T.Cast(self.kind, number))
                at = dict(zip(names, unravel(number, counts, place=T.bind, rest=T.bind), strict=True))
                at = {name: self._materialize(value) for name, value in at.items()}
                # Multiples of the vector's size, so that accesses are provably aligned.
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
            exists = [] if self._is_whole() else [at[along] + pixel < self.width]
            values = [lambda e=e, p=pixel: sums[p * plan.lanes + e] for e in range(plan.lanes)]  # type: ignore[misc]
            place = {name: T.Cast("int64", value) for name, value in at.items()}
            self.writer.write(values, {**place, along: place[along] + pixel}, "n", exists)

    def _is_whole(self) -> bool:
        return isinstance(self.width, int) and self.width % self.plan.pixels == 0

    def _find_columns(self, at: Coordinates) -> list[tuple[Expr, Expr, list[tuple[int, int]]]]:
        """Columns of the map that the windows of the thread's pixels contain.

        For each, its offset in vectors from the first column of the map; its predicate or mask, None if it always
        exists; and the pairs of pixel and tap that read it.
        """
        plan, (window, extent) = self.plan, self.axes[self.last]
        begin = T.bind(at[f"y{self.last}"] * window.stride - window.before)
        stride = self.data.stride(f"x{self.last}") // self.channel_vector
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
            position, predicate = T.bind(begin + column), None
            if checks and self.is_branchless:
                nearest = T.max(T.min(position, extent - 1), 0)
                predicate, position = _mask(tirx.EQ(position, nearest)), nearest
            elif checks:
                predicate = tirx.all(position >= 0, position < extent)
            columns.append((self._materialize(position * stride), predicate, uses))
        return columns

    def _outer_taps(self, at: Coordinates, sums: Any, taps: list[Expr], mask: Expr) -> None:
        """Write the loops over taps along all dimensions but the last.

        Rows of padding are skipped. Unrolled loops read the nearest row instead, and `mask` makes it zeros, so that
        loads do not wait for branches.
        """
        d = len(taps)
        if d == self.last:
            self._window_row(at, sums, taps, mask)
            return
        window, extent = self.axes[d]
        with unrolled(window.size) if self.is_unrolled else T.serial(window.size) as tap:
            position = T.bind(at[f"y{d}"] * window.stride + T.Cast(self.kind, tap) * window.dilation - window.before)
            if not is_padded(window, extent):
                self._outer_taps(at, sums, [*taps, (tap, position)], mask)
            elif self.is_unrolled:
                nearest = self._materialize(T.max(T.min(position, extent - 1), 0))
                row_mask = _mask(tirx.EQ(position, nearest))
                row_mask = row_mask if mask is None else T.bind(let(row_mask & mask))
                self._outer_taps(at, sums, [*taps, (tap, nearest)], row_mask)
            else:
                with T.If(tirx.all(position >= 0, position < extent)), T.Then():
                    self._outer_taps(at, sums, [*taps, (tap, position)], mask)

    def _window_row(self, at: Coordinates, sums: Any, taps: list[tuple[Expr, Expr]], mask: Expr) -> None:
        """Accumulate one row of the window, over the channels of the group."""
        zero = tirx.const(0, self.kind)
        group = zero if self.is_depthwise else T.bind(tirx.floordiv(at["n"], self.outs // self.problem.groups))
        parts = 1 if self.is_depthwise else self.depth // self.channel_vector
        if parts == 1:
            first = at["n"] if self.is_depthwise else group * self.depth
            self._channels(at, sums, taps, (first, zero), mask)
            return
        with T.serial(parts) as part:
            first = T.bind(T.Cast(self.kind, part) * self.channel_vector)
            self._channels(at, sums, taps, (T.bind(group * self.depth + first), first), mask)

    def _channels(
        self, at: Coordinates, sums: Any, taps: list[tuple[Expr, Expr]], channels: tuple[Expr, Expr], mask: Expr
    ) -> None:
        """Accumulate a vector of channels, given the first one's numbers in the map and in the group."""
        channel, k = channels
        place = {f"x{d}": there for d, (_, there) in enumerate(taps)}
        first = {**place, "b": at["b"], "c": channel, f"x{self.last}": tirx.const(0, self.kind)}
        base = self._element_offset(self.data, first)
        weights = self._weights(at, [tap for tap, _ in taps], k)
        columns: list[tuple[VectorRegisters, list[tuple[int, int]]]] = []
        for column, predicate, uses in self._columns:
            read = VectorRegisters(self.data, base, self.channel_vector, 1)
            if self.is_branchless:
                read.load(0, column, None)
                masks = [part for part in (predicate, mask) if part is not None]
                if masks:
                    read.keep(0, masks[0] if len(masks) == 1 else masks[0] & masks[1])
            else:
                read.load(0, column, predicate)
            columns.append((read, uses))
            if not self.is_branchless:
                self._multiply_uses(sums, [columns.pop()], weights)
        self._multiply_uses(sums, columns, weights)

    def _multiply_uses(
        self, sums: Any, columns: list[tuple[VectorRegisters, list[tuple[int, int]]]], weights: Any
    ) -> None:
        """Multiply loaded columns by the weights of all pixels and taps that read them."""
        for read, uses in columns:
            for pixel, tap in uses:
                self._multiply(sums, pixel, read, weights(tap))

    def _element_offset(self, view: GpuOperand, place: Coordinates) -> Expr:
        """Offset of an element, computed in the type of coordinates: TVM would widen every term."""
        offset = local(1, self.kind)
        T.buffer_store(offset, view.address(place), [0])
        return T.Cast("int64", offset[0])

    def _materialize(self, value: Expr) -> Expr:
        """Materialize a coordinate: TVM would repeat its divisions at every use."""
        return T.bind(let(T.Cast(self.kind, value)))

    def _weights(self, at: Coordinates, taps: list[Expr], k: Expr) -> Any:
        """Function that returns the weights of a tap of the row, preloaded if they are few."""
        plan, window = self.plan, self.axes[self.last][0]
        vectors = 1 if self.is_depthwise else self.channel_vector

        def read(column: int) -> VectorRegisters:
            place = {
                **{f"w{d}": T.Cast(self.kind, tap) for d, tap in enumerate(taps)},
                f"w{self.last}": tirx.const(column, self.kind),
                "n": at["n"],
                "k": k,
            }
            weights = VectorRegisters(self.weight, self._element_offset(self.weight, place), plan.lanes, vectors)
            for vector in range(vectors):
                weights.load(vector, int64(vector * (self.outs // plan.lanes)), None)
            return weights

        if window.size * vectors * plan.lanes > _MAX_WEIGHT_REGISTERS:
            return read
        weights = [read(tap) for tap in range(window.size)]
        return lambda tap: weights[tap]

    def _multiply(self, sums: Any, pixel: int, read: VectorRegisters, weights: VectorRegisters) -> None:
        lanes = self.plan.lanes
        for c in range(1 if self.is_depthwise else self.channel_vector):
            with unrolled(lanes) as lane:
                own = read.get(lane if self.is_depthwise else tirx.const(c, "int32"))
                factor = self.weight.converted(weights.get(c * lanes + lane), self.dtype)
                at = pixel * lanes + lane
                T.buffer_store(sums, sums[at] + self.data.converted(own, self.dtype) * factor, [at])


def _is_depthwise(problem: ConvProblem) -> bool:
    """Return whether each output channel is a group of its own, with one input channel."""
    return problem.weight.shape[1] == 1 and problem.weight.shape[0] == problem.groups


def _mask(condition: Expr) -> Expr:
    """Word of ones if a condition holds, else 0."""
    return T.bind(let(T.Cast("uint32", T.Cast("int32", 0) - T.Cast("int32", condition))))


def _static(extent: Any) -> int:
    assert isinstance(extent, int), "weights have known sizes"
    return extent
