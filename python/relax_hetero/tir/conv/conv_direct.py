"""The direct convolution: a register tile of neighbouring places and output channels, the whole reduction in registers.

The loops, from outside: tasks, panels of output channels, rows, tiles; within a tile (`conv_tile`) places of the
window and input channels. Data is read where it lies, a few input channels in every lane; the weight as it is packed,
panel by panel.

CPUs with tile registers multiply some types by them (`tile_register_conv`), from the same weights; the loops here are
then for processes that may not use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.amx_instructions import amx_instruction_for
from ...target.element_types import bytes_of
from ...target.tiles import MAX_PIXELS, conv_pixels
from ..core.builder import Expr, ceil_div, either, loop, materialize, minimum
from ..core.work_split import part
from ..matmul.amx import LLVM_TEXT, tiles_or_vectors
from .amx_conv import amx_convolution, emit_tiles
from .conv_geometry import Segment
from .conv_spec import Convolution, channel_masks, make_conv_row, split_rows
from .conv_tile import Ahead, AmxTiles, ConvTile, Panel, emit_tile
from .dynamic_height import at_place, row_segments

# Elements that are a multiple of this apart fall into one set of the first-level cache, of 8 to 12 ways.
CACHE_WAY_BYTES = 4096
PLACES_IN_ONE_SET = 8
# Weights of more bytes are prefetched, panel by panel: whoever ran before has most likely put them out of the caches.
PREFETCH_BYTES = 1 << 16
# Places of a tile in a kernel whose main way is by tile registers: short code, which compiles in half the time.
FEW_PLACES = 6


@dataclass(frozen=True)
class PanelTiles:
    """The tiles that go over one panel.

    Attributes
    ----------
    tiles : int or PrimExpr
        Number of tiles of a row.
    """

    rows: Expr
    tiles: Expr


def emit_direct(conv: Convolution) -> None:
    """Write the body of the kernel: by tile registers where they pay and the process may use them, else by vectors."""
    problem = conv.problem
    instruction = amx_instruction_for(conv.cpu, problem.data.dtype, problem.weight.dtype, problem.acc_dtype)
    tiles = amx_convolution(conv, instruction)
    if tiles is None:
        _emit_by_vectors(conv, MAX_PIXELS)
        return
    with T.attr(0, "pragma_import_llvm", LLVM_TEXT):
        tiles_or_vectors(lambda: emit_tiles(tiles), lambda: _emit_by_vectors(conv, FEW_PLACES))


def _emit_by_vectors(conv: Convolution, places: int) -> None:
    width = conv.weight.layout.tile(0)
    panels = ceil_div(conv.channels, width)
    widest = min(places, _max_places(conv, ceil_div(width, conv.lanes)))
    segments = row_segments(conv.windows[-1], conv.data.extents[-1], conv.result.extents[-1], widest)
    macs = prod(window.size for window in conv.windows) * conv.depth
    split = split_rows(conv, panels, width * macs, widest)
    rows = conv.row_count()
    sweep = PanelTiles(ceil_div(rows, split.rows), sum(segment.count for segment in segments))
    vectors = ceil_div(min(width, conv.channels), conv.lanes)
    with loop(split.tasks, parallel=split.tasks > 1) as task:
        registers = AmxTiles.of(conv, segments, vectors)
        place_part, row_part, panel_part = split.place(task)
        tiles = [part(segment.count, split.batch, place_part) for segment in segments]
        first_row, last_row = part(rows, split.rows, row_part)
        first_panel, last_panel = part(panels, split.columns, panel_part)
        with loop(last_panel - first_panel) as number:
            panel_number = materialize(first_panel + number)
            following = materialize(minimum(panel_number + 1, last_panel - 1) * _panel_elements(conv))

            def rows_of(existing: int, number: Expr = panel_number, following: Expr = following) -> None:
                panel = _make_panel(conv, number, existing, following)
                with loop(last_row - first_row) as r:
                    _emit_row(conv, first_row + r, panel, (segments, tiles), registers, (r, sweep))

            left = conv.channels % width
            if left == 0 or panels == 1:
                rows_of(min(width, conv.channels))
            else:
                either(panel_number < panels - 1, lambda: rows_of(width), lambda: rows_of(left))


def _panel_elements(conv: Convolution) -> int:
    """Elements of the weight that are stored for one panel of output channels."""
    return prod(conv.weight.layout.packed_shape(conv.weight.extents)[1:])


def _max_places(conv: Convolution, vectors: int) -> int:
    """The widest tile: as the registers allow, less where places would put one another out of the cache."""
    most = conv_pixels(conv.cpu, conv.dot, vectors)
    apart = conv.data.stride(f"x{len(conv.windows) - 1}") * conv.windows[-1].stride * bytes_of(conv.data.dtype)
    return min(most, PLACES_IN_ONE_SET) if apart % CACHE_WAY_BYTES == 0 else most


def _make_panel(conv: Convolution, number: Expr, existing: int, following: Expr) -> Panel:
    width = conv.weight.layout.tile(0)
    column = materialize(number * width)
    vectors = ceil_div(existing, conv.lanes)
    channel: Expr = tirx.const(0, "int64")
    if conv.problem.groups > 1:
        channel = materialize(column // (conv.channels // conv.problem.groups) * conv.depth)
    size = conv.problem.weight.layout.storage_bytes(conv.weight.extents, conv.weight.dtype)
    return Panel(
        column, vectors, channel_masks(conv, vectors, existing), channel, following if size > PREFETCH_BYTES else None
    )


def _emit_row(
    conv: Convolution,
    row_number: Expr,
    panel: Panel,
    tiles: tuple[Sequence[Segment], Sequence[tuple[Expr, Expr]]],
    registers: AmxTiles,
    sweep: tuple[Expr, PanelTiles],
) -> None:
    """The tiles of a row: of each segment those from a first to behind a last."""
    row = make_conv_row(conv, materialize(row_number))
    number, whole = sweep
    before: Expr = 0
    for segment, (begin, end) in zip(*tiles, strict=True):
        with loop(end - begin) as tile:
            first = materialize((tile + begin) * segment.width + segment.start)
            ahead = _make_ahead(conv, panel, number * whole.tiles + before + tile, whole)
            found = at_place(segment, conv.windows[-1], conv.data.extents[-1], first)
            emit_tile(conv, ConvTile(row, panel, found, first, ahead), registers)
        before += segment.count


def _make_ahead(conv: Convolution, panel: Panel, number: Expr, sweep: PanelTiles) -> Ahead | None:
    if panel.following is None or not isinstance(sweep.rows, int) or not isinstance(sweep.tiles, int):
        return None
    tiles = sweep.rows * sweep.tiles
    share = ceil_div(_panel_elements(conv), tiles)
    step = conv.weight.layout.tile(0) * conv.dot.k0
    return Ahead(materialize(panel.following + number * share), ceil_div(step, tiles))
