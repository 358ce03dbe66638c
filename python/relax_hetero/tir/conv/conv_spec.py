"""Operands, rows of the result, stores of tiles and splits of work, shared by kernels of convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from ...encoding.problem import ConvProblem, Window
from ...target.cpu_target import CpuTarget
from ...target.dot_instructions import DotInstruction
from ..core.builder import Expr, Function, Masks, ceil_div, loop, materialize
from ..core.view import Coordinates, OperandView
from ..core.work_split import Split, tasks_for, unravel
from ..elementwise.expression_code import EpilogueCode
from .conv_geometry import taps_at


@dataclass(frozen=True)
class Convolution:
    """A problem and the views of its parameters."""

    problem: ConvProblem
    cpu: CpuTarget
    dot: DotInstruction  # instruction that multiplies the element types
    data: OperandView
    weight: OperandView
    result: OperandView
    epilogue: EpilogueCode
    lanes: int  # lanes of an accumulator

    @staticmethod
    def of(function: Function, problem: ConvProblem, cpu: CpuTarget, dot: DotInstruction) -> Convolution:
        """Declare the parameters of a kernel."""
        data = OperandView(function, "data", problem.data)
        weight = OperandView(function, "weight", problem.weight)
        lanes = cpu.lanes(problem.acc_dtype)
        epilogue = EpilogueCode.of(function, problem.epilogue, problem.acc_dtype, problem.result.dtype, lanes)
        result = OperandView(function, "result", problem.result)
        return Convolution(problem, cpu, dot, data, weight, result, epilogue, lanes)

    def open(self) -> None:
        """Declare the flat views; inside the function's body."""
        for view in (self.data, self.weight, *self.epilogue.views, self.result):
            view.open()

    @property
    def windows(self) -> tuple[Window, ...]:
        """One per spatial dimension."""
        return self.problem.windows

    @property
    def channels(self) -> int:
        """Output channels."""
        return self.result.extents[1]

    @property
    def depth(self) -> int:
        """Input channels of one group."""
        return self.weight.extents[1]

    @property
    def rows(self) -> list[Expr]:
        """Batch and outer spatial extents of the result, which number its rows."""
        return [self.result.extents[0], *self.result.extents[2:-1]]

    def row_count(self) -> Expr:
        """Number of rows of the result."""
        return materialize(prod(self.rows))


@dataclass(frozen=True)
class ConvRow:
    """A row of the result at a position that is known at run time."""

    at: Coordinates  # Coordinates "b", "y0", "y1", ... of all dimensions but the innermost.
    # For each outer spatial dimension the first tap that reads data, and the number of such taps.
    taps: tuple[tuple[Expr, Expr], ...]


def make_conv_row(conv: Convolution, number: Expr) -> ConvRow:
    """The row with a number."""
    names = ["b", *(f"y{d}" for d in range(len(conv.windows) - 1))]
    at = dict(zip(names, unravel(number, conv.rows, place=materialize), strict=True))
    taps = tuple(
        _outer_taps(conv.windows[d], conv.data.extents[2 + d], conv.result.extents[2 + d], at[f"y{d}"])
        for d in range(len(conv.windows) - 1)
    )
    return ConvRow(at, taps)


def _outer_taps(window: Window, extent: Expr, places: Expr, place: Expr) -> tuple[Expr, Expr]:
    if isinstance(extent, int) and isinstance(places, int):
        last = (places - 1) * window.stride + window.dilated_extent - 1 - window.before
        if window.before == 0 and last < extent:
            return 0, window.size
    return taps_at(window, extent, place)


def data_position(conv: Convolution, row: ConvRow, taps: Sequence[Expr], channel: Expr, column: Expr) -> Coordinates:
    """Coordinates of the data that the outer `taps` read, in input channel `channel`.

    `column` is the position along the innermost dimension; it may lie in the padding if nothing is read there.
    """
    at: dict[str, Expr] = {"b": row.at["b"], "c": channel, f"x{len(conv.windows) - 1}": column}
    for d, tap in enumerate(taps):
        window = conv.windows[d]
        at[f"x{d}"] = row.at[f"y{d}"] * window.stride + tap * window.dilation - window.before
    return at


