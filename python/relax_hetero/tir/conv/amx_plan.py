"""How tile registers go over a convolution: plain integers, no code.

A row of a tile of data is a pixel of a channels-last image, the rows of a tile are neighbouring places of the result,
so their pixels lie at a constant distance. A step multiplies up to 64 bytes of channels. Where the window's innermost
places lie one after the other in memory, a step may take several of them: few channels fill a tile that way.

Data are read where they lie if nothing is padded. Otherwise a task copies the rows of the image that a block of its
result needs, with zeros for the padding: once for all output channels and places of the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

from ...encoding.problem import ConvProblem, Window
from ...target.amx_instructions import TILE_BYTES, TILE_ROWS, AmxInstruction
from ...target.element_types import bytes_of
from ..core.builder import ceil_div

GROUP_BYTES = 4  # of k0 neighbouring input channels, whatever their type
COLUMNS = 16  # of a tile

# Steps that fill less of a tile cost more than vectors do.
MIN_STEP_BYTES = 16

# Copied rows of a block stay in the second-level cache; but the weight is read once for each block, so a block has so
# many places at least, as long as memory for it is moderate.
BLOCK_BYTES = 1 << 20
BLOCK_PLACES = 256
MAX_BLOCK_BYTES = 1 << 24

# Weights of more bytes are prefetched, panel by panel: those of a model come from memory or the last-level cache.
PREFETCH_BYTES = 1 << 16


@dataclass(frozen=True)
class RunSteps:
    """How the input channels of a run of the window's places divide among steps.

    Attributes
    ----------
    runs : int
        Number of runs of an innermost row of the window: its taps, or one run of all of them.
    steps : int
        Number of steps of a run.
    groups : int
        Number of groups of k0 neighbouring channels in a step.
    shared : int
        Groups of the weight that the last step reads as well as the one before; they meet zeros.
    """

    runs: int
    steps: int
    groups: int
    shared: int = 0

    @property
    def count(self) -> int:
        """Steps of an innermost row of the window."""
        return self.runs * self.steps

    @property
    def step_bytes(self) -> int:
        """Bytes of a pixel that a step reads."""
        return self.groups * GROUP_BYTES


@dataclass(frozen=True)
class Copy:
    """Where pixels of the copied rows lie.

    Attributes
    ----------
    distance : int
        Bytes from one pixel to the next.
    width : int
        Pixels of a row, padding included.
    unit : int
        Rows that are neighbours in the copy are so many apart in the image.
    """

    distance: int
    width: int
    unit: int

    def rows(self, places: int, window: Window) -> int:
        """Rows that so many rows of the result need."""
        return ((places - 1) * window.stride + window.dilated_extent - 1) // self.unit + 1

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row."""
        return self.distance * self.width


@dataclass(frozen=True)
class TilePlan:
    """How the tiles of a convolution are cut.

    Attributes
    ----------
    height : int
        Places of a tile, along the innermost dimension; the last tile of a row overlaps the one before.
    across : int
        Tiles of a row of the result.
    run : RunSteps
    rows : int
        Rows of the result in a block, along the last but one dimension.
    blocks : int
        Number of blocks along that dimension.
    copy : Copy or None
        None: data are read where they lie.
    panel : int
        Output channels of a panel, as the weight is stored.
    columns : int
        Output channels that a pair of tiles is multiplied by: those of two tiles or one, which divide a panel.
    fetched : int
        Cache lines of the next panel that a step asks for.
    """

    height: int
    across: int
    run: RunSteps
    rows: int
    blocks: int
    copy: Copy | None
    panel: int
    columns: int
    fetched: int

    @property
    def vectors(self) -> int:
        """Tiles of the weight that are multiplied at once."""
        return self.columns // COLUMNS

    @property
    def lefts(self) -> int:
        """Tiles of data that are multiplied at once, at most."""
        return min(2, self.rows * self.across)