def over_taps(row: ConvRow, visit: Callable[[Sequence[Expr]], None], taps: Sequence[Expr] = ()) -> None:
    """Write the loops over the outer taps of the window, with `visit` as their body."""
    if len(taps) == len(row.taps):
        visit(taps)
        return
    first, count = row.taps[len(taps)]
    with loop(count) as tap:
        over_taps(row, visit, [*taps, materialize(first + tap)])


def result_position(conv: Convolution, row: ConvRow, place: Expr, column: Expr) -> Coordinates:
    """Coordinates of a pixel and an output channel in a row."""
    return {**row.at, f"y{len(conv.windows) - 1}": place, "n": column}


def store_pixels(
    conv: Convolution,
    row: ConvRow,
    # place, column: first pixel along the innermost spatial dimension, and first output channel.
    place: Expr,
    column: Expr,
    size: tuple[int, int],  # pixels and vectors
    masks: Masks,  # existing lanes of each vector
    value: Callable[[int, int], Expr],  # function from a pixel and a vector to its accumulator
) -> None:
    """Apply the epilogue to accumulators and write them."""
    for t in range(size[0]):
        for j in range(size[1]):
            at = result_position(conv, row, place + t, column + j * conv.lanes)
            conv.result.store(at, "n", conv.epilogue.result_at(value(t, j), at, masks[j]), conv.lanes, masks[j])


SYMBOLIC_EXTENT_GUESS = 64  # guess for a symbolic spatial extent


def split_rows(conv: Convolution, panels: int, macs: int, max_width: int | None = None) -> Split:
    """Split a convolution into tasks by rows, or by panels of output channels if reading weights dominates.

    `macs`: multiply-adds of a panel for one pixel of the result. `max_width`: pixels of a tile. The pixels of a result
    with a single row are then split in place of rows, as `Split.batch`.
    """
    batch, images = conv.result.extents[0], conv.result.extents[2:]
    *outer, places = map(_extent_or_guess, images)
    rows = prod(_static([batch])) * prod(outer)
    cores = conv.cpu.cores
    is_known = all(isinstance(extent, int) for extent in (batch, *images))
    if tasks_for(cores, "multiply-adds", rows * places * panels * macs if is_known else None) == 1:
        return Split(1, 1, 1, 1)
    extents = [*_static(conv.data.extents[:2]), *(_extent_or_guess(extent) for extent in conv.data.extents[2:])]
    read = conv.problem.data.layout.storage_bytes(extents, conv.data.dtype)
    weights = conv.problem.weight.layout.storage_bytes(conv.weight.extents, conv.weight.dtype)
    # A result of one spatial dimension has a row per image, usually one.
    is_one_row = max_width is not None and rows == 1
    shared = ceil_div(places, max_width) if is_one_row and max_width is not None else rows

    def cost(parts: int) -> tuple[int, int]:
        longest = ceil_div(shared, parts) * ceil_div(panels, cores // parts)
        return longest, parts if weights > read else -parts

    parts = min((parts for parts in range(1, cores + 1) if cores % parts == 0), key=cost)
    columns = min(panels, cores // parts)
    if is_one_row:
        return Split(parts, 1, columns, parts * columns)
    parts = min(parts, rows) if is_known else parts
    return Split(1, parts, columns, parts * columns)


def _extent_or_guess(extent: Expr) -> int:
    return extent if isinstance(extent, int) else SYMBOLIC_EXTENT_GUESS


def _static(extents: Sequence[Expr]) -> list[int]:
    return [extent if isinstance(extent, int) else 1 for extent in extents]