def plan_tiles(problem: ConvProblem, instruction: AmxInstruction, parts: int) -> TilePlan | None:
    """How tiles go over a convolution; None where vectors are better, or tiles cannot read the operands.

    Parameters
    ----------
    parts : int
        Into how many parts rows of the result are shared among cores.
    """
    places = _static(problem.result.shape[2:])
    panel = problem.weight.layout.tile(0)
    if 0 in places or 0 in problem.weight.shape or panel % COLUMNS:
        return None
    columns = columns_at_once(panel)
    if problem.weight.layout.inner_dims != (0, 1) or problem.weight.layout.tile(1) != instruction.k0:
        return None
    if problem.data.layout.outer_perm != (0, *range(2, len(problem.data.shape)), 1):
        return None
    across = ceil_div(places[-1], TILE_ROWS)
    height = ceil_div(places[-1], across)
    if height < instruction.min_rows:
        return None
    copied = _steps_of(problem, instruction.k0, may_join=True, may_share=True)
    in_place = _steps_in_place(problem, instruction.k0)
    run = in_place if in_place is not None and in_place.count <= copied.count else copied
    if run.step_bytes < MIN_STEP_BYTES:
        return None
    outer = _outer(problem)
    copy = None if run is in_place else _copy(problem, run, instruction.k0)
    rows = _rows_of_block(problem, copy, places, across * height)
    if copy is not None and rows == 1:
        copy = Copy(copy.distance, copy.width, outer.dilation)
    if copy is not None and _copy_bytes(problem, copy, rows) > MAX_BLOCK_BYTES:
        return None
    extent = places[-2] if len(places) > 1 else 1
    blocks = _even_blocks(problem, ceil_div(extent, rows), extent, parts)
    rows = ceil_div(extent, blocks)
    blocks = ceil_div(extent, rows)
    weight = problem.weight.layout.storage_bytes(_static(problem.weight.shape), problem.weight.dtype)
    is_fetched = weight > PREFETCH_BYTES and columns == panel
    fetched = ceil_div(TILE_ROWS * columns // COLUMNS, ceil_div(rows * across, 2)) if is_fetched else 0
    return TilePlan(height, across, run, rows, blocks, copy, panel, columns, fetched)


def columns_at_once(panel: int) -> int:
    """Output channels that are multiplied at once, of panels of so many: two tiles of the weight, or one."""
    return COLUMNS * (1 if panel // COLUMNS % 2 else 2)


def even_steps(groups: int) -> int:
    """The fewest steps of equal numbers of groups."""
    return next(steps for steps in range(ceil_div(groups, TILE_ROWS), groups + 1) if groups % steps == 0)


def _static(extents: tuple) -> tuple[int, ...]:
    assert all(isinstance(extent, int) for extent in extents), "only the batch is symbolic"
    return extents


def _outer(problem: ConvProblem) -> Window:
    """The last window but one: blocks are cut along its dimension."""
    return problem.windows[-2] if len(problem.windows) > 1 else Window(1)


def _groups(problem: ConvProblem, k0: int) -> int:
    """Groups of k0 channels, of a pixel and one group of output channels."""
    return ceil_div(_static(problem.weight.shape)[1], k0)


def _steps_of(problem: ConvProblem, k0: int, may_join: bool, may_share: bool) -> RunSteps:
    """The steps of an innermost row of the window.

    Parameters
    ----------
    may_join : bool
        The window's places may be neighbours in memory.
    may_share : bool
        The last two steps may read the same groups of the weight.
    """
    groups, window = _groups(problem, k0), problem.windows[-1]
    apart, joined = even_steps(groups), even_steps(groups * window.size)
    if may_share:
        apart = ceil_div(groups, TILE_ROWS)
    # A block of sums stands between the places of a weight with compensation; single groups are equally far apart.
    are_even = not problem.weight.layout.compensation or groups == 1
    if may_join and are_even and window.dilation == 1 and joined < apart * window.size:
        return RunSteps(1, joined, groups * window.size // joined)
    step = ceil_div(groups, apart)
    return RunSteps(window.size, apart, step, apart * step - groups)


def _steps_in_place(problem: ConvProblem, k0: int) -> RunSteps | None:
    """None where something is padded, or the last channels are no whole group."""
    depth = _static(problem.weight.shape)[1]
    is_whole = depth % k0 == 0 or problem.data.layout.tile(1) == k0
    extents = zip(problem.windows, _static(problem.data.shape[2:]), _static(problem.result.shape[2:]), strict=True)
    is_inside = all(
        w.before == 0 and (places - 1) * w.stride + w.dilated_extent <= extent for w, extent, places in extents
    )
    if not is_whole or not is_inside:
        return None
    return _steps_of(problem, k0, may_join=problem.groups == 1, may_share=False)


def _copy(problem: ConvProblem, run: RunSteps, k0: int) -> Copy:
    window, outer = problem.windows[-1], _outer(problem)
    pixel = _groups(problem, k0) * GROUP_BYTES
    lines = ceil_div(run.steps * run.step_bytes, TILE_BYTES)
    # An odd number of cache lines: rows of a tile then fall into different sets of the first-level cache.
    distance = (lines | 1) * TILE_BYTES if run.runs == window.size else pixel
    width = (_static(problem.result.shape[2:])[-1] - 1) * window.stride + window.dilated_extent
    return Copy(distance, width, gcd(outer.stride, outer.dilation))


def _copy_bytes(problem: ConvProblem, copy: Copy, rows: int) -> int:
    planes = prod(window.size for window in problem.windows[:-2])
    return planes * copy.rows(rows, _outer(problem)) * copy.row_bytes


def _rows_of_block(problem: ConvProblem, copy: Copy | None, places: tuple[int, ...], row: int) -> int:
    """Rows of the result that a panel of the weight meets before the next one."""
    if len(places) == 1:
        return 1
    if copy is None:
        outer = _outer(problem)
        row_bytes = prod(_static((problem.data.shape[1], problem.data.shape[-1]))) * bytes_of(problem.data.dtype)
        return max(1, min(places[-2], BLOCK_BYTES // (row_bytes * outer.stride)))
    rows = places[-2]
    while rows > 1 and _copy_bytes(problem, copy, rows) > BLOCK_BYTES and (rows - 1) * row >= BLOCK_PLACES:
        rows -= 1
    while rows > 1 and _copy_bytes(problem, copy, rows) > MAX_BLOCK_BYTES:
        rows -= 1
    return rows


def _even_blocks(problem: ConvProblem, blocks: int, extent: int, parts: int) -> int:
    """As many blocks or more, which cores can share evenly."""
    planes = prod(
        extent for extent in (problem.result.shape[0], *problem.result.shape[2:-2]) if isinstance(extent, int)
    )
    for count in range(blocks, min(blocks + parts, extent + 1)):
        if planes * count % parts == 0:
            return count
    return blocks
